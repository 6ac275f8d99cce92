"""Pickled arrays, as published datasets use them, read without running code from the file: arrays
of plain numbers or text, in dicts and lists, and nothing else.
"""

import codecs
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np


def _dtype(name: str, *copying: bool) -> np.dtype:
    """The type of an array's entries: bool, whole or floating-point numbers, or text."""
    if not re.fullmatch(r"[biufSU]\d{1,9}", name):
        raise pickle.UnpicklingError(
            f"it asks to load an array of type {name[:20]!r}, neither numbers nor text"
        )
    return np.dtype(name, *copying)


def _reconstruct(*ignored: Any) -> np.ndarray:
    """An array that gets its shape, type and content next."""
    return np.empty(0)


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,  # named for ``_reconstruct``; it cannot be called
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0],
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        key = module.replace("numpy._core", "numpy.core"), name  # NumPy 2 renamed a module
        if key not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks to load {module}.{name}, which no array needs")
        return _KNOWN[key]


def read_pickled_arrays(path: Path) -> Any:
    """The content of a pickled file; a damaged one can raise any exception."""
    with path.open("rb") as file:
        return _ArraysOnly(file, encoding="latin1").load()


def plain_array(value: Any) -> np.ndarray:
    """An array, number, text or list of these as a NumPy array, perhaps read-only; TypeError for
    anything else.
    """
    if isinstance(value, np.ndarray):
        return value
    entries = value if isinstance(value, list) else [value]
    # Lists in lists may fill any memory.
    if not all(isinstance(entry, (bool, int, float, str)) for entry in entries):
        raise TypeError(f"it holds a {type(value).__name__} of something else than numbers")
    return np.asarray(value)
