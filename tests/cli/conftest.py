"""The classifier of most tests of the commands."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from smoothadv.checkpoints import load_classifier
from smoothadv.cli import analyze as command
from smoothadv.cli.runner import run
from support.commands import Outcome, call


@pytest.fixture(scope="session")
def main_of_analyze() -> Callable[[list[str]], int]:
    """The command with a parser that is made once, which takes longer than most analyses."""
    return partial(run, "analyze", cache(command._make_parser), command._analyze)


@pytest.fixture
def analyze(
    workplace: Path,
    capsys: pytest.CaptureFixture,
    main_of_analyze: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Outcome]:
    """The command, in an empty folder."""
    monkeypatch.setattr(command, "main", main_of_analyze)
    return lambda *arguments: call(capsys, "analyze", *arguments)


@pytest.fixture(scope="session")
def classifier(checkpoint: Path) -> torch.nn.Module:
    return load_classifier(checkpoint, "digits")
