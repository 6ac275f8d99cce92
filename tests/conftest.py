"""Puts the package of this clone, and what tests share, on the path; keeps torch from fighting over the cores."""

import os
import sys
from pathlib import Path

import pytest

# Before torch is loaded: parallel test processes of many threads each are ten times slower than of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "code"))


@pytest.fixture
def repository() -> Path:
    """The folder of this clone."""
    return ROOT
