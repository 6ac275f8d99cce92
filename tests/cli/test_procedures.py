"""The ways to certify, from end to end: adaptive on a grid of radii, sound in floating point, fast,
and combined.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.api import torch_settings_kept
from smoothadv.datasets import get_dataset
from support.commands import call, header, manifest_of, refused, rows, timeless
from support.image_files import save_image

COLUMNS = ["idx", "label", "predict", "radius", "correct", "time", "successes", "trials"]
ADAPTIVE = ["samples", "level", "looks"]
PAPER_RADII = [0.25 * step for step in range(10)]
SIGMA, N, EXAMPLES = 0.25, 600, 30


@pytest.fixture
def certify(checkpoint, workplace, capsys) -> Callable:
    """Certify thirty digits with few draws; options given later win."""

    usual = ["--N", N, "--max", EXAMPLES, "--device", "cpu"]
    return lambda outfile, *options, dataset="digits": call(
        capsys, "certify", dataset, checkpoint, SIGMA, outfile, *usual, *options
    )


def test_adaptive_log_says_samples_level_and_looks(certify, workplace):
    outcome = certify("log.tsv", "--method", "adaptive")
    assert header(workplace / "log.tsv") == [*COLUMNS, *ADAPTIVE]
    found = rows(workplace / "log.tsv")
    average = np.mean([float(row["radius"]) * int(row["correct"]) for row in found])
    assert f"average certified radius on the grid of radii {average:.3f}\n" in outcome.out
    for row in found:
        trials, level, looks = int(row["trials"]), int(row["level"]), int(row["looks"])
        assert 100 + trials <= int(row["samples"]) <= 100 + N
        assert 0 <= int(row["successes"]) <= trials and (trials == 0) == (looks == 0)
        if row["predict"] == "-1":
            assert (level, float(row["radius"]), row["correct"]) == (-1, 0, "0")
        else:
            assert float(row["radius"]) == PAPER_RADII[level] and looks >= 1
    assert {-1, 0, 1} <= {int(row["level"]) for row in found}, "for this test to say anything"
    assert len({row["samples"] for row in found}) > 5


def test_adaptive_needs_fewer_draws_for_nearly_the_same_statements(certify, workplace):
    """On thirty images it may lose a radius or two; it must not gain any that exact misses by
    far.
    """
    certify("exact.tsv")
    certify("adaptive.tsv", "--method", "adaptive", "--radii", 0, 0.25)
    exact, adaptive = (timeless(workplace / f"{name}.tsv") for name in ("exact", "adaptive"))
    assert sum(int(row["samples"]) for row in adaptive) < 0.7 * sum(
        100 + int(row["trials"]) for row in exact
    )
    for radius in (0.0, 0.25):
        assert len(certified_at(radius, exact) ^ certified_at(radius, adaptive)) <= 3, radius


def certified_at(radius: float, log: list[dict[str, str]]) -> set[str]:
    return {row["idx"] for row in log if row["predict"] != "-1" and float(row["radius"]) >= radius}


def test_settings_of_adaptive_are_in_the_manifest(certify, workplace):
    adaptive = ["--method", "adaptive", "--max", 1]
    certify("usual.tsv", *adaptive)
    certify("given.tsv", *adaptive, "--radii", 1, 0.5, 1.0, "--ladder", "--label-aware")
    usual, given = (
        manifest_of(workplace / name)["settings"] for name in ("usual.tsv", "given.tsv")
    )
    assert {
        "method": "adaptive",
        "radii": PAPER_RADII,
        "ladder": False,
        "label_aware": False,
    }.items() <= usual.items()
    assert {"radii": [0.0, 0.5, 1.0], "ladder": True, "label_aware": True}.items() <= given.items()
    certify("exact.tsv", "--max", 1)
    assert {"radii", "ladder", "label_aware"}.isdisjoint(
        manifest_of(workplace / "exact.tsv")["settings"]
    )


def test_label_aware_marks_the_wrong_selections_that_it_skips(certify, workplace):
    options = ["--method", "adaptive", "--radii", 0, 0.25]
    certify("plain.tsv", *options)
    assert certify("aware.tsv", *options, "--label-aware").code == 0
    assert header(workplace / "aware.tsv") == [*COLUMNS, *ADAPTIVE, "label_aware"]
    plain, aware = (timeless(workplace / f"{name}.tsv") for name in ("plain", "aware"))
    skipped = [one["correct"] for one, row in zip(plain, aware) if row["label_aware"] == "1"]
    assert 0 < len(skipped) < EXAMPLES and set(skipped) == {"0"}
    drawn = [{**one, "label_aware": "0"} for one in plain]
    assert all(row == one for row, one in zip(aware, drawn) if row["label_aware"] == "0")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_is_recorded_and_makes_a_slightly_different_classifier(
    certify, workplace, precision
):
    draws = ["--max", 12, "--N", 300]
    assert (
        certify("full.tsv", *draws).code
        == certify("less.tsv", *draws, "--precision", precision).code
        == 0
    )
    assert manifest_of(workplace / "less.tsv")["settings"]["precision"] == precision
    assert manifest_of(workplace / "full.tsv")["settings"]["precision"] == "fp32"
    counts = [
        [int(row["successes"]) for row in timeless(workplace / name)]
        for name in ("full.tsv", "less.tsv")
    ]
    far = [abs(full - less) > 30 for full, less in zip(*counts)]
    assert sum(far) <= 2, "a count may be far off where another class was selected"


@pytest.fixture
def restored_kernels(monkeypatch) -> Iterator[None]:
    """--sound restricts the whole process to deterministic kernels; the tests that follow shall not
    notice.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with torch_settings_kept():
        yield


