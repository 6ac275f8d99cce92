"""Arrays as files hold them: images and labels, checked and in one layout; and pickled arrays, as
published datasets use them, read without running code from the file.

A pickle names functions of NumPy and says what to call them with. NumPy trusts such calls: a pickle
that states an array's type falsely makes it take numbers for addresses. So the file gets stand-ins,
which build arrays of plain numbers or text whose size is that of their content, and nothing else.
"""

import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.datasets import DatasetDescription

MOST_CLASSES = 100_000


def checked_arrays(
    images: np.ndarray, labels: np.ndarray, *names: str, of: DatasetDescription | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 or float32 [N, C, H, W], and labels, int64 [N]; ValueError where they cannot be
    meant, or are not uint8 images of the shape and labels of the classes in ``of``. Labels may be a
    column, as those of MedMNIST.
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
    if of is not None and (kind != np.uint8 or images.shape[1:] != of.image_shape):
        raise ValueError(
            f"{names[0]} is {kind} {list(images.shape)}, [N, C, H, W]; {of.name} needs uint8 "
            f"[N, {', '.join(map(str, of.image_shape))}]"
        )
    if of is not None and labels.max() >= of.num_classes:
        raise ValueError(
            f"{names[1]} has the label {labels.max()}; {of.name} has the classes 0 to "
            f"{of.num_classes - 1}"
        )
    return np.ascontiguousarray(images), labels.reshape(-1).astype(np.int64)


def _range(values: np.ndarray) -> str:
    if not values.size or values.dtype.kind not in "iuf":
        return ""
    return f"; it has values from {values.min():g} to {values.max():g}"


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
    content = (
        content.encode("latin1") if isinstance(content, str) else content
    )  # Python 2 wrote bytes as text
    if (
        not isinstance(content, (bytes, bytearray))
        or not isinstance(dtype, _Type)
        or order not in ("C", "F")
    ):
        raise TypeError("it holds an array of something else than bytes")
    if (
        not isinstance(shape, tuple)
        or len(shape) > 64
        or not all(type(side) is int and side >= 0 for side in shape)
    ):
        raise TypeError("it holds an array of no shape")
    if math.prod(shape) * dtype.dtype.itemsize != len(content):
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


def read_pickled_arrays(path: Path) -> Any:
    """The content of a pickled file, with a PickledArray for each array; a damaged one can raise
    any exception.
    """
    with path.open("rb") as file:
        return _ArraysOnly(file, encoding="latin1").load()


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
