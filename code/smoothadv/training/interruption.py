"""Requests to stop: a training run ends after its present step, saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

_SECONDS_OF_ONE_REQUEST = 1.0


class Interruption:
    """Within the context Ctrl-C and SIGTERM are only noted in ``signal``; a second Ctrl-C, later, stops at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._noted = 0.0
        self._process = os.getpid()
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # others cannot receive signals
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process that reads files, which the training process ends
            return
        # torchrun passes on a Ctrl-C that the terminal has sent to all: two signals, one request.
        is_another = time.monotonic() - self._noted > _SECONDS_OF_ONE_REQUEST
        if number == signal.SIGINT == self.signal and is_another:
            raise KeyboardInterrupt
        if not self.signal:
            self._noted = time.monotonic()
            if number == signal.SIGINT and sys.stderr.isatty():
                print("\nsaving after this step; Ctrl-C again stops at once", file=sys.stderr)
        self.signal = number
