"""Images that torchvision downloads into the data folder, or finds there."""

from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.datasets import DEFAULT_DATA_DIR, DatasetDescription, ImageDataset, Source
from smoothadv.datasets.arrays import checked_arrays

_Files = list[tuple[str, str]]


def _files(kind: Any, split: str) -> tuple[_Files, _Files]:
    """The published files of a class of torchvision.datasets, and those that it extracts, each as
    (path below the data folder, MD5).
    """
    if hasattr(kind, "resources"):
        return [(f"{kind.__name__}/raw/{name}", md5) for name, md5 in kind.resources], []
    if hasattr(kind, "split_list"):
        return [kind.split_list[split][1:]], []
    extracted = (*kind.train_list, *kind.test_list)
    return [(kind.filename, kind.tgz_md5)], [
        (f"{kind.base_folder}/{name}", md5) for name, md5 in extracted
    ]


def downloaded(kind: str, description: DatasetDescription) -> Source:
    """The source of the images of the class ``kind`` of torchvision.datasets: CIFAR10, CIFAR100,
    MNIST, FashionMNIST or SVHN.
    """

    def load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
        from torchvision import datasets
        from torchvision.datasets.utils import check_integrity

        from smoothadv.datasets.images import InMemoryImages

        folder, found = data_dir or DEFAULT_DATA_DIR, getattr(datasets, kind)
        splits = {"split": split} if kind == "SVHN" else {"train": split == "train"}
        try:
            raw = found(str(folder), download=True, **splits)
            labels = raw.labels if kind == "SVHN" else raw.targets
            images, labels = checked_arrays(
                np.asarray(raw.data), np.asarray(labels), "images", "labels", of=description
            )
        except Exception as error:  # a damaged file that has no MD5 can raise nearly anything
            published, extracted = _files(found, split)
            held = [(folder / name, md5) for name, md5 in (*published, *extracted)]
            damaged = [
                f"{path} is damaged"
                for path, md5 in held
                if path.exists() and not check_integrity(path, md5)
            ]
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"{description.name}: {[*damaged, f'it is not, or not whole, in {folder}'][0]}, "
                f"and could not be downloaded ({reason}): put "
                f"{', '.join(name for name, _ in published)} into {folder}, in place of what is "
                "there, or name another folder with --data-dir"
            ) from error
        return InMemoryImages(images, labels, description)

    return Source(describe=lambda location, data_dir: description, load=load)