@pytest.fixture
def eight_bit_images(workplace) -> str:
    """A dataset of PNG files: the first ten test images of the digits, as far as they show 0, 1,
    ... 9.
    """
    digits = get_dataset("digits", "test")
    for split, index in product(("train", "test"), range(10)):
        image, label = digits[index]
        flat = np.full((8, 8), 20 * index, dtype=np.uint8)
        save_image(workplace / f"png/{split}/{index}/x.png", flat)
        levels = (image[0] * 255).numpy().astype(np.uint8)
        save_image(workplace / f"png/{split}/{label}/{index}.png", levels)
    return "imagefolder:png"


def assert_squared_radii_fit(log: Path) -> None:
    """The largest integer below (255 R)^2, which is nothing but 0 for no radius."""
    found = rows(log)
    for row in found:
        squared, exact = int(row["squared_radius"]), (255 * Fraction(row["radius"])) ** 2
        assert squared < exact <= (squared + 1) * (1 + Fraction(1, 10**11)) or squared == exact == 0
    assert any(int(row["squared_radius"]) > 0 for row in found)


@pytest.mark.parametrize("method", ["exact", "adaptive"])
def test_sound_log_has_squared_radii_and_says_what_executed_it(
    certify, workplace, eight_bit_images, restored_kernels, method
):
    options = ["--sound", "--method", method, "--max", 16]
    assert certify("log.tsv", *options, dataset=eight_bit_images).code == 0
    adaptive = ADAPTIVE if method == "adaptive" else []
    assert header(workplace / "log.tsv") == [*COLUMNS, *adaptive, "squared_radius"]
    assert_squared_radii_fit(workplace / "log.tsv")
    settings = manifest_of(workplace / "log.tsv")["settings"]
    assert settings["sound"] is True and settings["noise"] == "RoundedGaussianNoise"
    executed_by = {"torch": torch.__version__, "device": "cpu", "threads": torch.get_num_threads()}
    assert executed_by.items() <= settings.items() and "cpu_capability" in settings
    certify("plain.tsv", "--max", 1)
    assert (
        not {"threads", "cpu_capability"} & manifest_of(workplace / "plain.tsv")["settings"].keys()
    )


class Dimmed:
    """Another dataset whose images from ``start`` on are darker, and thereby no longer of 8
    bits.
    """

    def __init__(self, dataset, start: int) -> None:
        self.dataset, self.start = dataset, start
        self.description, self.fingerprint = dataset.description, dataset.fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.dataset[index]
        return (image * 0.9 if index >= self.start else image), label


@pytest.mark.parametrize("start", [0, 3])
def test_sound_is_refused_at_an_image_that_is_not_of_8_bits(
    certify, workplace, restored_kernels, monkeypatch, start
):
    dimmed = Dimmed(get_dataset("digits", "test"), start)
    monkeypatch.setattr("smoothadv.evaluation.voters.get_dataset", lambda *arguments: dimmed)
    outcome = certify("log.tsv", "--sound")
    assert refused(outcome, "8-bit")
    if start == 0:
        assert (
            outcome.err.startswith("error: --sound certifies 8-bit images only")
            and "digits" in outcome.err
        )
        assert list(workplace.iterdir()) == []
        assert certify("log.tsv", "--max", 2).code == 0, "without --sound they may be certified"
