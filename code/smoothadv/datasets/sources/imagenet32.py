"""Downsampled ImageNet, 32x32 (Chrabaszcz et al., 2017): the published pickled batches."""

from pathlib import Path

import numpy as np

from smoothadv.datasets import (
    CIFAR_MEAN,
    CIFAR_STD,
    DATASETS,
    DEFAULT_DATA_DIR,
    DatasetDescription,
    ImageDataset,
    Source,
    TrainingDefaults,
    refusing,
)
from smoothadv.datasets.arrays import checked_arrays, in_memory, plain_array, read_arrays
from smoothadv.datasets.sources.imagenet import OF_KIT

_DESCRIPTION = DatasetDescription(
    name="imagenet32",
    class_names=OF_KIT,
    image_shape=(3, 32, 32),
    mean=CIFAR_MEAN,
    std=CIFAR_STD,  # the paper's code uses CIFAR-10's, so that weights can be fine-tuned there
    defaults=TrainingDefaults(batch=256, epochs=150, learning_rate=0.1, learning_rate_step=50),
)
_FILES = {"train": [f"train_data_batch_{part}" for part in range(1, 11)], "test": ["val_data"]}

_RELEASED = "Imagenet32_train"
"""Where the code released with SmoothAdv has the training batches, in the folder of val_data."""


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """One file: images uint8 [N, 3, 32, 32] and labels 0..999, which the files count from 1."""
    with refusing(f"imagenet32 batch {path} (--data-dir names its folder) cannot be read"):
        batch = read_arrays(path)
        images = plain_array(batch["data"]).reshape(-1, 3, 32, 32)
        labels = plain_array(batch["labels"]).astype(np.int64) - 1
        if labels.max(initial=0) >= _DESCRIPTION.num_classes:
            raise ValueError(f"it has the label {labels.max() + 1}, expected 1 to 1000")
        return checked_arrays(images, labels, "data", "labels - 1")


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    folder = data_dir or DEFAULT_DATA_DIR
    is_here = (folder / _FILES[split][0]).exists()
    if split == "train" and not is_here and (folder / _RELEASED).is_dir():
        folder = folder / _RELEASED
    parts = [_read(folder / name) for name in _FILES[split]]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
    return in_memory(images, labels, _DESCRIPTION)


DATASETS.register("imagenet32")(
    Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load)
)
