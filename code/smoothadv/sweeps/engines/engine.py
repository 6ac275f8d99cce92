"""What all engines are."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from smoothadv.settings import positive_int, setting
from smoothadv.sweeps.job_execution import PACKAGE_ROOT
from smoothadv.sweeps.jobs import Job

ReportEnd = Callable[[Job, str], None]
"""Is told of a job that an engine is through with, and in one word how it ended."""


@dataclass(frozen=True)
class Site:
    """Where a sweep is started: its ``folder`` among the logs, the ``gpus`` that are visible here.

    ``wants_gpus`` is False where the sweep was told to compute on the CPU.
    """

    name: str
    folder: Path
    gpus: tuple[str, ...] = ()
    wants_gpus: bool = True


@dataclass(frozen=True)
class Engine(ABC):
    """Finds machines for jobs. ``jobs`` is how many it runs at a time (None: as many as it finds room for)."""

    jobs: int | None = setting(
        None,
        parse=positive_int,
        help="at a time (default: local: one per GPU, or group of GPUs where a job has several processes, and one "
        "without GPUs; slurm, ray: as many as find room)",
    )

    @abstractmethod
    def run(self, jobs: Sequence[Job], site: Site, report_end: ReportEnd) -> None:
        """Have every job executed; returns when the engine is through with them, or, detached, has them all.

        Each process of a job gets a GPU of its own where there are any. KeyboardInterrupt asks what runs here to stop
        first. Called for jobs that need something done; one that turns out to be another's is ended as "busy".
        """

    def already_has(self, jobs: Iterable[Job]) -> set[str]:
        """The keys of the jobs that an earlier call still has with the engine."""
        return set()


@contextmanager
def package_on_path() -> Iterator[None]:
    """Within, processes that are started find this package, also where it is not installed."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
