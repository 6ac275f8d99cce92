"""Requests to stop: a training run ends after its present step, saved."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType


class Interruption:
    """Within the context Ctrl-C and SIGTERM are only noted in ``signal``; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal = 0
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
        if number == signal.SIGINT == self.signal:
            raise KeyboardInterrupt
        if number == signal.SIGINT and sys.stderr.isatty():
            print("\nsaving after this step; Ctrl-C again stops at once", file=sys.stderr)
        self.signal = number
