"""What a sweep will cost: updates and votes measured on this machine, multiplied by how many there will be."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tqdm import tqdm

from smoothadv.architectures import get_architecture
from smoothadv.attacks.gradients import Stein
from smoothadv.attacks.smoothed import SmoothedAttack
from smoothadv.attacks.targets import EVERY
from smoothadv.commands.options import default_device, device_name
from smoothadv.commands.sweep.planning import EvaluationPlan, Plan, TrainingPlan
from smoothadv.commands.training_options import compose_evaluation
from smoothadv.datasets import get_dataset
from smoothadv.errors import UserError
from smoothadv.evaluation import select_examples
from smoothadv.inference import Arrangement, arrange, default_batch, default_gradient_batch
from smoothadv.objectives import Objective
from smoothadv.sweeps.grid import Grid
from smoothadv.sweeps.job_execution import stage_environment
from smoothadv.training import Processes
from smoothadv.training.update import Address, Update

_REPEATS = 3
# On a CPU an update is measured on fewer images than a batch has, but on at least so many.
_FEWEST_IMAGES, _FEWEST_NUMBERS = 4, 2**16
_STEPS_MEASURED = (1, 3)
_DAY, _HOUR = 86_400, 3600


@dataclass(frozen=True)
class Seconds:
    """What a job takes here, one process at a time: to train, to certify, to attack, and until commands begin."""

    train: float = 0.0
    certify: float = 0.0
    attack: float = 0.0
    start: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Seconds(*(one + another for one, another in pairs))

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def cost_table(grid: Grid, plans: Sequence[Plan], device: str | None) -> str:
    """Sentences about what the jobs will cost, for people.

    An update is measured with one noisy copy, after no attack, one of 1 and one of 3 steps; the time of a copy and a
    step of attack is taken to be the same for all m and T. UserError where a dataset's size cannot be known.
    """
    machine = _CostMeter(torch.device(device) if device else default_device())
    threads = torch.get_num_threads()
    torch.set_num_threads(grid.threads or threads)
    try:
        with tqdm(plans, "measuring", unit="job", disable=None, delay=1, leave=False) as measured:
            costs = [machine.cost(plan) for plan in measured]
    finally:
        torch.set_num_threads(threads)
    total = sum(costs, Seconds())
    parts = {"training": total.train, "certifying": total.certify, "attacking": total.attack}
    said = ", ".join(f"{name} {_spoken(seconds)}" for name, seconds in parts.items() if seconds)
    lines = [
        f"about {_spoken(total.total)} on {device_name(machine.device)}, one process at a time: {said}, "
        f"starting commands {_spoken(total.start)}",
        f"the cheapest job takes about {_spoken(min(cost.total for cost in costs))}, "
        f"the dearest {_spoken(max(cost.total for cost in costs))}",
    ]
    read = [evaluation.options for plan in plans for evaluation in plan.evaluations]
    if any(getattr(options, "method", "exact") != "exact" for options in read):
        lines.append("certifying counts all --N draws; a procedure that stops early takes fewer")
    return "\n".join(lines)


def _spoken(seconds: float) -> str:
    for unit, name in ((_DAY, "days"), (_HOUR, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.3g} {name}" if seconds < 1000 * unit else f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.3g} seconds"


class _CostMeter:
    """Measures, once for each kind of model, what updates and votes take on ``device``.

    ``processes`` is how many share the batch of an update.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.processes = device, 1
        self._known: dict[Any, Any] = {}

    def _once(self, key: Any, measure: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = measure()
        return self._known[key]

    def cost(self, plan: Plan) -> Seconds:
        """What the whole job takes."""
        training = plan.training
        start = self._once("start", lambda: _starting_seconds(plan))
        self.processes = plan.job.processes
        update, step = self._once((_kind(training), self.processes), lambda: self._measure_update(training))
        cost = Seconds(train=self._training(training, update, step), start=start * len(plan.job.stages))
        for evaluation in plan.evaluations:
            cost += self._evaluation(training, evaluation)
        return cost

    def _evaluation(self, training: TrainingPlan, evaluation: EvaluationPlan) -> Seconds:
        """Seconds of votes, and of the gradients that attacks need."""
        options, examples = evaluation.options, _examples(evaluation.options)
        key = (training.options.dataset, training.options.arch, options.precision)
        vote = self._once(("vote", key), lambda: self._measure_vote(training, options))
        if not evaluation.attacks:
            return Seconds(certify=examples * (options.N0 + options.N) * vote)
        seconds = 0.0
        for attack in evaluation.attacks:
            passes = _passes(attack, training.description.num_classes)
            # Estimates without gradients only ask what the classifier says.
            is_free = isinstance(attack.attack.estimator, Stein)
            one = vote if is_free else self._once(("gradient", key), lambda: self._measure_gradient(training, options))
            seconds += examples * (options.N * vote + passes * one)
        return Seconds(attack=seconds)

    def _training(self, training: TrainingPlan, update: float, step: float) -> float:
        """Seconds for all epochs; the first ones of a warm-up may be without an attack."""
        schedule, objective, options = training.schedule, training.objective, training.options
        evaluation = compose_evaluation(options)
        images = _size(options.dataset, "train", options.data_dir)
        steps = math.ceil(images / schedule.batch)
        if schedule.steps_per_epoch is not None:
            steps = min(steps, schedule.steps_per_epoch)
        copies = min(steps * schedule.batch, images) * objective.copies
        if options.use_unlabelled is not None:
            copies *= 2  # as many pseudo-labelled batches again
        attacked = sum(objective.epsilon(epoch) > 0 for epoch in range(schedule.epochs))
        tested = min(evaluation.images, _size(options.dataset, "test", options.data_dir)) * objective.copies
        tests = -(-schedule.epochs // evaluation.every)
        return copies * (schedule.epochs * update + attacked * _steps(objective) * step) + tests * tested * (
            update + _steps(objective) * step
        )

    def _measure_update(self, training: TrainingPlan) -> tuple[float, float]:
        """Seconds of an update per noisy copy without an attack, and more of them per step of the attack."""
        if not _steps(training.objective):
            return self._update_seconds(training, training.objective), 0.0
        few, many = (
            self._update_seconds(training, _with_steps(training.objective, count)) for count in _STEPS_MEASURED
        )
        step = max(many - few, 0.0) / (_STEPS_MEASURED[1] - _STEPS_MEASURED[0])
        # On a busy machine the difference may be anything, but an update is one more forward and backward pass.
        step = min(step, few / (_STEPS_MEASURED[0] + 1))
        return few - _STEPS_MEASURED[0] * step, step

    def _update_seconds(self, training: TrainingPlan, objective: Objective) -> float:
        device, schedule = self.device, training.schedule
        shape = training.description.image_shape
        fewest = max(_FEWEST_IMAGES, _FEWEST_NUMBERS // math.prod(shape))
        own = -(-schedule.batch // self.processes)
        count = own if device.type == "cuda" else min(own, fewest)
        network = get_architecture(training.options.arch, training.description, "normalize")
        model = training.execution.prepare(network, device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=schedule.momentum)
        images = torch.rand(count, *shape, device=device)
        labels = torch.zeros(count, dtype=torch.long, device=device)
        processes = Processes()
        execution = dataclasses.replace(training.execution, compile=False)  # minutes, for a first update
        update = Update(model, objective, optimizer, execution, processes, device, images[:2].cpu(), count)
        last = schedule.epochs - 1  # where the attack has its full size

        def once() -> None:
            update(images, labels, count, slice(0, count), Address(0, last, 0), 1.0)

        return self._seconds(once) / (count * objective.copies)

    def _measure_gradient(self, training: TrainingPlan, options: argparse.Namespace) -> float:
        """Seconds of the gradient of one noisy copy, as attacks on a trained classifier compute it."""
        shape, voter = training.description.image_shape, self._voter(training, options)
        batch = options.attack_batch or default_gradient_batch(voter, shape, self.device)
        image = torch.rand(1, *shape, device=self.device)

        def once() -> None:
            points = (image + torch.randn(batch, *shape, device=self.device)).requires_grad_()
            torch.autograd.grad(voter(points).sum(), points)

        return self._seconds(once) / batch

    def _voter(self, training: TrainingPlan, options: argparse.Namespace) -> torch.nn.Module:
        network = get_architecture(training.options.arch, training.description, "normalize").eval()
        image = torch.rand(training.description.image_shape)
        return arrange(network, Arrangement(options.precision), self.device, image)

    def _measure_vote(self, training: TrainingPlan, options: argparse.Namespace) -> float:
        """Seconds of a vote."""
        shape, voter = training.description.image_shape, self._voter(training, options)
        batch = options.batch or default_batch(voter, shape, self.device)
        image = torch.rand(1, *shape, device=self.device)

        @torch.inference_mode()
        def once() -> None:
            voter(image + torch.randn(batch, *shape, device=self.device)).argmax(1).cpu()

        return self._seconds(once) / batch

    def _seconds(self, work: Callable[[], None]) -> float:
        """The median of some runs, after one that warms up."""
        times = []
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


def _kind(training: TrainingPlan) -> tuple:
    """What an update's time depends on beside T and m."""
    attack = getattr(training.objective, "attack", None)
    options = training.options
    return (options.dataset, options.arch, training.execution, type(training.objective), type(attack))


def _steps(objective: Objective) -> int:
    return getattr(getattr(objective, "attack", None), "num_steps", 0)


def _with_steps(objective: Objective, steps: int) -> Objective:
    """The objective with one copy of each image and an attack of so many steps."""
    attack = dataclasses.replace(objective.attack, num_steps=steps)
    return dataclasses.replace(objective, attack=attack, num_noise_vec=1)


def _passes(attack: SmoothedAttack, classes: int) -> int:
    """How many noisy copies of an image an attack puts through the network."""
    goals = classes - 1 if attack.target == EVERY else 1
    return getattr(attack.attack, "num_steps", 1) * attack.num_noise_vec * attack.restarts * goals


@cache
def _size(dataset: str, split: str, data_dir: str | None) -> int:
    """How many images a split has: as published, else counted."""
    published = {
        ("cifar10", "train"): 50_000,
        ("cifar10", "test"): 10_000,
        ("imagenet", "train"): 1_281_167,
        ("imagenet", "test"): 50_000,
        ("imagenet32", "train"): 1_281_167,
        ("imagenet32", "test"): 50_000,
    }
    return published.get((dataset, split)) or len(get_dataset(dataset, split, data_dir))


def _examples(options: argparse.Namespace) -> int:
    return len(select_examples(_size(options.dataset, options.split, options.data_dir), options.skip, options.max))


def _starting_seconds(plan: Plan) -> float:
    """What it takes until a command begins with its work."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "smoothadv", "certify", "--help"]
    environment = {**os.environ, **stage_environment(plan.job)}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError("the command certify does not start")
    return time.perf_counter() - start
