"""slurm: an array of jobs, submitted with submitit; a job is requeued if it is preempted or reaches
its time limit.
"""

import contextlib
import io
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from smoothadv.base.errors import UserError, optional_module
from smoothadv.base.settings import SettingError, positive_int, setting
from smoothadv.sweep.engines import ENGINES, Engine, ReportEnd, SweepContext, wait_for_jobs
from smoothadv.sweep.jobs import (
    DONE,
    FAILED,
    STOPPED,
    BusyError,
    SweepJob,
    execute,
    stage_environment,
)

_QUESTIONS, _PAUSE_SECONDS = 10, 15.0
_CPUS_BESIDE_A_GPU = 8
# How long a job whose stage was stopped waits for Slurm to end it, before it requeues itself.
_TAKEN_SECONDS = 120.0
_LARGEST_ARRAY = 1000  # Slurm accepts no more unless its MaxArraySize is larger
_GPU_OPTIONS = {"gpus", "gpus_per_node", "gpus_per_task", "gres"}


def _key_value(text: str) -> str:
    key, _, value = text.partition("=")
    if not key or not value:
        raise SettingError(f"'{text}' is not KEY=VALUE, like account=vision or constraint=a100")
    return text


@ENGINES.register("slurm")
@dataclass(frozen=True)
class Slurm(Engine):
    """a Slurm cluster whose nodes share this folder: an array of jobs that are requeued when they
    are preempted
    """

    partition: str | None = setting(
        None, parse=str, help="Slurm's partition (default: the cluster's)"
    )
    minutes: int = setting(
        1440,
        parse=positive_int,
        help="time limit of a job; then it is requeued and continues from its checkpoint",
    )
    cpus: int | None = setting(
        None,
        parse=positive_int,
        help=f"CPUs per process (default: {_CPUS_BESIDE_A_GPU} with a GPU, else the grid's threads "
        "or 1)",
    )
    sbatch: tuple[str, ...] | None = setting(
        None,
        parse=_key_value,
        help="further options of sbatch as KEY=VALUE, like account=vision, or gpus-per-node=a100:1 "
        "for a kind of GPU",
    )
    detach: bool = setting(False, help="return as soon as the jobs are in the queue")

    def run(self, jobs: Sequence[SweepJob], context: SweepContext, report_end: ReportEnd) -> None:
        for command in ("sbatch", "srun", "squeue"):
            if shutil.which(command) is None:
                raise UserError(
                    f"there is no {command} here: --engine slurm is for a machine that submits to "
                    "Slurm"
                )
        submitit = optional_module(
            "submitit", '--engine slurm needs submitit: pip install "smoothadv[slurm]" or submitit'
        )
        before = {job.key: job.record.read() for job in jobs}
        executor = submitit.SlurmExecutor(
            folder=context.folder / "slurm", max_num_timeout=1_000_000
        )
        executor.update_parameters(**self._parameters(jobs, context))
        ids: dict[str, str] = {}
        for start in range(0, len(jobs), _LARGEST_ARRAY):
            some = jobs[start : start + _LARGEST_ARRAY]
            for job, identity in zip(some, _submit(executor, some)):
                ids[job.key] = identity
                # Record the id under which the job waits, unless it has started already.
                with contextlib.suppress(BusyError), job.record.claim(patience=0):
                    if job.record.read() == before[job.key]:
                        job.record.write("queued", engine="slurm", id=identity)
        if self.detach:
            return
        ends = {job.key: Future[str]() for job in jobs}

        def look() -> None:
            """A job that has left the queue has ended; its record on the disk says how."""
            queue = _queue(_QUESTIONS)
            for job in jobs:
                if ids[job.key] not in queue and not ends[job.key].done():
                    state = job.record.read().get("state")
                    # The record of a job that was killed still says "running".
                    ends[job.key].set_result(state if state in (DONE, FAILED) else STOPPED)

        wait_for_jobs(jobs, lambda job: ends[job.key], len(jobs), report_end, look=look)

    def _parameters(self, jobs: Sequence[SweepJob], context: SweepContext) -> dict[str, Any]:
        processes = max(job.processes for job in jobs)
        threads = max(job.threads or 1 for job in jobs)
        cpus = self.cpus or (_CPUS_BESIDE_A_GPU if context.wants_gpus else threads)
        named = [item.split("=", 1) for item in self.sbatch or []]
        further = {"requeue": True, **{key.replace("-", "_"): value for key, value in named}}
        parameters = {
            "job_name": f"smoothadv-{context.name}",
            "time": self.minutes,
            "nodes": 1,
            "ntasks_per_node": 1,
            "cpus_per_task": cpus * processes,
            "array_parallelism": self.jobs or len(jobs),
            "additional_parameters": further,
            "stderr_to_stdout": True,
            # The processes find this package even if it is not installed.
            "setup": [f"export PYTHONPATH={shlex.quote(stage_environment(jobs[0])['PYTHONPATH'])}"],
            # Else Slurm 22.05 and later bind all processes to one core.
            "srun_args": ["--cpu-bind=none"],
        }
        if self.partition:
            parameters["partition"] = self.partition
        if context.wants_gpus and not further.keys() & _GPU_OPTIONS:
            parameters["gpus_per_node"] = processes
        return parameters

    def already_has(self, jobs: Iterable[SweepJob]) -> set[str]:
        submitted = [job for job in jobs if job.record.read().get("engine") == "slurm"]
        queue = _queue() if submitted else set()
        return {job.key for job in submitted if job.record.read().get("id") in queue}


