"""Engines find machines for jobs, one engine per file. They only schedule: the files on the disk
decide what is done.

An engine is a frozen dataclass derived from ``Engine``, in ``ENGINES``; its settings are options of
``sweep run``. Each makes futures, as of concurrent.futures, of jobs; ``wait_for_jobs`` waits for
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

from smoothadv.base.registry import Registry, discover
from smoothadv.base.settings import positive_int, setting
from smoothadv.sweep.jobs import SweepJob

ReportEnd = Callable[[SweepJob, str], None]
"""An engine calls this once for each job that it has finished with; the text is how the job ended,
like "done".
"""


# This long at most until Ctrl-C is noticed, even if the system delivers the signal to another
# thread.
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class SweepContext:
    """Where a sweep is started: its ``name``, its ``folder`` of logs, and the names of the ``gpus``
    visible here, none of which are to be used unless ``wants_gpus``.
    """

    name: str
    folder: Path
    gpus: tuple[str, ...] = ()
    wants_gpus: bool = True


@dataclass(frozen=True)
class Engine(ABC):
    """Finds machines for jobs. ``jobs`` is how many it runs at a time (None: as many as the
    machines have room for).
    """

    jobs: int | None = setting(
        None,
        parse=positive_int,
        help="jobs that run at a time (default: local: one per GPU, or per group of GPUs if a job "
        "has several processes, or one if there are no GPUs; slurm, ray: as many as the machines "
        "have room for)",
    )

    @abstractmethod
    def run(self, jobs: Sequence[SweepJob], context: SweepContext, report_end: ReportEnd) -> None:
        """Have every job executed; returns when all have ended or, if detached, when all are in the
        queue.

        None of the ``jobs`` is complete. ``report_end`` is called as each ends, with "busy" if
        another process works on it. Each process of a job gets a GPU of its own if there are GPUs.
        Before KeyboardInterrupt leaves this method, the stages that run here are asked to stop, and
        waited for.
        """

    def already_has(self, jobs: Iterable[SweepJob]) -> set[str]:
        """The keys of the ``jobs`` that are in the engine's queue since an earlier call."""
        return set()


def wait_for_jobs(
    jobs: Sequence[SweepJob],
    submit: Callable[[SweepJob], Future[str]],
    at_a_time: int,
    report_end: ReportEnd,
    outcome: Callable[[Future[str]], str] = Future.result,
    look: Callable[[], None] = lambda: None,
) -> None:
    """``submit`` so many jobs at a time, and report each when its future is done.

    ``look`` is called every two seconds, and may raise.
    """
    waiting, running = list(jobs), dict[Future[str], SweepJob]()
    while waiting or running:
        while waiting and len(running) < at_a_time:
            job = waiting.pop(0)
            running[submit(job)] = job
        done, _ = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
        for future in done:
            report_end(running.pop(future), outcome(future))
        look()


ENGINES: Registry[type[Engine]] = Registry("engine")
discover(__name__, __path__)
