"""CIFAR-10, downloaded by torchvision into the data folder."""

from pathlib import Path

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.datasets import (
    CIFAR_MEAN,
    CIFAR_STD,
    CIFAR_TRAINING,
    DATASETS,
    DEFAULT_DATA_DIR,
    DatasetDescription,
    ImageDataset,
    Source,
)

_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_DESCRIPTION = DatasetDescription(
    "cifar10", _CLASSES, (3, 32, 32), CIFAR_MEAN, CIFAR_STD, CIFAR_TRAINING
)


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    from torchvision.datasets import CIFAR10

    from smoothadv.datasets.images import InMemoryImages

    folder = data_dir or DEFAULT_DATA_DIR
    try:
        raw = CIFAR10(str(folder), train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cifar10 is not in {folder}, or damaged, and could not be downloaded ({error}): put "
            f"cifar-10-python.tar.gz into {folder} or name its folder with --data-dir"
        ) from error
    return InMemoryImages(raw.data.transpose(0, 3, 1, 2), np.array(raw.targets), _DESCRIPTION)


DATASETS.register("cifar10")(Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load))
