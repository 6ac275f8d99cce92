"""A job trains one model and then evaluates it, skipping what is complete; the state that a job is
in; its record, a lock and a small file beside its logs; and how what is missing of it is run: each
incomplete stage in a process of its own, with its output in the job's log.

The record does not decide whether a job is done: the job's models and logs do. It says how the job
ended last, and its lock prevents two processes from working on one job, even if engines or people
start it twice.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from smoothadv.base.errors import UserError, counted, warn
from smoothadv.base.files import lock, make_folder, read_json, write_json, write_text
from smoothadv.base.provenance import without_secrets
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
_POLL_SECONDS = 0.1
# How long to wait for another attempt at the job: one whose machine may be lost, or a stage that
# saves after its sweep was killed.
_PATIENCE_SECONDS = 90.0
_LAST_BYTES = 4096
_REQUESTS = {
    getattr(signal, name, None)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGXCPU")
}
BUSY = "busy"
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
    unmet = (unmet_need(path) for one, _ in unfinished for path in one.needs)
    if reason := next(filter(None, unmet), "") or lacking(stage.words):
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


def execute(
    job: SweepJob,
    environment: Mapping[str, str],
    stop: threading.Event,
    origin: Mapping[str, Any],
) -> str:
    """Run the incomplete stages of a job; returns how that ended, and the job's record says the
    same.

    DONE, STOPPED or FAILED; BUSY if another process works on the job, BLOCKED (in the record
    STOPPED) if a file that it needs is missing. Stages get the environment of this process plus
    ``environment``. When ``stop`` is set, the running stage gets a SIGTERM. ``origin`` is what the
    record says of the engine. A stage that somebody ended by a signal is STOPPED: another call
    continues it.
    """
    try:
        with job.record.claim(_PATIENCE_SECONDS, stop) as lock:
            outcome, facts = _execute(job, environment, stop, origin, lock)
            job.record.write(STOPPED if outcome == BLOCKED else outcome, **facts, **origin)
            return outcome
    except BusyError:
        return BUSY
    except OSError as error:
        warn(f"{job.name}: {error}")
        with contextlib.suppress(OSError):
            job.record.write(FAILED, line=str(error), **origin)
        return FAILED


def _execute(
    job: SweepJob,
    environment: Mapping[str, str],
    stop: threading.Event,
    origin: Mapping[str, Any],
    lock: int,
) -> tuple[str, dict[str, Any]]:
    """How the job ended, and what its record says of that."""
    # Check all stages before the first starts: else a conflict would appear only after days of
    # training.
    for stage in job.stages:
        if conflict := stage.progress().conflict:
            return FAILED, {"stage": stage.title, "line": conflict}
    for stage in job.stages:
        if stage.progress().is_complete:
            continue
        if reason := next(filter(None, map(unmet_need, stage.needs)), ""):
            return BLOCKED, {"stage": stage.title, "line": reason}
        if stop.is_set():
            return STOPPED, {"stage": stage.title, "line": ""}
        job.record.write(RUNNING, stage=stage.title, **origin)
        if isinstance(stage, EvaluationStage) and stage.classifier.mean:
            write_text(stage.classifier.name, stage.classifier.described())
        code = _run(job, stage, environment, stop, lock)
        if code != 0:
            line = last_line(job.record.log)
            # Somebody asked the process to end; torchrun says so only in its last line. A signal
            # that a process causes itself, like SIGSEGV, is no request: it would come again.
            is_asked = (-code if code < 0 else code - 128) in _REQUESTS or "SignalException" in line
            outcome = STOPPED if stop.is_set() or is_asked else FAILED
            if outcome == FAILED and code < 0:
                line = f"ended by signal {-code}, {signal.strsignal(-code)}; before: {line}"
            return outcome, {"stage": stage.title, "line": line, "exit": code}
        if not stage.progress().is_complete:
            return FAILED, {"stage": stage.title, "line": f"ended at {stage.progress()}"}
    return DONE, {}


def _run(
    job: SweepJob, stage: Stage, environment: Mapping[str, str], stop: threading.Event, lock: int
) -> int:
    """Run a stage until it ends, and send it SIGTERM once ``stop`` is set; returns its exit code,
    minus the signal's number if a signal ended it.

    The stage inherits the descriptor ``lock``: if it outlives this process while it saves, the job
    stays locked.
    """
    launcher = ["-m"]
    if job.processes > 1:  # the "--" keeps torchrun from reading what is meant for the stage
        torchrun = "torch.distributed.run --standalone --nproc-per-node"
        launcher += [*torchrun.split(), str(job.processes), "-m", "--"]
    parent = [sys.executable, "-m", "smoothadv.sweep.stop_with_parent", str(os.getpid())]
    with job.record.log.open("ab") as log:
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        line = shlex.join(["python", *launcher, "smoothadv", *without_secrets(stage.words)])
        log.write(f"== {now} on {socket.gethostname()}\n$ {line}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [*parent, sys.executable, *launcher, "smoothadv", *stage.words],
            cwd=job.cwd,
            env={**os.environ, **stage_environment(job), **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            # Ctrl-C reaches the sweep only, which then asks every stage to stop
            start_new_session=True,
        )
        try:
            while not stop.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_POLL_SECONDS)
        finally:  # an interruption, too: the stage must not continue alone
            if process.poll() is None:
                process.terminate()
                process.wait()
    return process.returncode


def stage_environment(job: SweepJob) -> dict[str, str]:
    """The environment variables that every stage of a job gets, wherever it runs."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return variables if job.threads is None else {**variables, "OMP_NUM_THREADS": str(job.threads)}


def last_line(log: Path) -> str:
    """The last line of a log that is not blank; "" if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
