"""What a sweep will cost: the time of updates and votes, measured on this machine, times their
numbers.
"""

import dataclasses
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smoothadv.analysis.shared.radii import MOST_RADII
from smoothadv.architectures import get_architecture
from smoothadv.attacks.estimators import Stein
from smoothadv.attacks.shared.smoothed_attack import EVERY
from smoothadv.base.cpus import suitable_threads
from smoothadv.base.devices import default_device, device_name
from smoothadv.base.distributed import Processes
from smoothadv.base.progress import Progress
from smoothadv.datasets import SPLITS, get_dataset
from smoothadv.evaluation.specs import AttackSpec
from smoothadv.objectives import Objective, attack_field
from smoothadv.sweep.grid import Grid
from smoothadv.sweep.planning import Plan
from smoothadv.sweep.reading import EvaluationPlan, TrainingPlan
from smoothadv.training.teacher import Teacher
from smoothadv.training.update import Address, Update
from smoothadv.voting.classifier import default_batch, optimized_for_inference

_REPEATS = 5
# When measuring has taken so long, on a slow machine, what remains is measured once, and on fewer
# images.
_SECONDS_TO_MEASURE = 10.0
# On a CPU passes are measured on fewer images than a batch has, but on at least this many images or
# pixel values.
_FEWEST_IMAGES, _FEWEST_NUMBERS = 1, (2**15, 2**13)
_STEPS_MEASURED = (1, 2)
_OWN_STEPS = ("noise_steps", "mix_steps")
"""The fields in which objectives with an attack of their own have T."""
_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


Seconds = Counter[str]
"""The time of jobs on this machine, one process at a time, by what they do, without the start of
commands.

Each is an array [2]: by the fastest and by the slowest measurements.
"""
_TRAINING, _CERTIFYING, _ATTACKING = "training", "certifying", "attacking"


