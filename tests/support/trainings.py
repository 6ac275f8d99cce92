"""Training runs: what they learnt, bit by bit, and what happens to them at a step of choice."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from smoothadv.datasets import get_dataset
from smoothadv.datasets.images import InMemoryImages
from smoothadv.training.teacher import Teacher


@functools.lru_cache(maxsize=4)
def _read(file: Path, *version: int) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", weights_only=True)


def read(folder: Path) -> dict[str, Any]:
    """The checkpoint of a run folder, read the way a stranger would, and once until it is replaced:
    who waits for one reads it often.
    """
    file = folder / "checkpoint.pth.tar"
    return _read(file, file.stat().st_ino, file.stat().st_mtime_ns)


def step_saved(folder: Path) -> tuple[int, int]:
    """The epoch and the step of the checkpoint of a run, (0, 0) without one; a process may replace
    it meanwhile.
    """
    if not (folder / "checkpoint.pth.tar").exists():
        return 0, 0
    content = read(folder)
    return content["epoch"], content["step"]


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


def train_on_few_images(monkeypatch, count: int) -> None:
    """Let a dataset have its first ``count`` images."""

    def few(*which) -> InMemoryImages:
        whole = get_dataset(*which)
        return InMemoryImages(whole.images[:count], whole.labels[:count], whole.description)

    monkeypatch.setattr("smoothadv.training.setup.get_dataset", few)


class KnownShares(Teacher):
    """A teacher whose shares of votes float32 [N, K] are given."""

    def __init__(self, network: torch.nn.Module, shares: torch.Tensor) -> None:
        super().__init__(network)
        self.shares = shares

    def fields(self, indices: torch.Tensor, part: slice) -> dict[str, Any]:
        return {**super().fields(indices, part), "targets": self.shares[indices[part]]}
