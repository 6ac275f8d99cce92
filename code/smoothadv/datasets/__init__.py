"""Datasets: [0, 1] images and integer labels, one source per file.

A name is ``cifar10``, ``digits``, ..., or ``imagefolder:PATH`` for a source that takes a location
after the colon. Each source registers a ``Source``, which holds two functions, in ``DATASETS``.
Only ``load`` imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from smoothadv.base.errors import UserError
from smoothadv.base.registry import Registry, discover
from smoothadv.datasets.description import DatasetDescription

if TYPE_CHECKING:
    from smoothadv.datasets import images

ImageDataset: TypeAlias = "images.ImageDataset"
"""What a source loads. For annotations: the module that defines it imports torch."""
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from.

    ``describe(location, data_dir)`` returns its DatasetDescription without reading all images;
    ``load(split, location, data_dir)`` reads a split ("train" or "test"). ``location`` is the text
    after the colon of the name, "" if there is none; a source with ``takes_location`` requires one.
    With ``takes_preparation`` it may end in "@" and a ``Preparation``, which --image-size appends.
    ``data_dir`` is None where the user named none: the source then uses its default.
    """

    describe: Callable[[str, Path | None], DatasetDescription]
    load: Callable[[str, str, Path | None], ImageDataset]
    takes_location: bool = False
    takes_preparation: bool = False


DATASETS: Registry[Source] = Registry("dataset")
DEFAULT_DATA_DIR = Path("data")


def source_of(name: str) -> tuple[Source, str]:
    """The source that the name of a dataset names, and the location; UserError where it names
    none.
    """
    kind, colon, location = name.partition(":")
    source = DATASETS[kind]
    if source.takes_location and not location:
        raise UserError(f"dataset '{name}' needs a file or folder: write {kind}:PATH")
    if colon and not source.takes_location:
        raise UserError(
            f"dataset '{name}': '{kind}' takes nothing after its name; for your own images write "
            "imagefolder:PATH"
        )
    return source, location


def describe_dataset(name: str, data_dir: str | Path | None = None) -> DatasetDescription:
    """Classes, image shape, normalization constants and training defaults of a dataset.

    ``data_dir`` is the folder of the files, also of downloaded ones (default: ``data`` in the
    working folder; for imagenet the IMAGENET_DIR variable). UserError on an unknown name or missing
    files.
    """
    source, location = source_of(name)
    return source.describe(location, Path(data_dir) if data_dir else None)


def get_dataset(name: str, split: str, data_dir: str | Path | None = None) -> ImageDataset:
    """The images of ``split`` ("train" or "test"); item i is (float32 [C, H, W] in [0, 1], int
    label), unaugmented.

    ``data_dir`` as in ``describe_dataset``. UserError on unknown names, missing or malformed files.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split '{split}'; known: {', '.join(SPLITS)}")
    source, location = source_of(name)
    return source.load(split, location, Path(data_dir) if data_dir else None)


# These import torch, which nobody needs to know the names of datasets.
discover(
    __name__,
    __path__,
    without=("given", "images", "preparation", "relabelled", "unlabelled"),
)