def cost_table(grid: Grid, plans: Sequence[Plan], device: str | None) -> str:
    """Sentences for people about what the jobs will cost, by the fastest and the slowest of several
    measurements.

    An update is measured with one noisy copy, without an attack or with attacks of 1 and of 2
    steps. The time per copy, and per copy and step of attack, is assumed to be equal for all m and
    T. UserError if a dataset has no known size.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(
        grid.threads or suitable_threads(plans[0].trainings[0].description.image_shape, threads)
    )
    try:
        meter = _CostMeter(torch.device(device) if device else default_device())
        with Progress(plans, "measuring", unit="job", delay=1, leave=False) as measured:
            costs = [meter.cost(plan) for plan in measured]
        possible: dict[str, list[Seconds]] = defaultdict(list)
        for plan in plans:
            possible[plan.model.group].append(meter.evaluations(plan, plan.possible))
        count = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    # Of each group, at most one model for each radius is chosen.
    dearest = (
        sorted(costs, key=lambda cost: np.max(cost.total()))[-MOST_RADII:]
        for costs in possible.values()
    )
    later = _sum(cost for some in dearest for cost in some)
    total, each = _sum(costs), np.sort([np.broadcast_to(cost.total(), 2) for cost in costs], axis=0)
    shares = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in total.items())
    many = (
        f"processor time of {count} threads, shared equally, to time"
        if count > 1
        else "processor time"
    )
    clock = "time" if meter.device.type == "cuda" else many
    where = f"{device_name(meter.device)}, one process at a time, without starting commands"
    lines = [
        f"about {_duration(total.total())} on {where}: {shares}",
        f"the shortest job takes about {_duration(each[0])}, the longest {_duration(each[-1])}",
        f"ranges: fastest and slowest of {meter.fewest} or more measurements of each kind of work "
        f"({clock})",
    ]
    if later:
        lines.append(
            f"the best models, chosen later, are not counted: at most {_duration(later.total())} "
            "more"
        )
    if any(evaluation.may_stop_early for plan in plans for evaluation in plan.evaluations):
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
    unit, name = next((unit, name) for unit, name in _UNITS if low >= 2 * unit or unit == 1)
    texts = [
        f"{value / unit:,.3g}" if value < 1000 * unit else f"{value / unit:,.0f}"
        for value in (low, high)
    ]
    return f"{' to '.join(dict.fromkeys(texts))} {name}"


class _CostMeter:
    """Measures, once for each kind of model, the time of updates and votes on ``device``.

    ``processes`` is the number of processes that share the batch of an update.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.processes = device, 1
        self._end, self._known = time.monotonic() + _SECONDS_TO_MEASURE, dict[Any, Any]()
        self.fewest = _REPEATS

    def _once(self, key: Any, measure: Callable[[], Any]) -> Any:
        """The result of ``measure``, which is called at the first use of ``key`` only."""
        if key not in self._known:
            self._known[key] = measure()
        return self._known[key]

    def cost(self, plan: Plan) -> Seconds:
        """The time of a whole job."""
        self.processes = plan.job.processes
        cost = self.evaluations(plan, plan.evaluations)
        if plan.job.training:
            training = plan.trainings[0]
            request, objective = training.request, training.request.objective
            # What the time of an update depends on, besides T and m.
            key = (
                request.dataset,
                request.arch,
                request.execution,
                type(objective),
                type(objective.gradient_attack),
            )
            update, step = self._once((key, self.processes), lambda: self._measure_update(training))
            cost.update({_TRAINING: self._training(training, update, step)})
        return cost

    def evaluations(self, plan: Plan, evaluations: Sequence[EvaluationPlan]) -> Seconds:
        """The time of some evaluations of the model of a plan."""
        return _sum(self._evaluation(one, other) for one in plan.trainings for other in evaluations)

    def _evaluation(self, training: TrainingPlan, evaluation: EvaluationPlan) -> Seconds:
        """The time of votes, and of the gradients that attacks need."""
        request = evaluation.request
        size = _size(str(request.dataset), request.split, request.data_dir)
        examples = len(request.chosen_indices(size))
        key = (training.request.dataset, training.request.arch, request.precision)
        vote = self._vote(training, evaluation)
        if not evaluation.attacks:
            return Seconds({_CERTIFYING: examples * evaluation.draws * vote})
        seconds: Any = 0.0
        for attack in evaluation.attacks.values():
            passes = _passes(attack, training.description.num_classes)
            one = vote
            if not isinstance(
                attack.attack.estimator, Stein
            ):  # Stein's estimate takes forward passes only
                one = self._once(
                    ("gradient", key), lambda: self._measure_pass(training, evaluation, True)
                )
            seconds += examples * (evaluation.draws * vote + passes * one)
        return Seconds({_ATTACKING: seconds})

    def _vote(self, training: TrainingPlan, evaluation: EvaluationPlan | None = None) -> Any:
        precision = evaluation.request.precision if evaluation else "fp32"
        key = ("vote", training.request.dataset, training.request.arch, precision)
        return self._once(key, lambda: self._measure_pass(training, evaluation, False))

    def _looks(self, training: TrainingPlan, images: int) -> Any:
        """Seconds of all votes on the training images: of a teacher, as of this architecture, and
        of a policy.
        """
        draws, policy = training.request.votes_of_teacher, training.request.data_policy
        if policy is not None:
            for epoch in range(training.schedule.epochs):
                draws += policy.drop_draws * policy.drops_before(epoch)
                draws += policy.resample_draws * policy.weighs_before(epoch)
        return images * draws * self._vote(training) if draws else 0.0

    def _training(self, training: TrainingPlan, update: Any, step: Any) -> Any:
        """Seconds of all epochs; the first epoch of a warm-up may have no attack."""
        request, schedule, objective = (
            training.request,
            training.schedule,
            training.request.objective,
        )
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
        tested = (
            len(request.tests.chosen(_size(request.dataset, "test", request.data_dir)))
            * objective.copies
        )
        updates = copies * (schedule.epochs * update + attacked * attack)
        return updates + tests * tested * (update + attack) + self._looks(training, images)

    def _measure_update(self, training: TrainingPlan) -> tuple[Any, Any]:
        """Seconds of an update per noisy copy: without an attack, and in addition for each step of
        the attack.
        """
        objective = training.request.objective
        if not _steps(objective):
            return self._update_seconds(training, objective), 0.0
        few, many = (
            self._update_seconds(training, _with_steps(objective, count))
            for count in _STEPS_MEASURED
        )
        # On a busy machine the difference may have any size; but a step costs one forward and
        # backward pass, and so does the update itself.
        steps = _STEPS_MEASURED[1] - _STEPS_MEASURED[0]
        step = np.sort(np.clip((many - few) / steps, 0, few / (_STEPS_MEASURED[0] + 1)))
        return few - _STEPS_MEASURED[0] * step, step

    def _update_seconds(self, training: TrainingPlan, objective: Objective) -> Any:
        request, shape = training.request, training.description.image_shape
        count = self._images(-(-training.schedule.batch // self.processes), shape)
        # To build and check a large network takes longer than an update, so all objectives share
        # it.
        key = ("update", request.dataset, request.arch, request.execution)
        update = self._once(key, lambda: self._new_update(training, count))
        update.objective, update.images_at_a_time = objective, count
        images = torch.rand(count, *shape, device=self.device)
        labels = torch.zeros(count, dtype=torch.long, device=self.device)
        last = training.schedule.epochs - 1  # where the attack has its full size

        def once() -> None:
            update(images, labels, count, slice(0, count), Address(0, last, 0), 1.0, labels)

        return self._seconds(once) / (count * objective.copies)

    def _new_update(self, training: TrainingPlan, count: int) -> Update:
        request = training.request
        network = get_architecture(request.arch, training.description, "normalize")
        model = request.execution.prepare(network, self.device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=training.schedule.momentum)
        execution = dataclasses.replace(request.execution, compile=False)  # compiling takes minutes
        example = torch.rand(2, *training.description.image_shape)
        classes = training.description.num_classes
        teacher = Teacher(model, torch.full((1, classes), 1 / classes, device=self.device))
        return Update(
            model,
            request.objective,
            optimizer,
            execution,
            Processes(),
            self.device,
            example,
            count,
            teacher,
        )

    def _measure_pass(
        self, training: TrainingPlan, evaluation: EvaluationPlan | None, with_gradient: bool
    ) -> Any:
        """Seconds of a vote (of training: no ``evaluation``), or of the gradient that an attack
        needs at a copy.
        """
        shape = training.description.image_shape
        network = get_architecture(training.request.arch, training.description, "normalize").eval()
        voter = optimized_for_inference(
            network,
            self.device,
            torch.rand(shape),
            evaluation.request.precision if evaluation else "fp32",
        )
        stated = evaluation and (
            evaluation.attack_batch if with_gradient else evaluation.request.batch
        )
        batch = stated or default_batch(voter, shape, self.device, with_gradient=with_gradient)
        batch = self._images(batch, shape)
        image = torch.rand(1, *shape, device=self.device)

        def once() -> None:
            points = image + torch.randn(batch, *shape, device=self.device)
            if with_gradient:
                torch.autograd.grad(voter(points.requires_grad_()).sum(), points)
            else:
                voter(points).argmax(1).cpu()

        with torch.inference_mode(not with_gradient):
            return self._seconds(once) / batch

    def _images(self, batch: int, shape: Sequence[int]) -> int:
        """How many images to measure a pass on, of a batch."""
        fewest = max(
            _FEWEST_IMAGES, _FEWEST_NUMBERS[time.monotonic() > self._end] // math.prod(shape)
        )
        return batch if self.device.type == "cuda" else min(batch, fewest)

    def _seconds(self, work: Callable[[], None]) -> Any:
        """The shortest and the longest time of several runs, [2], after one run to warm up unless
        time is short.

        Waiting for other programs is no processor time; but neither is that of several threads the
        time that they take.
        """
        times: list[tuple[float, float]] = []
        threads, on_cpu = torch.get_num_threads(), self.device.type == "cpu"
        while not times or (len(times) <= _REPEATS and time.monotonic() < self._end):
            start, used = time.perf_counter(), time.process_time()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            clock, processor = time.perf_counter() - start, (time.process_time() - used) / threads
            times.append(
                (processor if on_cpu else clock, processor if on_cpu and threads == 1 else clock)
            )
        times = times[1:] or times
        self.fewest = min(self.fewest, len(times))
        return np.array([min(times)[0], max(longest for _, longest in times)])


def _steps(objective: Objective) -> int:
    """T, the steps of the objective's attack; 0 without an attack."""
    return max(
        getattr(objective.gradient_attack, "num_steps", 0),
        *(getattr(objective, name, 0) for name in _OWN_STEPS),
    )


def _with_steps(objective: Objective, steps: int) -> Objective:
    """The objective with an attack of ``steps`` steps, on two copies of each image at most."""
    assert dataclasses.is_dataclass(objective) and not isinstance(objective, type), (
        "as every objective is"
    )
    changed: dict[str, Any] = {name: steps for name in _OWN_STEPS if hasattr(objective, name)}
    field, attack = attack_field(type(objective)), objective.gradient_attack
    if field is not None and attack is not None:
        changed[field.name] = dataclasses.replace(attack, num_steps=steps)
    return dataclasses.replace(objective, **changed, num_noise_vec=min(2, objective.copies))


def _passes(attack: AttackSpec, classes: int) -> int:
    """How many noisy copies of an image an attack passes through the network."""
    goals = classes - 1 if attack.target == EVERY else 1
    return getattr(attack.attack, "num_steps", 1) * attack.num_noise_vec * attack.restarts * goals


@cache
def _size(dataset: str, split: str, data_dir: str | Path | None) -> int:
    """How many images a split has: the published number for known datasets, else by counting."""
    published = {
        "cifar10": (50_000, 10_000),
        "imagenet": (1_281_167, 50_000),
        "imagenet32": (1_281_167, 50_000),
    }
    if dataset in published:
        return published[dataset][SPLITS.index(split)]
    return len(get_dataset(dataset, split, data_dir))
