"""Who drew a log's Gaussian noise: recorded where it was a kernel, and kept when a log is continued."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import smoothadv
from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.errors import UserError
from smoothadv.evaluation import smoothing_job
from smoothadv.noise import GaussianNoise, Rows, streams
from support.commands import timeless
from support.private_noise import settings_of

IMAGES, LABELS = np.full((3, 1, 4, 4), 51 / 255, dtype=np.float32), np.zeros(3, dtype=np.int64)
pytestmark = pytest.mark.usefixtures("one_thread")


class Bright(nn.Module):
    """Class 1 for images that are white: those of the stand-in below, and none of torch's."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot((images.float().flatten(1) == 1).all(1).long(), 2).float()


@pytest.fixture
def kernels(monkeypatch):
    """Call it with a version: from then on a stand-in for the kernels makes all images white; returns its launches."""

    def install(version: str | None) -> list[int]:
        launched = []

        def launch(kernel, out: torch.Tensor, *rest, **sizes) -> None:
            launched.append(len(out.fill_(1)))

        white = SimpleNamespace(VERSION=version, gaussian=None, rounded=None, launch=launch)
        for module in (streams, smoothing_job):
            monkeypatch.setattr(module, "kernels_on", lambda device: None if version is None else white)
        return launched

    return install


def certify(log: Path, **changes) -> list[str]:
    """The classes in the log's rows."""
    request = dict(sigma=0.25, n0=10, n=50, log=log, device="cpu", batch=64, num_classes=2)
    smoothadv.certify(Bright(), IMAGES, LABELS, **{**request, **changes})
    return [row["predict"] for row in timeless(log)]


def test_a_kernel_is_recorded_and_torch_is_not(kernels, tmp_path):
    assert certify(tmp_path / "torch.tsv") == ["0"] * 3
    assert "noise_kernel" not in settings_of(tmp_path / "torch.tsv"), "older logs have no such setting either"
    kernels("Triton 9")
    assert certify(tmp_path / "kernel.tsv") == ["1"] * 3
    assert settings_of(tmp_path / "kernel.tsv") == {**settings_of(tmp_path / "torch.tsv"), "noise_kernel": "Triton 9"}
    certify(tmp_path / "sound.tsv", sound=True)
    assert "noise_kernel" not in settings_of(tmp_path / "sound.tsv"), "its bits do not depend on who draws them"


def test_a_log_is_continued_with_the_noise_that_began_it(kernels, tmp_path):
    certify(tmp_path / "torch.tsv", skip=2)
    kernels("Triton 9")
    assert certify(tmp_path / "torch.tsv") == ["0"] * 3
    certify(tmp_path / "kernel.tsv", skip=2)
    for version in (None, "Triton 10"):
        kernels(version)
        with pytest.raises(UserError, match=f"noise_kernel was 'Triton 9', now {version!r}; --overwrite starts anew"):
            certify(tmp_path / "kernel.tsv")


def test_an_attack_has_the_noise_of_its_log(kernels, tmp_path, monkeypatch):
    """Also in its gradients, of two epsilons, of which torch's noise began one."""
    plain, noise = [], SmoothedAttack._noise

    def watched(self, *given) -> torch.Tensor:
        plain.append(self.plain_noise)
        return noise(self, *given)

    monkeypatch.setattr(SmoothedAttack, "_noise", watched)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    attack = dict(sigma=0.25, n=20, attack=PGD(0.5, 1), num_classes=2, device="cpu", folder=tmp_path)
    smoothadv.attack(module, IMAGES, LABELS, epsilons=[0.25], skip=2, **attack)
    kernels("Triton 9")
    plain.clear()
    smoothadv.attack(module, IMAGES, LABELS, epsilons=[0.25, 0.5], **attack)
    assert plain[0] and not plain[-1]
    assert "noise_kernel" not in settings_of(tmp_path / "epsilon_0.25.tsv")
    assert settings_of(tmp_path / "epsilon_0.5.tsv")["noise_kernel"] == "Triton 9"


@pytest.mark.parametrize("shares", [1, 5, 41])
def test_a_batch_takes_one_launch_and_one_upload_whatever_the_shares(kernels, shares):
    """What PyTorch is told on its meta device, which computes nothing."""
    launched, calls = kernels("Triton 9"), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    stream = GaussianNoise(0.25, 0).stream(0, "meta")
    batch = [Rows(stream, torch.zeros(3, 4, 4, device="meta"), 2 * share, 2) for share in range(shares)]
    with Watch():
        stream.noise.fill(torch.empty(100, 3, 4, 4, device="meta"), batch)
    free = {torch.ops.aten.empty, torch.ops.aten.lift_fresh, torch.ops.aten.detach}
    assert launched == [100] and set(calls) - free == {torch.ops.aten._to_copy, torch.ops.aten.fill_}
    assert calls.count(torch.ops.aten._to_copy) == calls.count(torch.ops.aten.fill_) == 1


def test_the_noise_of_all_attacked_images_takes_one_launch(kernels):
    launched, inputs = kernels("Triton 9"), torch.zeros(5, 1, 4, 4)
    noise = SmoothedAttack(PGD(0.5, 1), 0.25, 3, batch=2)._noise(inputs, [4, 7, 1, 0, 3])
    assert launched == [15] and noise.shape == (5, 3, 1, 4, 4) and (noise == 1).all()
