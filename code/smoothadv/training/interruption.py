"""Requests to stop: a training run saves after its present step and ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_SECONDS_OF_ONE_REQUEST = 1.0
_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Interruption:
    """A context in which Ctrl-C and SIGTERM only set ``signal``; a second Ctrl-C, a second later,
    stops at once.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._noted = 0.0
        self._process = os.getpid()
        self._before: dict[int, _Handler] = {}

    def __enter__(self) -> Interruption:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # only this thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if (
            os.getpid() != self._process
        ):  # a forked worker that reads files: the training process ends it
            return
        # The terminal sends Ctrl-C to all processes, and torchrun forwards it: two signals for one
        # request.
        is_another = time.monotonic() - self._noted > _SECONDS_OF_ONE_REQUEST
        if number == signal.SIGINT == self.signal and is_another:
            raise KeyboardInterrupt
        if not self.signal:
            self._noted = time.monotonic()
            if number == signal.SIGINT and sys.stderr.isatty():
                print("\nsaving after this step; Ctrl-C again stops at once", file=sys.stderr)
        self.signal = number
