"""Training runs: what they learnt, bit by bit, and what happens to them at a step of choice."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from smoothadv.training.teacher import Teacher, for_label


def read(folder: Path) -> dict[str, Any]:
    """The checkpoint of a run folder, read the way a stranger would."""
    return torch.load(folder / "checkpoint.pth.tar", map_location="cpu", weights_only=True)


@functools.lru_cache(maxsize=1)
def _step_saved(folder: Path, version: tuple[int, int]) -> tuple[int, int]:
    content = read(folder)
    return content["epoch"], content["step"]


def step_saved(folder: Path) -> tuple[int, int]:
    """The epoch and the step of the checkpoint of a run, (0, 0) without one; a process may replace
    it meanwhile.
    """
    file = folder / "checkpoint.pth.tar"
    if not file.exists():
        return 0, 0
    found = file.stat()
    return _step_saved(folder, (found.st_ino, found.st_mtime_ns))  # who waits reads each once


def same_state(one: Path, other: Path) -> bool:
    """Whether two run folders hold bit-identical weights and optimizer states."""
    states = [
        [read(folder)[part] for part in ("state_dict", "optimizer")] for folder in (one, other)
    ]
    (first, form), (second, other_form) = map(tree_flatten, states)
    return form == other_form and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(first, second)
    )


# A checkpoint after every step that takes 6 ms: nearly every one.
AT_ONCE = ["--checkpoint-minutes", 0.0001]


def after_update(monkeypatch, number: int, act: Callable[[], None], kind=torch.optim.SGD) -> None:
    """Let ``act`` happen within the ``number``-th update from now on, counted from 1, when its
    weights are there.
    """
    step, count = kind.step, 0

    def stepping(optimizer, *arguments):
        nonlocal count
        step(optimizer, *arguments)
        count += 1
        if count == number:
            act()

    monkeypatch.setattr(kind, "step", stepping)


def send(number: signal.Signals = signal.SIGTERM) -> None:
    """A signal to this process, which it has received when this returns."""
    os.kill(os.getpid(), number)


def look_shortly(monkeypatch) -> None:
    """Choose training images by a sixteenth of the noisy copies that were asked for."""
    monkeypatch.setattr(
        "smoothadv.training.run.for_label", lambda draws, label: for_label(draws // 16, label)
    )


class KnownShares(Teacher):
    """A teacher whose shares of votes float32 [N, K] are given."""

    def __init__(self, network: torch.nn.Module, shares: torch.Tensor) -> None:
        super().__init__(network)
        self.shares = shares

    def fields(self, indices: torch.Tensor, part: slice) -> dict[str, Any]:
        return {**super().fields(indices, part), "targets": self.shares[indices[part]]}
