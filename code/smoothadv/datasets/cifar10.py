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
        files = [(CIFAR10.filename, CIFAR10.tgz_md5)]
        for name, md5 in (*CIFAR10.train_list, *CIFAR10.test_list):
            files.append((f"{CIFAR10.base_folder}/{name}", md5))
        held = [(folder / name, md5) for name, md5 in files if (folder / name).exists()]
        damaged = [f"{path} is damaged" for path, md5 in held if not check_integrity(path, md5)]
        raise UserError(
            f"cifar10: {[*damaged, f'it is not in {folder}'][0]}, and it could not be downloaded "
            f"({error}): put cifar-10-python.tar.gz into {folder} or name its folder with "
            "--data-dir"
        ) from error
    return InMemoryImages(raw.data.transpose(0, 3, 1, 2), np.array(raw.targets), _DESCRIPTION)


DATASETS.register("cifar10")(Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load))
