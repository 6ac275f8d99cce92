"""local: this machine, one job after the other, or one job per GPU."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from smoothadv.base.cpus import JOBS_AT_A_TIME
from smoothadv.base.errors import UserError, counted
from smoothadv.sweep.engines import ENGINES, Engine, ReportEnd, SweepContext, wait_for_jobs
from smoothadv.sweep.jobs import SweepJob, execute


@ENGINES.register("local")
@dataclass(frozen=True)
class Local(Engine):
    """this machine: plain processes, one job per GPU, or one after the other without GPUs"""

    def run(self, jobs: Sequence[SweepJob], context: SweepContext, report_end: ReportEnd) -> None:
        groups = self._groups(jobs, context)
        stop, free = threading.Event(), SimpleQueue[tuple[str, ...]]()
        for group in groups:
            free.put(group)

        def work(job: SweepJob) -> str:
            gpus = free.get()
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            environment[JOBS_AT_A_TIME] = str(len(groups))
            try:
                return execute(job, environment, stop, {"engine": "local"})
            finally:
                free.put(gpus)

        with ThreadPoolExecutor(len(groups)) as pool:
            try:
                wait_for_jobs(jobs, lambda job: pool.submit(work, job), len(groups), report_end)
            finally:
                stop.set()  # and then the pool waits until the stages have stopped

    def _groups(self, jobs: Sequence[SweepJob], context: SweepContext) -> list[tuple[str, ...]]:
        """For each job that runs at a time, the GPUs that it gets; empty tuples without GPUs."""
        size = max(job.processes for job in jobs)
        gpus = context.gpus if context.wants_gpus else ()
        if not gpus:
            return [()] * min(self.jobs or 1, len(jobs))
        if len(gpus) < size:
            raise UserError(
                f"a job has {size} processes, but only {counted(len(gpus), 'GPU')} visible: one "
                "each is needed"
            )
        groups = [
            tuple(gpus[start : start + size]) for start in range(0, len(gpus) - size + 1, size)
        ]
        # If more jobs run at a time than there are groups, jobs share GPUs.
        count = min(self.jobs or len(groups), len(jobs))
        return [groups[number % len(groups)] for number in range(count)]
