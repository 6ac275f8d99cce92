"""The ways to certify, from end to end: adaptive on a grid of radii, sound in floating point, fast,
and combined.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch

from smoothadv.api import torch_settings_kept
from smoothadv.datasets import get_dataset
from support.commands import call, header, refused, rows, settings_of
from support.image_files import save_image

COLUMNS = ["idx", "label", "predict", "radius", "correct", "time", "successes", "trials"]
ADAPTIVE = ["samples", "level", "looks"]
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
    assert {-1, 0, 1} <= {int(row["level"]) for row in found}, "for this test to say anything"
    assert len({row["samples"] for row in found}) > 5


def test_precision_is_recorded_and_makes_a_slightly_different_classifier(certify, workplace):
    logs = {precision: workplace / f"{precision}.tsv" for precision in ("fp32", "bf16", "fp16")}
    for precision, log in logs.items():
        assert certify(log, "--max", 12, "--N", 300, "--precision", precision).code == 0
        assert settings_of(log)["precision"] == precision
        counts = [
            (int(full["successes"]), int(less["successes"]))
            for full, less in zip(rows(logs["fp32"]), rows(log), strict=True)
        ]
        far = [abs(full - less) > 30 for full, less in counts]
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


@pytest.mark.parametrize("method", ["exact", "adaptive"])
def test_sound_log_has_squared_radii_and_says_what_executed_it(
    certify, workplace, eight_bit_images, restored_kernels, method
):
    options = ["--sound", "--method", method, "--max", 16]
    assert certify("log.tsv", *options, dataset=eight_bit_images).code == 0
    adaptive = ADAPTIVE if method == "adaptive" else []
    assert header(workplace / "log.tsv") == [*COLUMNS, *adaptive, "squared_radius"]
    assert any(int(row["squared_radius"]) > 0 for row in rows(workplace / "log.tsv"))
    settings = settings_of(workplace / "log.tsv")
    assert settings["sound"] is True and settings["noise"] == "RoundedGaussianNoise"
    executed_by = {"torch": torch.__version__, "device": "cpu", "threads": torch.get_num_threads()}
    assert executed_by.items() <= settings.items() and "cpu_capability" in settings
    certify("plain.tsv", "--max", 1)
    assert not {"threads", "cpu_capability"} & settings_of(workplace / "plain.tsv").keys()


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
