"""A classifier cannot be made to fit its own noise; a log is continued with the noise that began it
alone.
"""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import smoothadv
from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.evaluation import setup as smoothing_job
from smoothadv.models.load import classifier_digest
from smoothadv.noise import (
    GaussianNoise,
    Noise,
    NoiseKey,
    Purpose,
    RoundedGaussianNoise,
    Rows,
    streams,
)
from support import slow_noise
from support.commands import settings_of, timeless
from support.evaluations import key_of_log
from support.operators import Operators
from support.refusals import refusal

SIGMA, SHAPE, N0, N = 0.25, (1, 8, 8), 50, 400
IMAGES = np.full((3, *SHAPE), 51 / 255, dtype=np.float32)
LABELS = np.zeros(3, dtype=np.int64)


class Recogniser(nn.Module):
    """Class 0 for the noisy images [n, C, H, W] that it was given, to the last bit, and class 1 for
    all others.
    """

    def __init__(self, noisy: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("known", self.marks(noisy).sort().values)

    @staticmethod
    def marks(images: torch.Tensor) -> torch.Tensor:
        bits = images.float().flatten(1).contiguous().view(torch.int32).long()
        multipliers = torch.arange(1, bits.shape[1] + 1) * 0x9E3779B97F4A7C1 | 1
        return (bits * multipliers).sum(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        marks = self.marks(images)
        place = torch.searchsorted(self.known, marks).clamp_max(len(self.known) - 1)
        return nn.functional.one_hot((self.known[place] != marks).long(), 2).float()


def recogniser_draws(noise: Noise) -> torch.Tensor:
    """All noisy images that certifying the three images takes, if they come from this noise."""
    draws = [
        noise.stream(index, "cpu").noisy(N0 + N, torch.from_numpy(IMAGES[index]))
        for index in range(3)
    ]
    return torch.cat(draws)


def certify(module: nn.Module, log: Path, sound: bool = False, **changes) -> list[dict[str, str]]:
    request = dict(sigma=SIGMA, n0=N0, n=N, sound=sound, log=log, device="cpu", batch=64)
    smoothadv.certify(module, IMAGES, LABELS, num_classes=2, **{**request, **changes})
    return timeless(log)


@pytest.mark.parametrize("kind", [GaussianNoise, RoundedGaussianNoise])
def test_a_network_that_recognises_public_draws_is_certified_on_none(kind, tmp_path):
    draws, sound = recogniser_draws(kind(SIGMA, 0)), kind is RoundedGaussianNoise
    module = Recogniser(draws)
    for row in certify(module, tmp_path / "log.tsv", sound):
        assert row["predict"] == "1" and float(row["radius"]) > 0.4, (
            "class 0 has probability 0 under fresh noise"
        )
    assert (module(draws).argmax(1) == 0).all(), (
        "the control: noise of the seed alone is recognised"
    )


class Hiding(Recogniser):
    """Hides the draws where ``state_dict`` does not show them, or shows them as something else than
    a tensor.
    """

    def __init__(self, noisy: torch.Tensor, place: str) -> None:
        super().__init__(noisy)
        self.place, known = place, self.known
        if place == "buffer that is not saved":
            self.register_buffer("known", known, persistent=False)
        if place == "extra state":
            del self.known
            self.known = known

    def get_extra_state(self):
        return {"known": self.known} if self.place == "extra state" else None

    def set_extra_state(self, state) -> None: ...


@pytest.mark.parametrize("place", ["buffer", "buffer that is not saved", "extra state"])
@pytest.mark.parametrize("kind", [GaussianNoise, RoundedGaussianNoise])
def test_a_network_made_for_its_own_noise_has_other_noise_from_then_on(kind, place, tmp_path):
    """Whoever puts the draws of a network into it changes the network, and thereby the draws."""
    sound = kind is RoundedGaussianNoise
    certify(Hiding(torch.zeros(1200, *SHAPE), place), tmp_path / "first.tsv", sound)
    key = key_of_log(tmp_path / "first.tsv")
    fitted = Hiding(recogniser_draws(kind(SIGMA, 0, key=key)), place)
    for row in certify(fitted, tmp_path / "fitted.tsv", sound):
        assert row["predict"] == "1"
    assert key_of_log(tmp_path / "fitted.tsv") != key
    # The control: the draws are those of the first network, which the fitted one does recognise.
    own = kind(SIGMA, 0, key=key).stream(1, "cpu").noisy(20, torch.from_numpy(IMAGES[1]))
    assert (fitted(own).argmax(1) == 0).all()


def test_architecture_input_layer_and_plugins_are_parts_of_the_key():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    settings = {"arch": "a", "input_layer": "center", "plugins": {}}
    changes = [
        {},
        {"arch": "b"},
        {"input_layer": "normalize"},
        {"plugins": {"p.py": {"sha256": "1"}}},
        {"denoiser": {"sha256": "1"}},
        {"resize": "8:bicubic"},
        {"resize": "8:bilinear"},
    ]
    assert len({classifier_digest(module, {**settings, **change}) for change in changes}) == 7
    assert classifier_digest(module, {**settings, "training": 1}) == classifier_digest(
        module, settings
    )


@pytest.mark.parametrize("buffer", [torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta")])
def test_tensors_without_values_are_refused(buffer, tmp_path):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    module.register_buffer("odd", buffer)
    assert re.search(
        "whose values cannot be read|no data", refusal(certify, module, tmp_path / "l")
    )


def test_words_of_a_key_are_known():
    """A key means the same noise for ever, or logs could not be continued or repeated."""
    key = NoiseKey("weights", "images", 0.25, 7)
    assert key.words == (1079217623, 1920939856, 818303743, 2100278315)
    assert key.attack_seed == 82735322907467330943560018102975362009


def test_all_words_of_a_key_decide_the_bits_of_a_draw():
    """Two words are the key of Philox, the others are combined with example and purpose: as in the
    slow one.

    No two examples and purposes share a stream, since exclusive or with a word keeps them apart.
    """
    key = NoiseKey("weights", "images", 0.25, 7)
    first, second, third, fourth = key.words
    noise = GaussianNoise(0.25, 7, key=key)
    for example, purpose in itertools.product([0, 5, 2**32 - 1], Purpose):
        ((_, words),) = noise.words(torch.device("cpu"), 2, 1, example, 9, purpose)
        for position in range(2):
            expected = slow_noise.philox(
                (position, 9, example ^ third, purpose ^ fourth), (first, second)
            )
            assert tuple(int(word[0, position]) for word in words) == expected


class Bright(nn.Module):
    """Class 1 for images that are white: those of the stand-in below, and none of torch's."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot((images.float().flatten(1) == 1).all(1).long(), 2).float()


@pytest.fixture
def kernels(monkeypatch):
    """Call it with a version: from then on a stand-in for the kernels makes all images white;
    returns its launches.
    """

    def install(version: str | None) -> list[int]:
        launched = []

        def launch(kernel, out: torch.Tensor, *rest, **sizes) -> None:
            launched.append(len(out.fill_(1)))

        white = SimpleNamespace(VERSION=version, gaussian=None, rounded=None, launch=launch)
        for module in (streams, smoothing_job):
            monkeypatch.setattr(
                module, "kernels_on", lambda device: None if version is None else white
            )
        return launched

    return install


def classes_of(log: Path, **changes) -> list[str]:
    return [row["predict"] for row in certify(Bright(), log, **changes)]


def test_a_kernel_is_recorded_and_torch_is_not(kernels, tmp_path):
    assert classes_of(tmp_path / "torch.tsv") == ["0"] * 3
    assert "noise_kernel" not in settings_of(tmp_path / "torch.tsv")
    kernels("Triton 9")
    assert classes_of(tmp_path / "kernel.tsv") == ["1"] * 3
    assert settings_of(tmp_path / "kernel.tsv") == {
        **settings_of(tmp_path / "torch.tsv"),
        "noise_kernel": "Triton 9",
    }
    classes_of(tmp_path / "sound.tsv", sound=True)
    assert "noise_kernel" not in settings_of(tmp_path / "sound.tsv"), (
        "its bits do not depend on who draws them"
    )


@pytest.mark.parametrize(
    "begun, now", [(None, "Triton 9"), ("Triton 9", None), ("Triton 9", "Triton 10")]
)
def test_a_log_is_continued_by_the_kernel_that_began_it_alone(kernels, tmp_path, begun, now):
    """Also an attack's log, with --sound too: its gradients have Gaussian noise."""
    module, log = nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), tmp_path / "log.tsv"
    nn.init.zeros_(module[1].weight), nn.init.constant_(module[1].bias[:1], 9)
    attack = dict(sigma=SIGMA, n=20, attack=PGD(0.5, 1), num_classes=2, device="cpu", against=log)
    words = f"noise_kernel was {begun!r}, now {now!r};"
    for sound in (True, False):
        kernels(begun)
        certify(module, log, sound, existing="overwrite", skip=2)
        smoothadv.falsify(module, IMAGES, LABELS, outdir=tmp_path / str(sound), **attack)
        assert settings_of(tmp_path / str(sound) / "against.tsv").get("noise_kernel") == begun
        kernels(now)
        given = module, IMAGES, LABELS
        message = refusal(smoothadv.falsify, *given, outdir=tmp_path / str(sound), **attack)
        assert f"{words} existing=" in message
    refusal(certify, module, log, names=words)


@pytest.mark.parametrize("shares", [1, 5, 41])
def test_a_batch_takes_one_launch_and_one_upload_whatever_the_shares(kernels, shares):
    """What PyTorch is told on its meta device, which computes nothing."""
    launched = kernels("Triton 9")
    stream = GaussianNoise(0.25, 0).stream(0, "meta")
    batch = [
        Rows(stream, torch.zeros(3, 4, 4, device="meta"), 2 * share, 2) for share in range(shares)
    ]
    with Operators() as seen:
        stream.noise.fill(torch.empty(100, 3, 4, 4, device="meta"), batch)
    aten = torch.ops.aten
    free = {aten.empty, aten.lift_fresh, aten.detach}
    assert launched == [100]
    assert [each for each in seen.calls if each not in free] == [aten._to_copy, aten.fill_]


def test_the_noise_of_all_attacked_images_takes_one_launch(kernels):
    launched, inputs = kernels("Triton 9"), torch.zeros(5, 1, 4, 4)
    noise = SmoothedAttack(PGD(0.5, 1), 0.25, 3, batch=2)._noise(inputs, [4, 7, 1, 0, 3])
    assert launched == [15] and noise.shape == (5, 3, 1, 4, 4) and (noise == 1).all()
