"""The classifier of most tests of the commands."""

from pathlib import Path

import pytest
import torch

from smoothadv.checkpoints import load_classifier


@pytest.fixture(scope="session")
def classifier(checkpoint: Path) -> torch.nn.Module:
    return load_classifier(checkpoint, "digits")
