"""The datasets that have a name, one kind of source per file; here, what sources of stored images
have in common.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError, warn
from smoothadv.datasets import DatasetDescription, ImageDataset, Source, photographs
from smoothadv.datasets.preparation import split_location
from smoothadv.datasets.stored import StoredImages


def stored_source(
    kind: str,
    splits: Callable[[str], Mapping[str, StoredImages]],
    expected: Mapping[str, str],
    unprepared: Callable[[Any, DatasetDescription], ImageDataset] | None = None,
) -> Source:
    """The source ``kind``:PATH[@PREPARATION] of stored images: prepared, or as they are.

    ``splits`` finds the splits of a PATH, the training images first; ``expected`` says where
    those of a split should be. ``unprepared`` makes the dataset of images as they are (None: they
    are read when they are asked for).
    """

    def describe(location: str, data_dir: Path | None) -> DatasetDescription:
        (path, preparation), name = split_location(location), f"{kind}:{location}"
        if preparation is None:
            return _described(splits, path, name, os.path.realpath(os.path.expanduser(path)))
        first = next(iter(splits(path).values()))
        return photographs(name, first.classes, preparation.size)

    def load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
        from smoothadv.datasets.images import ImagesOnDemand, StreamedImages

        description, (path, preparation) = describe(location, None), split_location(location)
        if (stored := splits(path).get(split)) is None:
            raise UserError(f"{kind}:{path} has no {split} images, expected {expected[split]}")
        if stored.classes[0] == "0" and min(stored.labels, default=0) == 1:
            warn(
                f"{kind}:{path}: the {split} labels begin at 1, so that no image is of class 0 "
                f"among {len(stored.classes)} classes: count labels from 0"
            )
        if preparation is None:
            return (unprepared or ImagesOnDemand)(stored, description)
        return StreamedImages(stored, description, preparation)

    return Source(describe, load, takes_location=True, takes_preparation=True)


@cache
def _described(
    splits: Callable[[str], Mapping[str, StoredImages]], path: str, name: str, folder: str
) -> DatasetDescription:
    """The description of images as they are; the same path means another ``folder`` in another
    working directory.
    """
    found = splits(path)
    return next(iter(found.values())).described(name, "train" in found)
