"""Who works on a job, and how it ended last: a lock, a sign of life and a small file beside the job's logs.

Nothing here says that a job is done: its artefacts do. The lock keeps two from working on one job, also where engines
or people start it twice; where a file system has no locks that other machines see, the sign of life does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smoothadv.errors import UserError
from smoothadv.records import lock, write_json

_SIGN_SECONDS = 15.0
_SILENCE_SECONDS = 4 * _SIGN_SECONDS
_LOOK_SECONDS = 0.5
_ENDING_SECONDS = 2.0  # a process may be about to end


class BusyError(UserError):
    """Somebody else works on the job."""


class JobRecord:
    """The record of a job in ``folder``: job.json, job.lock and job.log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "job.log"
        self._file = folder / "job.json"
        self._lock = folder / "job.lock"

    def read(self) -> dict[str, Any]:
        """What was written last; empty if nothing was, or it cannot be read."""
        try:
            content = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, state: str, **facts: Any) -> None:
        """Replace the record: ``state`` is queued, running, stopped, failed or done."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_json(self._file, {"state": state, "time": now, "host": socket.gethostname(), "pid": os.getpid(), **facts})

    def holder(self) -> str:
        """Who works on the job now, "" if nobody does, or only what a dead process has left and asked to stop."""
        content = self.read()
        is_here = content.get("host") == socket.gethostname()
        said = f"{content.get('host', 'another machine')}, process {content.get('pid', '?')}"
        try:
            descriptor = os.open(self._lock, os.O_RDONLY)
        except OSError:
            return ""
        try:
            age = time.time() - os.fstat(descriptor).st_mtime
            lock(descriptor, self._lock, shared=True)  # so that those who look do not see each other
        except UserError:
            return "" if is_here and not _is_alive(content.get("pid")) else said
        finally:
            os.close(descriptor)
        return said if content.get("state") == "running" and not is_here and age < _SILENCE_SECONDS else ""

    @contextlib.contextmanager
    def claim(self, patience: float, stop: threading.Event | None = None) -> Iterator[int]:
        """Within, the job is this process's: the descriptor of its lock, which holds as long as a copy of it is open.

        What a dead process has left, and a machine that may be lost, is waited for, up to ``patience`` seconds or until
        ``stop`` is set. BusyError if somebody has the job then, or a living process of this machine has it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        while True:
            if not (holder := self.holder()):
                descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    lock(descriptor, self._lock)
                    break
                except UserError:  # somebody was faster
                    os.close(descriptor)
            is_alive = bool(holder) and self.read().get("host") == socket.gethostname()
            if time.monotonic() - start > (min(patience, _ENDING_SECONDS) if is_alive else patience):
                raise BusyError(f"{self.folder} is being worked on by {holder or 'another process'}")
            if (stop or threading.Event()).wait(_LOOK_SECONDS):
                raise BusyError(f"{self.folder}: not waited for any longer")
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            stack.enter_context(_signs_of_life(self._lock))
            yield descriptor


def _is_alive(process: Any) -> bool:
    """Whether a process of this machine, by its number, exists; True where that cannot be known."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (TypeError, ValueError, OSError):
        return True
    return True


@contextlib.contextmanager
def _signs_of_life(path: Path) -> Iterator[None]:
    """Within, the file is touched time and again, for machines that do not see the lock."""
    ended = threading.Event()

    def touch() -> None:
        with contextlib.suppress(OSError):
            os.utime(path)

    def touch_again_and_again() -> None:
        while not ended.wait(_SIGN_SECONDS):
            touch()

    touch()
    thread = threading.Thread(target=touch_again_and_again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
