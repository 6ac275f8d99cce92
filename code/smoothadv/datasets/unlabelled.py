"""Images with the labels that a classifier gave them, for self-training (Carmon et al., 2019)."""

import dataclasses
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.arrays import checked_arrays, plain_array, read_pickled_arrays
from smoothadv.datasets.images import InMemoryImages


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
        held = (("data", "images"), ("extrapolated_targets", "labels"))
        names = [_held(content, known) for known in held]
        # Copies are writable, as PyTorch requires.
        images, labels = (np.array(plain_array(content[name])) for name in names)
        images, labels = checked_arrays(images, labels, *names, of=description)
    except Exception as error:  # a damaged file can raise nearly anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--use-unlabelled: {path} cannot be read as a .npz file or a pickle of arrays: "
            f"{reason}"
        ) from error
    name = dataclasses.replace(description, name=f"pseudo-labelled {path.name}")
    return InMemoryImages(images, labels, name)


def _read(path: Path) -> Mapping[str, Any]:
    if zipfile.is_zipfile(path):  # a .npz file, whatever its name
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    content = read_pickled_arrays(path)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, no dict")
    return content


def _held(content: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first of ``names`` that there is."""
    for name in names:
        if content.get(name) is not None:
            return name
    raise ValueError(
        f"it lacks {' or '.join(names)}; it holds {', '.join(map(str, content))[:200] or 'nothing'}"
    )
