"""Writes image files for the tests of datasets that read folders."""

from pathlib import Path

import numpy as np
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


def chw(pixels: np.ndarray) -> np.ndarray:
    """The float32 [C, H, W] in [0, 1] that a dataset must make of the pixels [H, W, C] or [H,
    W].
    """
    planes = (
        pixels[None]
        if pixels.ndim == 2
        else np.stack([pixels[:, :, channel] for channel in range(3)])
    )
    return planes.astype(np.float32) / np.float32(255)
