"""Packages that need not be installed: tests of them are skipped where they are not, and say so."""

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Marks a test of these optional packages, by the names that Python imports."""
    # The folder tests/datasets can be imported, too: such a package without a file has no origin.
    found = [getattr(find_spec(name), "origin", None) for name in packages]
    missing = [name for name, origin in zip(packages, found) if origin is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
