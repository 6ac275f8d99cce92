"""Runs what is missing of one job: each incomplete stage in a process of its own, with its output
in the job's log.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from smoothadv.base.errors import warn
from smoothadv.base.provenance import without_secrets
from smoothadv.sweep.jobs import (
    BLOCKED,
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    BusyError,
    SweepJob,
)
from smoothadv.sweep.stages import EvaluationStage, Stage, unmet_need

PACKAGE_ROOT = Path(__file__).parents[2]
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
        for path in stage.needs:
            if reason := unmet_need(path):
                return BLOCKED, {"stage": stage.title, "line": reason}
        if stop.is_set():
            return STOPPED, {"stage": stage.title, "line": ""}
        job.record.write(RUNNING, stage=stage.title, **origin)
        if isinstance(stage, EvaluationStage):
            stage.prepare()
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
    paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return variables if job.threads is None else {**variables, "OMP_NUM_THREADS": str(job.threads)}


def last_line(log: Path) -> str:
    """The last line of a log that is not blank; "" if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
