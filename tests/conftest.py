"""Puts the package of this clone, and what tests share, on the path; keeps torch from fighting over the cores."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "code"))


@pytest.fixture
def repository() -> Path:
    """The folder of this clone."""
    return ROOT