def _submit(executor: Any, jobs: Sequence[SweepJob]) -> list[str]:
    """Submit an array of jobs; returns their ids. UserError with sbatch's message if it refuses."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        # submitit prints sbatch's message on standard error, but the UserError below has it.
        with contextlib.redirect_stderr(io.StringIO()):
            return [str(handle.job_id) for handle in executor.map_array(Attempt(), jobs)]
    except (FailedJobError, FailedSubmissionError) as error:
        said = str(error).rpartition("sbatch: error: ")[2]
        raise UserError(f"sbatch refused: {' '.join(said.split())}") from error


def _queue(questions: int = 1) -> set[str]:
    """The ids of all jobs in Slurm's queue; asks so often while Slurm's controller may be busy or
    restarting.
    """
    done = subprocess.run(["squeue", "-h", "-r", "-o", "%i"], capture_output=True, text=True)
    if done.returncode == 0:
        return set(done.stdout.split())
    if questions == 1:
        raise UserError(f"squeue: {' '.join(done.stderr.split()) or 'failed'}")
    time.sleep(_PAUSE_SECONDS)
    return _queue(questions - 1)


class Attempt:
    """What Slurm runs for each job; when the job is preempted, submitit calls ``checkpoint`` and
    requeues the job.
    """

    def __call__(self, job: SweepJob) -> str:
        """Execute the job in another thread, so that this one is free to handle Slurm's signals."""
        outcome: list[str] = []
        self._stop = stop = threading.Event()
        origin = {"engine": "slurm", "id": _job_id()}
        self._thread = threading.Thread(
            target=lambda: outcome.append(execute(job, {}, stop, origin))
        )
        self._thread.start()
        while self._thread.is_alive():
            time.sleep(0.1)
        # For lack of memory, or by a person: it would be killed again.
        was_killed = job.record.read().get("exit") in (-9, 128 + 9)
        if outcome == [STOPPED] and not stop.is_set() and not was_killed:
            # Slurm is about to take the machine: it has sent SIGTERM to every process, which
            # submitit ignores.
            time.sleep(_TAKEN_SECONDS)
            subprocess.run(["scontrol", "requeue", _job_id()], check=True)
            time.sleep(_TAKEN_SECONDS)
        return outcome[0] if outcome else FAILED

    def checkpoint(self, job: SweepJob) -> Any:
        """Let the running stage save; returns what submitit submits again: the same job."""
        import submitit

        self._stop.set()
        while self._thread.is_alive():
            time.sleep(0.1)
        return submitit.helpers.DelayedSubmission(Attempt(), job)


def _job_id() -> str:
    """Slurm's id of the job that this process belongs to; "?" outside Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "?")
