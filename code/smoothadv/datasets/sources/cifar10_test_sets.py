"""Other test images for classifiers of CIFAR-10, as published arrays in the data folder: CIFAR-10.1
(Recht et al., 2018) and CIFAR-10-C (Hendrycks and Dietterich, 2019).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from smoothadv.base.errors import UserError, counted
from smoothadv.datasets import (
    DATASETS,
    DEFAULT_DATA_DIR,
    DatasetDescription,
    ImageDataset,
    Source,
    refusing,
)
from smoothadv.datasets.arrays import in_memory
from smoothadv.datasets.sources.downloaded import CIFAR10

_CORRUPTIONS = """
    gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost
    fog brightness contrast elastic_transform pixelate jpeg_compression speckle_noise gaussian_blur
    spatter saturate
""".split()
_SEVERITIES, _IMAGES = ("1", "2", "3", "4", "5"), 10_000
_Arrays = tuple[str, str, int, slice]
"""The files of images, uint8 [N, 32, 32, 3], and of labels, below the data folder; N; and which of
the images and labels are meant.
"""


def _source(name: str, arrays: Callable[[str], _Arrays], location: str = "") -> Source:
    """The source of the test images that ``arrays`` finds for a location."""

    def describe(location: str, data_dir: Path | None) -> DatasetDescription:
        arrays(location)
        return replace(CIFAR10, name=f"{name}:{location}" if location else name)

    def load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
        description, (*files, count, chosen) = describe(location, data_dir), arrays(location)
        if split != "test":
            raise UserError(
                f"{description.name} has test images only; those to train on are in cifar10"
            )
        folder, names = data_dir or DEFAULT_DATA_DIR, " and ".join(files)
        published = f"the published {names} in {folder} (--data-dir)"
        with refusing(f"{description.name} needs {published}"):
            images, labels = (np.load(folder / file, mmap_mode="r") for file in files)
            if not len(images) == len(labels) == count:
                raise ValueError(
                    f"found {counted(len(images), 'image')} and {counted(len(labels), 'label')}, "
                    f"expected {count:,}"
                )
            return in_memory(images[chosen], labels[chosen], description, (files[0], files[1]))

    return Source(describe, load, takes_location=bool(location), location=location)


def _version(number: str, count: int) -> Callable[[str], _Arrays]:
    files = f"cifar10.1_{number}_data.npy", f"cifar10.1_{number}_labels.npy"
    return lambda location: (*files, count, slice(None))


def _corrupted(location: str) -> _Arrays:
    """Of CORRUPTION/SEVERITY; a file holds the test images at severity 1, then at 2, ..."""
    corruption, _, severity = location.partition("/")
    if corruption not in _CORRUPTIONS or severity not in _SEVERITIES:
        raise UserError(
            f"dataset 'cifar10-c:{location}': write cifar10-c:CORRUPTION/SEVERITY with a severity "
            f"from 1 to 5 and one of {', '.join(_CORRUPTIONS)}"
        )
    start = _IMAGES * _SEVERITIES.index(severity)
    files = f"CIFAR-10-C/{corruption}.npy", "CIFAR-10-C/labels.npy"
    return *files, _IMAGES * len(_SEVERITIES), slice(start, start + _IMAGES)


# The authors recommend v6; v4 is the one on which they first measured.
DATASETS.register("cifar10.1")(_source("cifar10.1", _version("v6", 2000)))
DATASETS.register("cifar10.1-v4")(_source("cifar10.1-v4", _version("v4", 2021)))
DATASETS.register("cifar10-c")(_source("cifar10-c", _corrupted, "CORRUPTION/SEVERITY"))
