"""Pickled arrays, as published datasets use them, read without running code from the file.

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
