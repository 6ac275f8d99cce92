"""What a sweep will cost: the time of updates and votes, measured on this machine, times their numbers."""

import dataclasses
import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from smoothadv.architectures import get_architecture
from smoothadv.attacks.estimators import Stein
from smoothadv.attacks.target_rules import EVERY
from smoothadv.commands.sweep.planning import Plan
from smoothadv.commands.sweep.reading import EvaluationPlan, TrainingPlan
from smoothadv.datasets import SPLITS, get_dataset
from smoothadv.devices import default_device, device_name
from smoothadv.errors import UserError
from smoothadv.evaluation.image_loop import select_examples
from smoothadv.evaluation.requests import AttackPlan
from smoothadv.objectives import Objective
from smoothadv.smoothing.classifier import arrange, default_batch
from smoothadv.sweeps.grid import Grid
from smoothadv.sweeps.job_execution import stage_environment
from smoothadv.training.processes import Processes
from smoothadv.training.update import Address, Update

Measurement = TypeVar("Measurement")

_REPEATS = 3
# On a CPU an update is measured on fewer images than a batch has, but on at least this many images or pixel values.
_FEWEST_IMAGES, _FEWEST_NUMBERS = 4, 2**16
_STEPS_MEASURED = (1, 3)
_DAY, _HOUR = 86_400, 3600


Seconds = Counter[str]
"""The time of jobs on this machine, one process at a time, by what they do; starting lasts until commands begin."""
_TRAINING, _CERTIFYING, _ATTACKING, _STARTING = "training", "certifying", "attacking", "starting commands"


