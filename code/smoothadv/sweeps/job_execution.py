"""Brings one job to its end: every stage that is not complete as a process of its own, its output in the job's log."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from smoothadv.sweeps.job_record import BusyError, JobRecord
from smoothadv.sweeps.jobs import Job
from smoothadv.sweeps.stages import Stage, unmet_need

PACKAGE_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.1
# How long another attempt at the job, which may have lost its machine, is waited for.
_PATIENCE_SECONDS = 90.0
_LAST_BYTES = 4096
_REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGXCPU")
DONE, STOPPED, FAILED, BUSY, BLOCKED = "done", "stopped", "failed", "busy", "blocked"


def execute(
    job: Job, environment: Mapping[str, str], stop: threading.Event, origin: Mapping[str, Any] | None = None
) -> str:
    """Do what is missing of a job; returns DONE, STOPPED or FAILED, which its record says too, or BLOCKED by a file.

    ``environment`` is added to that of this process for the stages. When ``stop`` is set, the present stage is asked to
    stop, as by SIGTERM. ``origin`` is what the record says of the engine. A stage that somebody ended by a signal is
    STOPPED: the same again continues it. BusyError where somebody else works on the job.
    """
    record = job.record
    with record.claim(_PATIENCE_SECONDS, stop) as lock:
        facts = dict(origin or {})
        # Of all stages before the first is begun: days of training would else end in what can be known now.
        for stage in job.stages:
            if conflict := stage.progress().conflict:
                return _end(record, FAILED, stage, conflict, facts)
        for stage in job.stages:
            if stage.progress().is_complete:
                continue
            if missing := [reason for path in stage.needs if (reason := unmet_need(path))]:
                _end(record, STOPPED, stage, missing[0], facts)
                return BLOCKED
            if stop.is_set():
                return _end(record, STOPPED, stage, "", facts)
            record.write("running", stage=stage.title, **facts)
            code = _run(job, stage, environment, stop, lock)
            if code != 0:
                line = last_line(record.log)
                kind = STOPPED if stop.is_set() or _is_by_request(code, line) else FAILED
                if kind == FAILED and code < 0:
                    line = f"ended by signal {-code}, {signal.strsignal(-code)}; before: {line}"
                return _end(record, kind, stage, line, {**facts, "exit": code})
            if not stage.progress().is_complete:
                return _end(record, FAILED, stage, f"ended at {stage.progress()}", facts)
        record.write(DONE, **facts)
    return DONE


def attempt(
    job: Job, environment: Mapping[str, str], stop: threading.Event, origin: Mapping[str, Any] | None = None
) -> str:
    """As ``execute``, for engines: BUSY where somebody else works on the job, FAILED where a file is in the way."""
    try:
        return execute(job, environment, stop, origin)
    except BusyError:
        return BUSY
    except OSError as error:
        line = f"{error.filename or 'input/output'}: {error.strerror or error}"
        try:
            job.record.write(FAILED, line=line, **(origin or {}))
        except OSError:  # it is the record's own folder or disk that is in the way
            print(f"warning: {job.name}: {line}", file=sys.stderr)
        return FAILED


def _end(record: JobRecord, kind: str, stage: Stage, line: str, facts: Mapping[str, Any]) -> str:
    record.write(kind, stage=stage.title, line=line, **facts)
    return kind


def _is_by_request(code: int, line: str) -> bool:
    """Whether somebody wanted the process to end; torchrun says so in its last ``line`` only.

    Signals that a process brings upon itself, like SIGSEGV, would come again.
    """
    number = -code if code < 0 else code - 128
    return number in {getattr(signal, name, None) for name in _REQUESTS} or "SignalException" in line


def _run(job: Job, stage: Stage, environment: Mapping[str, str], stop: threading.Event, lock: int) -> int:
    """Run a stage to its end; its exit code, negative for the number of a signal.

    It has the descriptor ``lock`` too: should it outlive this process, saving its work, the job is not free before.
    """
    launcher = _launcher(job)
    record = job.record
    with record.log.open("ab") as log:
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        typed = shlex.join(["python", *launcher, "smoothadv", *stage.words])
        log.write(f"== {now} on {socket.gethostname()}\n$ {typed}\n".encode())
        log.flush()
        tied = [sys.executable, "-m", "smoothadv.sweeps.stop_with_parent", str(os.getpid())]
        process = subprocess.Popen(
            [*tied, sys.executable, *launcher, "smoothadv", *stage.words],
            cwd=job.cwd,
            env={**os.environ, **stage_environment(job), **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C is for the sweep, which then asks every stage to stop
        )
        try:
            return _wait(process, stop)
        except BaseException:  # an interruption: the stage must not go on alone
            process.terminate()
            process.wait()
            raise


def _wait(process: subprocess.Popen[bytes], stop: threading.Event) -> int:
    """The exit code of a process, which is asked to stop once ``stop`` is set."""
    asked = False
    while True:
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if stop.is_set() and not asked:
                asked = True
                process.terminate()


def _launcher(job: Job) -> Sequence[str]:
    """What starts a module in as many processes as a stage has: Python, or torchrun."""
    if job.processes == 1:
        return ["-m"]
    # What follows the module's name would else be read by torchrun too.
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes), "-m", "--"]


def stage_environment(job: Job) -> dict[str, str]:
    """What the stages of a job find in their environment, wherever they run."""
    paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return own if job.threads is None else {**own, "OMP_NUM_THREADS": str(job.threads)}


def last_line(log: Path) -> str:
    """The last line of a log that says something; "" if there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
