"""What the tests of the command attack share: small runs, what they leave on the disk, and reading
it plainly.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork
from smoothadv.datasets import get_dataset
from smoothadv.models.load import classifier_digest
from smoothadv.noise import GaussianNoise, NoiseKey, Purpose
from support.commands import manifest_of, rows, timeless

SIGMA, DRAWS = 0.25, 4
# Twelve images, of which some survive an attack of 0.25 and few one of 1. Options given later win.
SMALL = ["--device", "cpu", "--N", 50, "--max", 12, "--num-steps", 3, "--num-noise-vec", DRAWS]
# A network whose loss has a smooth gradient that is nowhere near zero: what rounds otherwise
# changes an attack by as little. With ReLU, or where the softmax is nearly one, it can change
# everything.
LINEAR = "linear:of-tests"


@LIBRARIES.register("linear")
def _linear(location: str, pretrained: bool, images: object) -> LibraryNetwork:
    weight = torch.sin(1.7 * torch.arange(640.0)).view(10, 64) / 2
    layer = torch.nn.Linear(64, 10)
    layer.load_state_dict({"weight": weight, "bias": torch.zeros(10)})
    return LibraryNetwork(torch.nn.Sequential(torch.nn.Flatten(), layer), "1")


def archive(log: Path) -> dict[str, np.ndarray]:
    """The arrays beside a log, read without the reader of the package."""
    with np.load(log.with_suffix(".npz"), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def l2_norms(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The norm of each perturbation, in float64."""
    perturbation = arrays["adversarial"].astype(np.float64) - arrays["image"].astype(np.float64)
    return np.sqrt((perturbation**2).sum((1, 2, 3)))


def assert_same_attack(log: Path, expected: Path) -> None:
    """Rows, manifest settings and images are equal to the last bit, and nothing of the work is left
    over.
    """
    assert timeless(log) == timeless(expected)
    assert manifest_of(log)["settings"] == manifest_of(expected)["settings"]
    found, wanted = archive(log), archive(expected)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name
    assert not log.with_name(log.name + ".examples").exists()


def accuracy(log: Path, column: str = "predict") -> float:
    return float(np.mean([row[column] == row["label"] for row in rows(log)]))


@torch.no_grad()
def noisy_logits(
    classifier: torch.nn.Module, image: Any, index: int, purpose: Purpose, draws: int, seed: int = 0
) -> torch.Tensor:
    """Logits [draws, K] of the copies of an image of ``digits`` under the first draws of its
    stream.
    """
    image = torch.as_tensor(image)
    digest = classifier_digest(classifier, {"arch": "digits_resnet8", "input_layer": "normalize"})
    key = NoiseKey(digest, get_dataset("digits", "test").fingerprint(), SIGMA, seed)
    is_attack = purpose == Purpose.ATTACK_NOISE
    noise = (
        GaussianNoise(SIGMA, key.attack_seed) if is_attack else GaussianNoise(SIGMA, seed, key=key)
    )
    return classifier(image + noise.stream(index, "cpu", purpose).draw(draws, image))


def predicted(
    classifier: torch.nn.Module, image: Any, index: int, purpose: Purpose, draws: int
) -> int:
    """PREDICT of Cohen et al. at alpha = 0.001, written out."""
    votes = np.bincount(
        noisy_logits(classifier, image, index, purpose, draws).argmax(1), minlength=10
    )
    top, runner_up = sorted(votes.tolist(), reverse=True)[:2]
    return int(votes.argmax()) if stats.binomtest(top, top + runner_up).pvalue <= 0.001 else -1
