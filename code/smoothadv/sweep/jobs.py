"""A job trains one model and then evaluates it, skipping what is complete; the state that a job is
in; and its record, a lock and a small file beside its logs.

The record does not decide whether a job is done: the job's models and logs do. It says how the job
ended last, and its lock prevents two processes from working on one job, even if engines or people
start it twice.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from smoothadv.base.errors import UserError, counted
from smoothadv.base.files import lock, make_folder, read_json, write_json
from smoothadv.models.name import Members
from smoothadv.sweep.grid import EvaluationTable, Model
from smoothadv.sweep.stages import (
    EvaluationStage,
    Stage,
    TrainingStage,
    logged_seconds,
    unmet_need,
)

_LOOK_SECONDS = 0.5
STATES = ("waiting", "blocked", "running", "stopped", "failed", "done")
"""Of jobs. Stopped: started, not failed, and nobody works on it. Blocked: a file is missing, or the
dataset.
"""
WAITING, BLOCKED, RUNNING, STOPPED, FAILED, DONE = STATES


class BusyError(UserError):
    """Somebody else works on the job."""


class JobRecord:
    """The record of a job in ``folder``: job.json, job.lock and job.log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "job.log"
        self._lock = folder / "job.lock"

    def read(self) -> dict[str, Any]:
        """The content that was written last; empty if there is none, or it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return read_json(self.folder / "job.json")
        return {}

    def write(self, state: str, **facts: Any) -> None:
        """Replace the record: ``state`` is "queued" or one of STATES."""
        record = {
            "state": state,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **facts,
        }
        write_json(self.folder / "job.json", record)

    def holder(self) -> str:
        """Who works on the job now, like "node7, process 12"; "" if nobody does."""
        try:
            with self._lock.open("rb") as file:
                # Shared, so that two readers do not take each other for a holder.
                lock(file, self._lock, shared=True)
        except OSError:
            return ""
        except UserError:
            content = self.read()
            return f"{content.get('host', 'a machine')}, process {content.get('pid', '?')}"
        return ""

    @contextlib.contextmanager
    def claim(self, patience: float, stop: threading.Event | None = None) -> Iterator[int]:
        """Within, this process holds the job. Yields the descriptor of the lock, which lasts while
        any copy is open.

        If another process holds it, this waits up to ``patience`` seconds or until ``stop`` is set;
        then BusyError.
        """
        make_folder(self.folder)
        stop, end = stop or threading.Event(), time.monotonic() + patience
        with self._lock.open("ab") as file:
            while True:
                try:
                    lock(file, self._lock)
                    break
                except UserError:
                    if time.monotonic() >= end or stop.wait(_LOOK_SECONDS):
                        raise BusyError(
                            f"{self.folder} is being worked on by {self.holder()}"
                        ) from None
            yield file.fileno()


class JobState(NamedTuple):
    """One of STATES, and a sentence about it for people."""

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class SweepJob:
    """One model of a sweep: its training, which an ensemble does not have, and its evaluations.

    ``name`` is its folder within the sweep's models and logs. All paths are relative to ``cwd``.
    The job's own log and record are in the folder ``logs``. ``trainings`` make the ``classifier``:
    of an ensemble, they are those of its members, done by other jobs. Each stage runs in
    ``processes`` processes of ``threads`` threads (None: PyTorch's choice).

    ``pending`` are the tables for which the model may yet be chosen as one of the best.
    """

    name: str
    model: Model
    cwd: Path
    logs: Path
    classifier: Members
    trainings: tuple[TrainingStage, ...]
    evaluations: tuple[EvaluationStage, ...] = ()
    processes: int = 1
    threads: int | None = None
    pending: tuple[EvaluationTable, ...] = ()

    @property
    def group(self) -> str:
        return self.model.group

    @property
    def training(self) -> TrainingStage | None:
        return None if self.classifier.mean else self.trainings[0]

    @property
    def key(self) -> str:
        """A text that is unique among the jobs of all sweeps."""
        return str(self.logs)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (*([self.training] if self.training else []), *self.evaluations)

    @property
    def then(self) -> list[str]:
        """What follows the training, for people."""
        perhaps = (f"perhaps {table.command} {table.name}" for table in self.pending)
        return [*(stage.title for stage in self.evaluations), *perhaps]

    @property
    def record(self) -> JobRecord:
        return JobRecord(self.cwd / self.logs)


def state_of(job: SweepJob, lacking: Callable[[Sequence[str]], str] = lambda words: "") -> JobState:
    """The state of a job, judged by the files on the disk.

    ``lacking`` says why a command cannot have its images, if so.
    """
    progress = [(stage, stage.progress()) for stage in job.stages]
    unfinished = [(stage, reached) for stage, reached in progress if not reached.is_complete]
    if not unfinished:
        return JobState(DONE)
    stage, reached = unfinished[0]
    detail = f"{stage.title}: {reached}"
    if holder := job.record.holder():
        return JobState(RUNNING, f"{detail} (on {holder})")
    for _, reached in unfinished:
        if reached.conflict:
            return JobState(FAILED, reached.conflict)
    content = job.record.read()
    if content.get("state") == FAILED:
        words = content.get("stage"), content.get("line") or "no word"
        return JobState(FAILED, ": ".join(filter(None, words)))
    for path in (path for stage, _ in unfinished for path in stage.needs):
        if reason := unmet_need(path):
            return JobState(BLOCKED, reason)
    if reason := lacking(stage.words):
        return JobState(BLOCKED, reason)
    if content.get("state") == "queued":
        return JobState(WAITING, f"queued as {content.get('id')}")
    if content or any(reached.done for _, reached in progress):
        return JobState(STOPPED, detail)
    return JobState(WAITING)


def time_of_done_jobs(jobs: Sequence[SweepJob]) -> str:
    """How many jobs are done, and the times in their logs; "" if none is."""
    done = [job for job in jobs if job.stages and state_of(job).kind == DONE]
    if not done:
        return ""
    total = sum(logged_seconds(stage) for job in done for stage in job.stages)
    each, together = (timedelta(seconds=round(time)) for time in (total / len(done), total))
    return f"{counted(len(done), 'job')} done; the logs have times of {together}, {each} per job"
