"""The plain implementations that the benchmarks compare with, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def plain_module(name: str) -> ModuleType:
    """benchmarks/NAME.py, which is on no path."""
    spec = importlib.util.spec_from_file_location(name, _BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
