"""The benchmarks, and the plain implementations that they compare with, as modules."""

import importlib
from types import ModuleType

import pytest

from support.commands import CODE


def plain_module(name: str) -> ModuleType:
    """benchmarks/NAME.py, which finds those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CODE.parent / "benchmarks"))
        return importlib.import_module(name)
