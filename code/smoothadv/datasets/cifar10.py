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
    from torchvision.datasets.utils import check_integrity

    from smoothadv.datasets.images import InMemoryImages

    folder = data_dir or DEFAULT_DATA_DIR
    try:
        raw = CIFAR10(str(folder), train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        batches = [
            (f"{CIFAR10.base_folder}/{name}", md5)
            for name, md5 in [*CIFAR10.train_list, *CIFAR10.test_list]
        ]
        files = {
            folder / name: md5 for name, md5 in [*batches, (CIFAR10.filename, CIFAR10.tgz_md5)]
        }
        damaged = [
            path
            for path, md5 in files.items()
            if path.exists() and not check_integrity(str(path), md5)
        ]
        found = (
            f"damaged: {damaged[0]} is not the published file, by its MD5,"
            if damaged
            else f"not in {folder}"
        )
        raise UserError(
            f"cifar10 is {found} and could not be downloaded ({error}): "
            f"{'remove it and ' if damaged else ''}put cifar-10-python.tar.gz into {folder} or "
            "name its folder with --data-dir"
        ) from error
    return InMemoryImages(raw.data.transpose(0, 3, 1, 2), np.array(raw.targets), _DESCRIPTION)


DATASETS.register("cifar10")(Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load))
