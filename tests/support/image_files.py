"""Image files for the tests of datasets, and the images that a dataset must have."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def save_image(path: Path, pixels: np.ndarray) -> Path:
    """Save uint8 pixels, [H, W, 3] or [H, W], losslessly; the suffix decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def random_image(seed: int, height: int = 4, width: int = 5, channels: int = 3) -> np.ndarray:
    """Random uint8 pixels, [H, W, 3], or [H, W] for one channel."""
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def assert_holds(dataset, images: np.ndarray, labels: Sequence[int]) -> None:
    """A dataset has these uint8 pixels [N, C, H, W] and labels, in a batch and one by one."""
    batches = [torch.arange(len(images))]
    ((found, numbers),) = dataset.evaluation_batches(batches, torch.device("cpu"))
    assert len(dataset) == len(images) and numbers.tolist() == [*labels]
    assert np.array_equal(found.numpy(), images / np.float32(255))
    assert torch.equal(dataset[1][0], found[1]) and dataset[1][1] == labels[1]
