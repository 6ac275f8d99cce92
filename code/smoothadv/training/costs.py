"""What a training costs: how often it does what takes its time, and an update to be timed."""

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from smoothadv.architectures import get_architecture
from smoothadv.base.distributed import Processes
from smoothadv.datasets import DatasetDescription
from smoothadv.objectives import Objective, attack_field
from smoothadv.training.execution import Execution
from smoothadv.training.schedule import Schedule
from smoothadv.training.spec import TrainSpec
from smoothadv.training.teacher import Teacher
from smoothadv.training.update import Address, Update

_OWN_STEPS = ("noise_steps", "mix_steps")
"""The fields in which objectives with an attack of their own have T."""


def attack_steps(objective: Objective) -> int:
    """T, the steps of the objective's attack; 0 without an attack."""
    own = (getattr(objective, name, 0) for name in _OWN_STEPS)
    return max(getattr(objective.gradient_attack, "num_steps", 0), *own)


def noisy_copies(
    spec: TrainSpec, schedule: Schedule, images: int, test_images: int
) -> tuple[int, int]:
    """How many noisy copies all updates and tests have, and how many of these are attacked, with
    these numbers of training and test images.
    """
    objective, steps = spec.objective, math.ceil(images / schedule.batch)
    if schedule.steps_per_epoch is not None:
        steps = min(steps, schedule.steps_per_epoch)
    copies = min(steps * schedule.batch, images) * objective.copies
    if spec.use_unlabelled is not None:
        copies *= 2  # for each batch of labelled images there is one of pseudo-labelled images
    attacked_epochs = sum(objective.epsilon(epoch) > 0 for epoch in range(schedule.epochs))
    tests = math.ceil(schedule.epochs / spec.tests.every)
    tested = tests * len(spec.tests.chosen(test_images)) * objective.copies
    return copies * schedule.epochs + tested, copies * attacked_epochs + tested


def votes_per_image(spec: TrainSpec, schedule: Schedule) -> int:
    """How many noisy copies of each training image are classified outside of updates: by a teacher,
    or to choose images.
    """
    votes, policy = spec.teacher_draws or 0, spec.policy
    if policy is not None:
        for epoch in range(schedule.epochs):
            votes += policy.drop_draws * policy.drops_before(epoch)
            votes += policy.resample_draws * policy.weighs_before(epoch)
    return votes


def prepare_update(
    spec: TrainSpec,
    schedule: Schedule,
    description: DatasetDescription,
    batch: int,
    steps: int,
    device: torch.device,
    most: int | None,
) -> tuple[Callable[[], Any], int]:
    """A function that makes an update on a ``batch`` of at most ``most`` images, with an attack of
    ``steps`` steps (0: without one), and how many noisy copies it has.
    """
    images = batch if most is None else min(batch, most)
    update = _update(spec.arch, description, spec.execution, device)
    objective = _with_steps(spec.objective, steps)
    update.objective, update.images_at_a_time = objective, images
    inputs = torch.rand(images, *description.image_shape, device=device)
    labels = torch.zeros(images, dtype=torch.long, device=device)
    last = schedule.epochs - 1  # where the attack has its full size

    def act() -> None:
        update(inputs, labels, images, slice(0, images), Address(0, last, 0), 1.0, labels)

    return act, images * objective.copies


def _with_steps(objective: Objective, steps: int) -> Objective:
    """The objective with an attack of ``steps`` steps, on two copies of each image at most."""
    assert dataclasses.is_dataclass(objective) and not isinstance(objective, type)
    if not steps:
        return objective
    changed: dict[str, Any] = {name: steps for name in _OWN_STEPS if hasattr(objective, name)}
    field, attack = attack_field(type(objective)), objective.gradient_attack
    if field is not None and attack is not None:
        changed[field.name] = dataclasses.replace(attack, num_steps=steps)
    if hasattr(objective, "num_noise_vec"):
        changed["num_noise_vec"] = min(2, objective.copies)
    return dataclasses.replace(objective, **changed)


@cache
def _update(
    arch: str, description: DatasetDescription, execution: Execution, device: torch.device
) -> Update:
    """An update for a kind of network: to build and check a large one takes longer than an update.
    Its objective and the number of its images are to be set.
    """
    model = execution.prepare(get_architecture(arch, description, "normalize"), device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    execution = dataclasses.replace(execution, compile=False)  # compiling takes minutes
    example, classes = torch.rand(2, *description.image_shape), description.num_classes
    teacher = Teacher(model, torch.full((1, classes), 1 / classes, device=device))
    alone = Processes()
    return Update(model, Objective(), optimizer, execution, alone, device, example, 1, teacher)