def cost_table(grid: Grid, plans: Sequence[Plan], device: str | None) -> str:
    """Sentences for people about what the jobs will cost.

    An update is measured with one noisy copy, either without an attack or with attacks of 1 and of 3 steps. The time
    per copy, and per copy and step of attack, is assumed to be the same for all m and T. UserError if the size of a
    dataset cannot be known.
    """
    meter = _CostMeter(torch.device(device) if device else default_device())
    threads = torch.get_num_threads()
    torch.set_num_threads(grid.threads or threads)
    try:
        with tqdm(plans, "measuring", unit="job", disable=None, delay=1, leave=False) as measured:
            costs = [meter.cost(plan) for plan in measured]
    finally:
        torch.set_num_threads(threads)
    total = sum(costs, Seconds())
    shares = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in total.items() if name != _STARTING)
    lines = [
        f"about {_duration(total.total())} on {device_name(meter.device)}, one process at a time: {shares}, "
        f"starting commands {_duration(total[_STARTING])}",
        f"the shortest job takes about {_duration(min(cost.total() for cost in costs))}, "
        f"the longest {_duration(max(cost.total() for cost in costs))}",
    ]
    if any(evaluation.may_stop_early for plan in plans for evaluation in plan.evaluations):
        lines.append("certifying counts all --N draws; a procedure that stops early takes fewer")
    if any(plan.pending for plan in plans):
        lines.append("the evaluations of the best models come on top: these are not known yet")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    """Seconds as a text with a suitable unit, like "2.5 hours"."""
    for unit, name in ((_DAY, "days"), (_HOUR, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.3g} {name}" if seconds < 1000 * unit else f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.3g} seconds"


class _CostMeter:
    """Measures, once for each kind of model, the time of updates and votes on ``device``.

    ``processes`` is the number of processes that share the batch of an update.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.processes = device, 1
        self._known: dict[Any, Any] = {}

    def _once(self, key: Any, measure: Callable[[], Measurement]) -> Measurement:
        """The result of ``measure``, which is called at the first use of ``key`` only."""
        if key not in self._known:
            self._known[key] = measure()
        return self._known[key]

    def cost(self, plan: Plan) -> Seconds:
        """The time of a whole job."""
        start = self._once("start", lambda: _starting_seconds(plan))
        self.processes = plan.job.processes
        cost = Seconds({_STARTING: start * len(plan.job.stages)})
        if plan.job.training:
            training = plan.trainings[0]
            update, step = self._once((_kind(training), self.processes), lambda: self._measure_update(training))
            cost += Seconds({_TRAINING: self._training(training, update, step)})
        for member, evaluation in itertools.product(plan.trainings, plan.evaluations):
            cost += self._evaluation(member, evaluation)
        return cost

    def _evaluation(self, training: TrainingPlan, evaluation: EvaluationPlan) -> Seconds:
        """The time of votes, and of the gradients that attacks need."""
        request = evaluation.request
        size = _size(str(request.images), request.split, request.data_dir)
        examples = len(select_examples(size, request.skip, request.maximum))
        key = (training.request.dataset, training.request.arch, request.precision)
        vote = self._once(("vote", key), lambda: self._measure_pass(training, evaluation, False))
        if not evaluation.attacks:
            return Seconds({_CERTIFYING: examples * evaluation.draws * vote})
        seconds = 0.0
        for attack in evaluation.attacks.values():
            passes = _passes(attack, training.description.num_classes)
            one = vote
            if not isinstance(attack.attack.estimator, Stein):  # Stein's estimate takes forward passes only
                one = self._once(("gradient", key), lambda: self._measure_pass(training, evaluation, True))
            seconds += examples * (evaluation.draws * vote + passes * one)
        return Seconds({_ATTACKING: seconds})

    def _training(self, training: TrainingPlan, update: float, step: float) -> float:
        """Seconds of all epochs; the first epoch of a warm-up may have no attack."""
        request, schedule, objective = training.request, training.schedule, training.request.objective
        images = _size(request.dataset, "train", request.data_dir)
        steps = math.ceil(images / schedule.batch)
        if schedule.steps_per_epoch is not None:
            steps = min(steps, schedule.steps_per_epoch)
        copies = min(steps * schedule.batch, images) * objective.copies
        if request.use_unlabelled is not None:
            copies *= 2  # for each batch of labelled images there is one of pseudo-labelled images
        attack = _steps(objective) * step
        attacked = sum(objective.epsilon(epoch) > 0 for epoch in range(schedule.epochs))
        tests = -(-schedule.epochs // request.tests.every)
        tested = len(request.tests.chosen(_size(request.dataset, "test", request.data_dir))) * objective.copies
        return copies * (schedule.epochs * update + attacked * attack) + tests * tested * (update + attack)

    def _measure_update(self, training: TrainingPlan) -> tuple[float, float]:
        """Seconds of an update per noisy copy: without an attack, and in addition for each step of the attack."""
        if not _steps(training.request.objective):
            return self._update_seconds(training, training.request.objective), 0.0
        few, many = (
            self._update_seconds(training, _with_steps(training.request.objective, count)) for count in _STEPS_MEASURED
        )
        step = max(many - few, 0.0) / (_STEPS_MEASURED[1] - _STEPS_MEASURED[0])
        # On a busy machine the difference may have any size; but a step costs one forward and backward pass, and so
        # does the update itself.
        step = min(step, few / (_STEPS_MEASURED[0] + 1))
        return few - _STEPS_MEASURED[0] * step, step

    def _update_seconds(self, training: TrainingPlan, objective: Objective) -> float:
        device, schedule = self.device, training.schedule
        shape = training.description.image_shape
        fewest = max(_FEWEST_IMAGES, _FEWEST_NUMBERS // math.prod(shape))
        local_batch = -(-schedule.batch // self.processes)
        count = local_batch if device.type == "cuda" else min(local_batch, fewest)
        network = get_architecture(training.request.arch, training.description, "normalize")
        model = training.request.execution.prepare(network, device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=schedule.momentum)
        images = torch.rand(count, *shape, device=device)
        labels = torch.zeros(count, dtype=torch.long, device=device)
        processes = Processes()
        execution = dataclasses.replace(training.request.execution, compile=False)  # compiling takes minutes
        update = Update(model, objective, optimizer, execution, processes, device, images[:2].cpu(), count)
        last = schedule.epochs - 1  # where the attack has its full size

        def once() -> None:
            update(images, labels, count, slice(0, count), Address(0, last, 0), 1.0)

        return self._seconds(once) / (count * objective.copies)

    def _measure_pass(self, training: TrainingPlan, evaluation: EvaluationPlan, with_gradient: bool) -> float:
        """Seconds of a vote, or of the gradient at one noisy copy, as attacks on a trained classifier compute it."""
        shape = training.description.image_shape
        network = get_architecture(training.request.arch, training.description, "normalize").eval()
        voter = arrange(network, self.device, torch.rand(shape), evaluation.request.precision)
        stated = evaluation.attack_batch if with_gradient else evaluation.request.batch
        batch = stated or default_batch(voter, shape, self.device, with_gradient=with_gradient)
        image = torch.rand(1, *shape, device=self.device)

        def once() -> None:
            points = image + torch.randn(batch, *shape, device=self.device)
            if with_gradient:
                torch.autograd.grad(voter(points.requires_grad_()).sum(), points)
            else:
                voter(points).argmax(1).cpu()

        with torch.inference_mode(not with_gradient):
            return self._seconds(once) / batch

    def _seconds(self, work: Callable[[], None]) -> float:
        """The median time of several runs, after one run to warm up."""
        times = []
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


def _kind(training: TrainingPlan) -> tuple:
    """What the time of an update depends on, besides T and m."""
    request, objective = training.request, training.request.objective
    return request.dataset, request.arch, request.execution, type(objective), type(_attack(objective))


def _attack(objective: Objective) -> Any:
    """The attack of an objective, None if it has none."""
    return getattr(objective, "attack", None)


def _steps(objective: Objective) -> int:
    """T, the steps of the objective's attack; 0 without an attack."""
    return getattr(_attack(objective), "num_steps", 0)


def _with_steps(objective: Objective, steps: int) -> Objective:
    """The objective with one copy of each image and an attack of ``steps`` steps."""
    assert dataclasses.is_dataclass(objective) and not isinstance(objective, type), "as every objective is"
    attack = dataclasses.replace(_attack(objective), num_steps=steps)
    return dataclasses.replace(objective, attack=attack, num_noise_vec=1)


def _passes(attack: AttackPlan, classes: int) -> int:
    """How many noisy copies of an image an attack passes through the network."""
    goals = classes - 1 if attack.target == EVERY else 1
    return getattr(attack.attack, "num_steps", 1) * attack.num_noise_vec * attack.restarts * goals


@cache
def _size(dataset: str, split: str, data_dir: str | Path | None) -> int:
    """How many images a split has: the published number for known datasets, else by counting."""
    published = {"cifar10": (50_000, 10_000), "imagenet": (1_281_167, 50_000), "imagenet32": (1_281_167, 50_000)}
    if dataset in published:
        return published[dataset][SPLITS.index(split)]
    return len(get_dataset(dataset, split, data_dir))


def _starting_seconds(plan: Plan) -> float:
    """Seconds until a command begins its work."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "smoothadv", "certify", "--help"]
    environment = {**os.environ, **stage_environment(plan.job)}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError("the command certify does not start")
    return time.perf_counter() - start
