"""Trained once per test session: a classifier of each kind, for the tests of all commands."""

from pathlib import Path

import pytest
import torch

from smoothadv.checkpoints import load_classifier
from support.commands import succeed
from support.recipes import EPOCHS, RECIPES
from support.sharding import OneWorker


class Trained(dict[str, Path]):
    """The run folder of three epochs under each recipe that is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, name: str) -> Path:
        (command, options), folder = RECIPES[name], self.root / name
        succeed(command, "digits", "digits_resnet8", folder, "--epochs", EPOCHS, "--device", "cpu", *options)
        self[name] = folder
        return folder


@pytest.fixture(scope="session")
def trained_folders(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def checkpoint(trained_folders: Trained) -> Path:
    """A classifier of digits, trained under Gaussian noise of 0.25."""
    return trained_folders["gaussian"] / "checkpoint.pth.tar"


@pytest.fixture(scope="session")
def classifier(checkpoint: Path) -> torch.nn.Module:
    return load_classifier(checkpoint, "digits")


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one that torchrun has started alone."""
    monkeypatch.setattr("smoothadv.evaluation.smoothing_job.join_workers", OneWorker)
