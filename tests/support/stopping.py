"""Things that happen to a training run in this process at a step of one's choice."""

import os
import signal
from collections.abc import Callable

import torch

AT_ONCE = ["--checkpoint-minutes", 0.0001]
"""A checkpoint after every step that takes 6 ms: nearly every one."""


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
