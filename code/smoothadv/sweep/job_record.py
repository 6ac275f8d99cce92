"""Who works on a job, and how it ended last: a lock, a sign of life and a small file beside the
job's logs.

This record does not decide whether a job is done: the job's models and logs do. The lock prevents
two processes from working on one job, even if engines or people start it twice. The sign of life
does the same between machines that do not see each other's locks on a shared file system.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.base.files import lock, read_json, write_json

_SIGN_SECONDS = 15.0
_SILENCE_SECONDS = 4 * _SIGN_SECONDS
_LOOK_SECONDS = 0.5
_ENDING_SECONDS = 2.0  # the process that holds the job may be about to end


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
        """The content that was written last; empty if there is none, or it cannot be read."""
        try:
            content = read_json(self._file)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, state: str, **facts: Any) -> None:
        """Replace the record: ``state`` is queued, running, stopped, failed or done."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_json(
            self._file,
            {
                "state": state,
                "time": now,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                **facts,
            },
        )

    def holder(self) -> str:
        """Who works on the job now, like "node7, process 12"; "" if nobody does.

        A stage whose parent has died does not count: it has been asked to stop.
        """
        content = self.read()
        is_here = content.get("host") == socket.gethostname()
        description = f"{content.get('host', 'another machine')}, process {content.get('pid', '?')}"
        try:
            descriptor = os.open(self._lock, os.O_RDONLY)
        except OSError:
            return ""
        try:
            age = abs(
                time.time() - os.fstat(descriptor).st_mtime
            )  # a sign from the future is none, but clocks differ
            lock(
                descriptor, self._lock, shared=True
            )  # shared, so that two readers do not take each other for a holder
        except UserError:
            return "" if is_here and not _is_alive(content.get("pid")) else description
        finally:
            os.close(descriptor)
        is_running_elsewhere = (
            content.get("state") == "running" and not is_here and age < _SILENCE_SECONDS
        )
        return description if is_running_elsewhere else ""

    @contextlib.contextmanager
    def claim(self, patience: float, stop: threading.Event | None = None) -> Iterator[int]:
        """Within, this process holds the job. Yields the descriptor of the lock, which lasts while
        any copy is open.

        If a dead process has left a running stage, or a machine may be lost, this waits up to
        ``patience`` seconds or until ``stop`` is set. BusyError if somebody still holds the job
        then, or a living process of this machine does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        while True:
            if not (holder := self.holder()):
                descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    lock(descriptor, self._lock)
                    break
                except UserError:  # another process has locked it first
                    os.close(descriptor)
            is_alive = bool(holder) and self.read().get("host") == socket.gethostname()
            if time.monotonic() - start > (
                min(patience, _ENDING_SECONDS) if is_alive else patience
            ):
                raise BusyError(
                    f"{self.folder} is being worked on by {holder or 'another process'}"
                )
            if (stop or threading.Event()).wait(_LOOK_SECONDS):
                raise BusyError(
                    f"{self.folder}: stopped while waiting for the process that holds it"
                )
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            stack.enter_context(_signs_of_life(self._lock))
            yield descriptor


def _is_alive(process: Any) -> bool:
    """Whether a process with this id exists on this machine; True if that cannot be found out."""
    try:
        os.kill(int(process), 0)
    except (TypeError, ValueError, OSError) as error:
        return not isinstance(error, ProcessLookupError)
    return True


@contextlib.contextmanager
def _signs_of_life(path: Path) -> Iterator[None]:
    """Within, the file is touched every few seconds, for machines that do not see the lock."""
    ended = threading.Event()

    def touch_repeatedly() -> None:
        while not ended.wait(_SIGN_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(path)

    with contextlib.suppress(OSError):
        os.utime(path)
    thread = threading.Thread(target=touch_repeatedly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
