"""The classifier of most tests of the commands, and a process under torchrun."""

from pathlib import Path

import pytest
import torch

from smoothadv.checkpoints import load_classifier
from support.sharding import OneWorker


@pytest.fixture(scope="session")
def classifier(checkpoint: Path) -> torch.nn.Module:
    return load_classifier(checkpoint, "digits")


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one that torchrun has started alone."""
    monkeypatch.setattr("smoothadv.evaluation.setup.join_workers", OneWorker)
