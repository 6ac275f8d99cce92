"""Trained once per test session: a classifier of each kind, for the tests of all commands."""

from pathlib import Path

import pytest

from support.commands import succeed
from support.recipes import EPOCHS, RECIPES


@pytest.fixture(scope="session")
def trained_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folders of three epochs under each recipe."""
    root = tmp_path_factory.mktemp("trained")
    for name, (command, options) in RECIPES.items():
        succeed(command, "digits", "digits_resnet8", root / name, "--epochs", EPOCHS, "--device", "cpu", *options)
    return {name: root / name for name in RECIPES}


@pytest.fixture(scope="session")
def checkpoint(trained_folders: dict[str, Path]) -> Path:
    """A classifier of digits, trained under Gaussian noise of 0.25."""
    return trained_folders["gaussian"] / "checkpoint.pth.tar"
