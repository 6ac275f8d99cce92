"""What an undisturbed sweep makes, and a folder to run the same one in."""

from pathlib import Path

import pytest

from support import sweep_runs


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Path:
    return sweep_runs.undisturbed(tmp_path_factory.mktemp("reference"))


@pytest.fixture
def folder(tmp_path) -> Path:
    return sweep_runs.lay_out(tmp_path / "sweep")
