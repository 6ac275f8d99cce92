"""slurm: an array of jobs through submitit, requeued where they are preempted or reach their time limit."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from smoothadv.errors import UserError
from smoothadv.settings import positive_int, setting
from smoothadv.sweeps.engines import ENGINES
from smoothadv.sweeps.engines.engine import Engine, ReportEnd, Site, package_on_path
from smoothadv.sweeps.job_execution import DONE, FAILED, STOPPED, attempt
from smoothadv.sweeps.job_record import BusyError
from smoothadv.sweeps.jobs import Job

_POLL_SECONDS = 2.0
_QUESTIONS, _PAUSE_SECONDS = 10, 15.0
_CPUS_BESIDE_A_GPU = 8
# How long a job whose stage was told to stop waits for Slurm to end it, before it asks for another turn itself.
_TAKEN_SECONDS = 120.0
_ALWAYS = 1_000_000
# What has run out of memory, or was killed by a person, would be killed again.
_KILLED = (-9, 128 + 9)
_LARGEST_ARRAY = 1000  # what Slurm takes unless its MaxArraySize says more


_GPU_OPTIONS = {"gpus", "gpus_per_node", "gpus_per_task", "gres"}
_OWN_OPTIONS = {
    "time": "write --minutes",
    "partition": "write --partition",
    "cpus_per_task": "write --cpus",
    **dict.fromkeys(
        (
            "array",
            "error",
            "job_name",
            "nodes",
            "ntasks",
            "ntasks_per_node",
            "open_mode",
            "output",
            "requeue",
            "signal",
        ),
        "the sweep says that itself",
    ),
}


def _key_value(text: str) -> str:
    if "=" not in text.strip("="):
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE, like account=vision or constraint=a100")
    key = text.partition("=")[0].replace("-", "_")
    if key in _OWN_OPTIONS:
        raise argparse.ArgumentTypeError(f"'{text}': {_OWN_OPTIONS[key]}")
    return text


@ENGINES.register("slurm")
@dataclass(frozen=True)
class Slurm(Engine):
    """a Slurm cluster whose nodes share this folder: an array of jobs that are requeued when they are preempted"""

    partition: str | None = setting(None, parse=str, help="of Slurm (default: the cluster's)")
    minutes: int = setting(
        1440, parse=positive_int, help="time limit of a job, after which it is requeued and goes on from its checkpoint"
    )
    cpus: int | None = setting(
        None,
        parse=positive_int,
        help=f"per process (default: {_CPUS_BESIDE_A_GPU} beside a GPU, else the grid's threads or 1)",
    )
    sbatch: list[str] | None = setting(
        None,
        parse=_key_value,
        many=True,
        help="further options of sbatch as KEY=VALUE, like account=vision, or gpus-per-node=a100:1 for a kind of GPU",
    )
    detach: bool = setting(False, help="return once the jobs are in the queue")

    def run(self, jobs: Sequence[Job], site: Site, report_end: ReportEnd) -> None:
        submitit = _submitit()
        before = {job.key: job.record.read() for job in jobs}
        executor = submitit.SlurmExecutor(folder=site.folder / "slurm", max_num_timeout=_ALWAYS)
        executor.update_parameters(**self._parameters(jobs, site))
        ids: dict[str, str] = {}
        for start in range(0, len(jobs), _LARGEST_ARRAY):
            some = jobs[start : start + _LARGEST_ARRAY]
            for job, identity in zip(some, _submit(submitit, executor, some)):
                ids[job.key] = identity
                _note_queued(job, identity, before[job.key])
        if not self.detach:
            self._wait(list(jobs), ids, report_end)

    def _parameters(self, jobs: Sequence[Job], site: Site) -> dict[str, Any]:
        """What submitit tells sbatch."""
        processes = max(job.processes for job in jobs)
        threads = max(job.threads or 1 for job in jobs)
        cpus = self.cpus or (_CPUS_BESIDE_A_GPU if site.wants_gpus else threads)
        further = {key.replace("-", "_"): value for key, value in (item.split("=", 1) for item in self.sbatch or [])}
        parameters = {
            "job_name": f"smoothadv-{site.name}",
            "time": self.minutes,
            "nodes": 1,
            "ntasks_per_node": 1,
            "cpus_per_task": cpus * processes,
            "array_parallelism": self.jobs or len(jobs),
            "additional_parameters": {"requeue": True, **further},
            "stderr_to_stdout": True,
            "srun_args": ["--cpu-bind=none"],  # else Slurm 22.05 and later bind all to one core
        }
        if self.partition:
            parameters["partition"] = self.partition
        if site.wants_gpus and not further.keys() & _GPU_OPTIONS:
            parameters["gpus_per_node"] = processes
        return parameters

    @staticmethod
    def _wait(jobs: list[Job], ids: dict[str, str], report_end: ReportEnd) -> None:
        """Tell of each job when it has left the queue; how it ended is on the disk."""
        while jobs:
            queue = _queue_at_last()
            for job in [job for job in jobs if ids[job.key] not in queue]:
                jobs.remove(job)
                said = job.record.read().get("state", STOPPED)
                # A job that was killed could not say so.
                report_end(job, said if said in (DONE, FAILED) else STOPPED)
            if jobs:
                time.sleep(_POLL_SECONDS)

    def already_has(self, jobs: Iterable[Job]) -> set[str]:
        submitted = [job for job in jobs if job.record.read().get("engine") == "slurm"]
        queue = _queue() if submitted else set()
        return {job.key for job in submitted if job.record.read().get("id") in queue}


def _submitit() -> Any:
    """The package, or a UserError."""
    for command in ("sbatch", "srun", "squeue"):
        if shutil.which(command) is None:
            raise UserError(f"there is no {command} here: --engine slurm is for a machine that submits to Slurm")
    try:
        import submitit
    except ImportError as error:
        raise UserError('--engine slurm needs submitit: pip install "smoothadv[slurm]" or submitit') from error
    return submitit


def _submit(submitit: Any, executor: Any, jobs: Sequence[Job]) -> list[str]:
    """Submit an array; the ids of its jobs. UserError with what sbatch says if it refuses."""
    try:
        # submitit repeats what sbatch says, which the error below tells.
        with package_on_path(), contextlib.redirect_stderr(io.StringIO()):
            return [str(handle.job_id) for handle in executor.map_array(Attempt(), jobs)]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        said = [line.removeprefix("sbatch: error: ") for line in str(error).splitlines() if "error: " in line]
        raise UserError(f"sbatch refused: {'; '.join(said) or ' '.join(str(error).split())}") from error


def _queue() -> set[str]:
    """The ids of all jobs that Slurm has, waiting or running."""
    try:
        done = subprocess.run(["squeue", "-h", "-r", "-o", "%i"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("there is no squeue here: --engine slurm is for a machine that submits to Slurm") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"squeue: {' '.join(error.stderr.split()) or 'failed'}") from None
    return set(done.stdout.split())


def _queue_at_last() -> set[str]:
    """As ``_queue``, but a controller that is busy or restarted is asked again for a while."""
    for _ in range(_QUESTIONS - 1):
        try:
            return _queue()
        except UserError:
            time.sleep(_PAUSE_SECONDS)
    return _queue()


def _note_queued(job: Job, identity: str, before: dict[str, Any]) -> None:
    """Write down where the job waits, unless it has begun."""
    try:
        with job.record.claim(patience=0):
            if job.record.read() == before:
                job.record.write("queued", engine="slurm", id=identity)
    except BusyError:
        pass


class Attempt:
    """What Slurm runs for each job, and what submitit asks to be submitted again when the job is preempted."""

    def __init__(self) -> None:
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, job: Job) -> str:
        """Execute the job in a thread, so that the signals of Slurm find this one idle."""
        outcome: list[str] = []
        self._stop = threading.Event()
        origin = {"engine": "slurm", "id": _own_id()}
        stop = self._stop
        self._thread = threading.Thread(target=lambda: outcome.append(attempt(job, {}, stop, origin)))
        self._thread.start()
        self._watch()
        if outcome == [STOPPED] and not stop.is_set() and job.record.read().get("exit") not in _KILLED:
            # Slurm asked every process to stop, which submitit overhears: it is about to take the machine.
            time.sleep(_TAKEN_SECONDS)
            subprocess.run(["scontrol", "requeue", _own_id()], check=True)
            time.sleep(_TAKEN_SECONDS)
        return outcome[0] if outcome else FAILED

    def _watch(self) -> None:
        assert self._thread is not None
        while self._thread.is_alive():
            time.sleep(0.1)

    def checkpoint(self, job: Job) -> Any:
        """Let the present stage save, and say what is to be done in the next turn: the same."""
        import submitit

        if self._stop is not None:
            self._stop.set()
            self._watch()
        return submitit.helpers.DelayedSubmission(Attempt(), job)


def _own_id() -> str:
    """The id of the job that this process is."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "?")
