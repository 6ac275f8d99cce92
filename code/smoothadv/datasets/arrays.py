"""Arrays as files hold them: images and labels, checked and in one layout; and pickled arrays, as
published datasets use them, read without running code from the file.

A pickle names functions of NumPy and says what to call them with. NumPy trusts such calls: a pickle
that states an array's type falsely makes it take numbers for addresses. So the file gets stand-ins,
which build arrays of plain numbers or text whose size is that of their content, and nothing else.
"""

import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.datasets import DatasetDescription, ImageDataset, refusing

MOST_CLASSES = 100_000
_PSEUDO_LABELLED = ("data", "images"), ("extrapolated_targets", "labels")


def checked_arrays(
    images: np.ndarray, labels: np.ndarray, *names: str
) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 or float32 [N, C, H, W], and labels, int64 [N]; ValueError where they cannot be
    meant. Labels may be a column, as those of MedMNIST.
    """
    shape, kind = list(images.shape), images.dtype
    images = images[:, None] if images.ndim == 3 else images
    if images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    is_level = kind == np.uint8 or (
        kind == np.float32 and images.size and images.min() >= 0 and images.max() <= 1
    )
    if not (is_level and images.size and images.ndim == 4 and images.shape[1] in (1, 3)):
        raise ValueError(
            f"{names[0]} is {kind} {shape}, expected [N, H, W, C] or [N, C, H, W] of 1 or 3 "
            f"channels, uint8 or float32 in [0, 1]{_range(images)}"
        )
    is_number = labels.shape in ((len(images),), (len(images), 1)) and labels.dtype.kind in "iu"
    if not (is_number and 0 <= labels.min() <= labels.max() < MOST_CLASSES):
        raise ValueError(
            f"{names[1]} is {labels.dtype} {list(labels.shape)}, expected "
            f"{len(images)} whole numbers from 0 to {MOST_CLASSES - 1}{_range(labels)}"
        )
    return np.ascontiguousarray(images), labels.reshape(-1).astype(np.int64)


def _range(values: np.ndarray) -> str:
    if not values.size or values.dtype.kind not in "iuf":
        return ""
    return f"; it has values from {values.min():g} to {values.max():g}"


def in_memory(
    images: np.ndarray,
    labels: np.ndarray,
    description: DatasetDescription,
    names: tuple[str, str] = ("images", "labels"),
) -> ImageDataset:
    """Images, uint8, and labels as a dataset; ValueError or UserError where they are not those of
    the description. Only who calls this waits for torch.
    """
    from smoothadv.datasets.images import InMemoryImages

    return InMemoryImages(*checked_arrays(images, labels, *names), description)


def load_pseudo_labelled(path: Path, description: DatasetDescription) -> ImageDataset:
    """The images of a .npz file or of a pickled dict of arrays, with the labels that a classifier
    gave them, to train on in addition to the described dataset (Carmon et al., 2019).

    ``data`` (or ``images``) is uint8 [N, H, W, C] or [N, C, H, W], or [N, H, W] for one channel;
    ``extrapolated_targets`` (or ``labels``) holds N class numbers. UserError for a missing, damaged
    or unfitting file.
    """
    if not path.is_file():
        raise UserError(f"--use-unlabelled: {path} does not exist")
    with refusing(f"--use-unlabelled: {path} cannot be read as a .npz file or a pickle of arrays"):
        content, names = read_arrays(path), list[str]()
        for known in _PSEUDO_LABELLED:
            found = [name for name in known if content.get(name) is not None]
            if not found:
                held = ", ".join(map(str, content))[:200] or "nothing"
                raise ValueError(f"it lacks {' or '.join(known)}; it holds {held}")
            names.append(found[0])
        # Copies are writable, as PyTorch requires.
        images, labels = (np.array(plain_array(content[name])) for name in names)
        extended = replace(description, name=f"pseudo-labelled {path.name}")
        return in_memory(images, labels, extended, (names[0], names[1]))


def read_arrays(path: Path) -> Mapping[Any, Any]:
    """The arrays of a .npz file, whatever its name, or of a pickled dict, where each is a
    PickledArray; a damaged file can raise any exception.
    """
    if zipfile.is_zipfile(path):
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    with path.open("rb") as file:
        content = _ArraysOnly(file, encoding="latin1").load()
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, no dict")
    return content


class PickledArray:
    """An array in a pickle; ``plain_array`` makes it a NumPy array."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        self.content = _array(content, dtype, shape, "F" if is_fortran else "C")


class _Type:
    """The type of an array's entries: bool, whole or floating-point numbers, or text."""

    def __init__(self, name: str, *copying: bool) -> None:
        if not re.fullmatch(r"[biufSU]\d{1,9}", name):
            raise pickle.UnpicklingError(
                f"it asks to load an array of type {name[:20]!r}, neither numbers nor text"
            )
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *parts = state[:5]
        if order not in ("<", ">", "|", "=") or parts != [None] * 3:
            raise pickle.UnpicklingError(
                "it asks to load an array of a type that is made of others"
            )
        self.dtype = self.dtype.newbyteorder(order)


def _array(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """An array over ``content``; ValueError or TypeError unless it has the size that type and shape
    say.
    """
    if isinstance(content, str):  # Python 2 wrote bytes as text
        content = content.encode("latin1")
    is_known = isinstance(dtype, _Type) and order in ("C", "F")
    if not (is_known and isinstance(content, (bytes, bytearray))):
        raise TypeError("it holds an array of something else than bytes")
    is_shape = isinstance(shape, tuple) and len(shape) <= 64
    if not (
        is_shape
        and all(type(side) is int and side >= 0 for side in shape)
        and math.prod(shape) * dtype.dtype.itemsize == len(content)
    ):
        raise ValueError(
            f"it holds an array of {len(content)} bytes whose shape and type say otherwise"
        )
    return np.ndarray(shape, dtype.dtype, content, order=order)


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> PickledArray:
    """An array of pickle protocol 5; ``axes`` is the order of the axes in memory where ``order`` is
    "K".
    """
    made = PickledArray()
    flat = _array(content, dtype, shape, "C" if order == "K" else order)
    made.content = flat if axes is None else flat.transpose(axes)
    return made


def _encode(text: Any, encoding: Any) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise ValueError("it asks for bytes in an encoding that no array needs")
    return str.encode(text, encoding)


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): PickledArray,
    ("_codecs", "encode"): _encode,
    ("numpy.core.multiarray", "_reconstruct"): lambda *ignored: PickledArray(),
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
}


class _ArraysOnly(pickle.Unpickler):
    """Reads dicts, lists, numbers, text and arrays; a file that asks for anything else is
    refused.
    """

    def find_class(self, module: str, name: str) -> Any:
        # NumPy 2 renamed a module.
        stand_in = _STAND_INS.get((module.replace("numpy._core", "numpy.core"), name))
        if stand_in is None:
            raise pickle.UnpicklingError(f"it asks to load {module}.{name}, which no array needs")
        # A pickle can set attributes of the function.
        return lambda *arguments: stand_in(*arguments)


def plain_array(value: Any) -> np.ndarray:
    """An array, number, text or list of these as a NumPy array, perhaps read-only; TypeError for
    anything else.
    """
    if isinstance(value, PickledArray):
        return value.content
    if isinstance(value, np.ndarray):
        return value
    entries = value if isinstance(value, list) else [value]
    # Lists in lists may fill any memory.
    if not all(isinstance(entry, (bool, int, float, str)) for entry in entries):
        raise TypeError(f"it holds a {type(value).__name__} of something else than numbers")
    return np.asarray(value)
