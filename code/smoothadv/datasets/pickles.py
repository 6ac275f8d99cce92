"""Pickled arrays, as published datasets use them, read without running code from the file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


class _ArraysOnly(pickle.Unpickler):
    """Reads dicts, lists, numbers and NumPy arrays; a file that asks for anything else is refused."""

    _ALLOWED = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy.core.numeric", "_frombuffer"),
        ("numpy._core.numeric", "_frombuffer"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks to load {module}.{name}, which no array needs")
        # NumPy 2 renamed a module: with its present name, each version reads the pickles of the other.
        old, new = "numpy.core", "numpy._core"
        present = module.replace(old, new) if int(np.__version__.split(".")[0]) >= 2 else module.replace(new, old)
        return super().find_class(present, name)


def read_pickled_arrays(path: Path) -> Any:
    """The content of a file pickled by Python 2 or 3; a damaged file can raise nearly any exception."""
    with path.open("rb") as file:
        return _ArraysOnly(file, encoding="latin1").load()
