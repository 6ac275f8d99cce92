"""The classifier of most tests of the commands."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from smoothadv.checkpoints import load_classifier
from support.commands import Outcome, call


@pytest.fixture
def analyze(workplace: Path, capsys: pytest.CaptureFixture) -> Callable[..., Outcome]:
    """The command, in an empty folder."""
    return lambda *arguments: call(capsys, "analyze", *arguments)


@pytest.fixture(scope="session")
def classifier(checkpoint: Path) -> torch.nn.Module:
    return load_classifier(checkpoint, "digits")
