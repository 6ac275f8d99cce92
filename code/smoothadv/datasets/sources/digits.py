"""The 8x8 handwritten digits bundled with scikit-learn: real images that need no download."""

from functools import cache
from pathlib import Path

import numpy as np

from smoothadv.datasets import DATASETS, DatasetDescription, ImageDataset, Source, TrainingDefaults
from smoothadv.datasets.arrays import in_memory

_DESCRIPTION = DatasetDescription(
    name="digits",
    class_names=tuple("0123456789"),
    image_shape=(1, 8, 8),
    mean=(0.3054,),
    std=(0.3753,),  # of the training split, over all pixels
    defaults=TrainingDefaults(batch=128, epochs=60, learning_rate=0.1, learning_rate_step=20),
    crop_padding=0,
    horizontal_flip=False,
)


@cache
def _arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images uint8 [1797, 1, 8, 8], labels int64 [1797], and which of them are test images, bool
    [1797].

    The 17 grey levels 0..16 of the pixels become the nearest of 0..255. The last fifth of every
    class, in the order of the file, is for testing: a stratified, fixed split, whose test images
    are mostly by other writers.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * 255 / 16).astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = np.flatnonzero(labels == label)
        is_test[members[len(members) - round(len(members) / 5) :]] = True
    return images, labels, is_test


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    images, labels, is_test = _arrays()
    chosen = is_test if split == "test" else ~is_test
    return in_memory(images[chosen], labels[chosen], _DESCRIPTION)


DATASETS.register("digits")(Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load))
