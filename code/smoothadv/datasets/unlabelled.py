"""Images with the labels that a classifier gave them, for self-training (Carmon et al., 2019)."""

import dataclasses
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.images import InMemoryImages
from smoothadv.datasets.pickles import plain_array, read_pickled_arrays

_IMAGES = ("data", "images")
_LABELS = ("extrapolated_targets", "labels")


def load_pseudo_labelled(path: Path, description: DatasetDescription) -> InMemoryImages:
    """The images of a .npz file or of a pickled dict of arrays, to train on in addition to the
    described dataset.

    ``data`` (or ``images``) is uint8 [N, H, W, C] or [N, C, H, W], or [N, H, W] for one channel;
    ``extrapolated_targets`` (or ``labels``) holds N class numbers. UserError for a missing, damaged
    or unfitting file.
    """
    if not path.is_file():
        raise UserError(f"--use-unlabelled: {path} does not exist")
    try:
        content = _read(path)
        images, labels = _array(content, _IMAGES), _array(content, _LABELS)
    except Exception as error:  # a damaged file can raise nearly anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--use-unlabelled: {path} cannot be read as a .npz file or a pickle of arrays: "
            f"{reason}"
        ) from error
    images = _channels_first(images, description, path)
    if (
        labels.shape != images.shape[:1]
        or not np.issubdtype(labels.dtype, np.integer)
        or not len(labels)
    ):
        raise UserError(
            f"--use-unlabelled: {path} holds labels of shape {list(labels.shape)} and type "
            f"{labels.dtype} for {len(images)} images; expected a whole number for each"
        )
    outside = (labels < 0) | (labels >= description.num_classes)
    if outside.any():
        raise UserError(
            f"--use-unlabelled: {path} holds the label {labels[outside][0]}; {description.name} "
            f"has the classes 0 to {description.num_classes - 1}"
        )
    name = dataclasses.replace(description, name=f"pseudo-labelled {path.name}")
    return InMemoryImages(images, labels.astype(np.int64), name)


def _read(path: Path) -> Mapping[str, Any]:
    if zipfile.is_zipfile(path):  # a .npz file, whatever its name
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    content = read_pickled_arrays(path)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, no dict")
    return content


def _array(content: Mapping[str, Any], names: tuple[str, ...]) -> np.ndarray:
    """A copy of the first of ``names`` that exists; writable, as PyTorch requires."""
    for name in names:
        if content.get(name) is not None:
            return np.array(plain_array(content[name]))
    held = ", ".join(map(str, list(content)[:8])) + (", ..." if len(content) > 8 else "")
    raise ValueError(f"it lacks {' or '.join(names)}; it holds {held or 'nothing'}")


def _channels_first(images: np.ndarray, description: DatasetDescription, path: Path) -> np.ndarray:
    """The images as uint8 [N, C, H, W]; UserError unless they have the dataset's image shape."""
    channels, height, width = description.image_shape
    if images.dtype == np.uint8:
        if images.shape[1:] == (height, width, channels):
            return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        if images.shape[1:] == (channels, height, width) or (
            channels == 1 and images.shape[1:] == (height, width)
        ):
            return np.ascontiguousarray(images.reshape(-1, channels, height, width))
    raise UserError(
        f"--use-unlabelled: {path} holds images of shape {list(images.shape)} and type "
        f"{images.dtype}; {description.name} needs uint8 [N, {height}, {width}, {channels}] or [N, "
        f"{channels}, {height}, {width}]"
    )
