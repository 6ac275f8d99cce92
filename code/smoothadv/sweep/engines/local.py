"""local: this machine, one job after the other, or one job per GPU."""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

from smoothadv.base.cpus import JOBS_AT_A_TIME
from smoothadv.base.errors import UserError, counted
from smoothadv.sweep.engines import ENGINES, Engine, ReportEnd, SweepContext
from smoothadv.sweep.job_execution import execute
from smoothadv.sweep.jobs import SweepJob

# This long at most until Ctrl-C is noticed, even if the system delivers the signal to another
# thread.
_POLL_SECONDS = 1.0


@ENGINES.register("local")
@dataclass(frozen=True)
class Local(Engine):
    """this machine: plain processes, one job per GPU, or one after the other without GPUs"""

    def run(self, jobs: Sequence[SweepJob], context: SweepContext, report_end: ReportEnd) -> None:
        groups = self._groups(jobs, context)
        stop, thread, not_taken = threading.Event(), threading.local(), iter(groups)

        def take_gpus() -> None:
            thread.gpus = next(not_taken)

        def work(job: SweepJob) -> str:
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(thread.gpus)} if thread.gpus else {}
            return execute(
                job, {**environment, JOBS_AT_A_TIME: str(len(groups))}, stop, {"engine": "local"}
            )

        with ThreadPoolExecutor(len(groups), initializer=take_gpus) as pool:
            try:
                futures = {pool.submit(work, job): job for job in jobs}
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                    for future in done:
                        report_end(futures[future], future.result())
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)  # waits until the stages have stopped
                raise

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
