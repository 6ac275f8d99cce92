"""What a sweep will cost: the time of the work of its commands, measured on this machine, times its
amount.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from smoothadv.analysis.radii import MOST_RADII
from smoothadv.base.cpus import suitable_threads
from smoothadv.base.devices import default_device, device_name
from smoothadv.base.progress import Progress
from smoothadv.sweep.commands import Commands, Work
from smoothadv.sweep.grid import Grid
from smoothadv.sweep.jobs import SweepJob
from smoothadv.sweep.stages import Stage

_REPEATS = 5
_SECONDS_TO_MEASURE = 10.0  # when measuring has taken so long, what remains is measured once
# On a CPU work is measured on fewer images than a batch has: on so many pixel values, or one image.
_PIXELS = 2**14
_UNITS = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1}

Seconds = Counter[str]
"""The time of commands on this machine, one process at a time, by the name of the work, without the
start of commands.

Each is an array [2]: by the fastest and by the slowest measurements.
"""


def cost_table(grid: Grid, jobs: Sequence[SweepJob], commands: Commands, device: str | None) -> str:
    """Sentences for people about what the jobs will cost, by the fastest and the slowest of several
    measurements.

    UserError if a dataset has no known size.
    """
    threads = torch.get_num_threads()
    try:
        meter = _CostMeter(commands, torch.device(device) if device else default_device())
        work = meter._work(jobs[0], jobs[0].trainings[0])[0]
        torch.set_num_threads(grid.threads or suitable_threads(work.shape, threads))
        with Progress(jobs, "measuring", unit="job", delay=1, leave=False) as measured:
            costs = [meter.cost(job, job.stages) for job in measured]
        later = _sum(meter.later_costs(jobs))
    finally:
        torch.set_num_threads(threads)
    total, each = _sum(costs), np.sort([np.broadcast_to(cost.total(), 2) for cost in costs], axis=0)
    shares = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in total.items())
    where = f"{device_name(meter.device)}, one process at a time, without starting commands"
    lines = [
        f"about {_duration(total.total())} on {where}: {shares}",
        f"the shortest job takes about {_duration(each[0])}, the longest {_duration(each[-1])}",
        f"ranges: fastest and slowest of {meter.fewest} or more measurements of each kind of work",
    ]
    if later:
        lines.append(
            f"the best models, chosen later, are not counted: at most {_duration(later.total())} "
            "more"
        )
    if any(stage.expected.may_stop_early for job in jobs for stage in job.evaluations):
        lines.append("certifying counts all --N draws; a procedure that stops early takes fewer")
    return "\n".join(lines)


def _sum(costs: Iterable[Seconds]) -> Seconds:
    total = Seconds()
    for cost in costs:
        total.update(cost)
    return total


def _duration(seconds: Any) -> str:
    """Seconds, a number or a range [2], as a text with a suitable unit, like "2.5 to 2.7 hours"."""
    low, high = np.sort(np.broadcast_to(seconds, 2))
    name = next((name for name, unit in _UNITS.items() if low >= 2 * unit), "seconds")
    texts = [
        f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        for value in (low / _UNITS[name], high / _UNITS[name])
    ]
    return f"{' to '.join(dict.fromkeys(texts))} {name}"


class _CostMeter:
    """Measures, once for each kind of work, the time of the work of commands on ``device``."""

    def __init__(self, commands: Commands, device: torch.device) -> None:
        self.commands, self.device, self.fewest = commands, device, _REPEATS
        self._end = time.monotonic() + _SECONDS_TO_MEASURE
        self._known: dict[Hashable, Any] = {}

    def cost(self, job: SweepJob, stages: Iterable[Stage]) -> Seconds:
        """The time of some stages of a job."""
        return _sum(
            Seconds({work.name: work.amount * self._piece(work)})
            for stage in stages
            for work in self._work(job, stage)
        )

    def later_costs(self, jobs: Sequence[SweepJob]) -> list[Seconds]:
        """The time of the evaluations of models that may yet be chosen as the best: of each group
        the dearest, at most one for each radius.
        """
        later = []
        for group in {job.group for job in jobs}:
            costs = [self.cost(job, job.possible) for job in jobs if job.group == group]
            later += sorted(costs, key=lambda cost: np.max(cost.total()))[-MOST_RADII:]
        return later

    def _work(self, job: SweepJob, stage: Stage) -> list[Work]:
        archs = [training.expected.recipe["arch"] for training in job.trainings]
        return self.commands.work(stage.words, archs, job.processes)

    def _piece(self, work: Work) -> Any:
        if work.key not in self._known:
            on_cpu = self.device.type == "cpu"
            most = max(1, _PIXELS // math.prod(work.shape)) if on_cpu else None
            act, pieces = work.prepare(self.device, most)
            self._known[work.key] = self._seconds(act) / pieces
        seconds = self._known[work.key]
        if work.less is None:
            return seconds
        # On a busy machine the difference may have any size; but a step of an attack costs one
        # forward and backward pass, and so does the update that it is a part of.
        less = self._piece(work.less)
        return np.sort(np.clip(seconds - less, 0, less / 2))

    def _seconds(self, act: Callable[[], Any]) -> Any:
        """The shortest and the longest time of several runs, [2], after one run to warm up unless
        time is short.
        """
        times: list[float] = []
        while not times or (len(times) <= _REPEATS and time.monotonic() < self._end):
            start = time.perf_counter()
            act()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        times = times[1:] or times
        self.fewest = min(self.fewest, len(times))
        return np.array([min(times), max(times)])
