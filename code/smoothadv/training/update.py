"""One update of the weights: noise, attack, loss and gradient of a batch, in micro-batches where it
is large.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn

from smoothadv.base.distributed import Processes
from smoothadv.noise import Purpose, derive_generator
from smoothadv.objectives import Batch, Objective, Outcome, draw_uniforms
from smoothadv.training.execution import CONVOLUTION_DTYPES, Execution
from smoothadv.training.folded import attacked_form
from smoothadv.training.teacher import Teacher


def no_sums(device: torch.device, terms: int = 0) -> torch.Tensor:
    """The sums over no examples, float64 [5 + terms]: the loss, how many were correct, of how many;
    both before the attack; and the terms of the loss. They are on the device, since reading them
    makes it wait.
    """
    return torch.zeros(5 + terms, dtype=torch.float64, device=device)


def sums_of(outcome: Outcome, terms: Sequence[str]) -> torch.Tensor:
    """The sums over the examples of one outcome, which has these ``terms``: as ``no_sums``."""
    sums = no_sums(outcome.loss.device, len(terms))
    for place, part in zip(
        (0, *range(5, len(sums))), (outcome.loss, *(outcome.terms[name] for name in terms))
    ):
        sums[place] = part.detach().double() * outcome.examples
    counts = (
        outcome.correct,
        outcome.examples,
        outcome.unattacked_correct,
        outcome.unattacked_examples,
    )
    for place, count in enumerate(counts, start=1):
        sums[place].add_(
            0 if count is None else count
        )  # to assign would copy a number from the host, and wait
    return sums


def means(sums: list[float], terms: Sequence[str] = ()) -> dict[str, float]:
    """Loss, accuracy, accuracy before the attack and the ``terms`` as means over examples; nan
    where there are none.
    """
    loss, correct, examples, *unattacked = sums[:5]
    ratios = {
        "loss": (loss, examples),
        "accuracy": (correct, examples),
        "unattacked_accuracy": unattacked,
    }
    ratios |= {name: (part, examples) for name, part in zip(terms, sums[5:])}
    return {name: part / whole if whole else math.nan for name, (part, whole) in ratios.items()}


@dataclass(frozen=True)
class Address:
    """Identifies an update. Its random numbers are functions of this, so that no generator state
    need be saved.
    """

    seed: int
    epoch: int
    step: int

    def generator(
        self, device: torch.device | str, purpose: Purpose, *more: int
    ) -> torch.Generator:
        return derive_generator(device, self.seed, self.epoch, self.step, *more, purpose)


@dataclass(frozen=True, kw_only=True)
class Inputs(Batch):
    """What an update reads beside the model: this process's part of a batch of ``whole`` images in
    all processes.

    ``weight`` multiplies the loss: a number, or a tensor [] on the device.
    """

    whole: int
    address: Address
    weight: float | torch.Tensor


@dataclass(eq=False)
class Update:
    """Updates ``model``, already on its device, with ``optimizer``.

    Gradients are computed for ``images_at_a_time`` images with all their copies. ``example`` [B, C,
    H, W] holds images of the dataset: on them the form of the model that is attacked is checked.
    """

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    execution: Execution
    processes: Processes
    device: torch.device
    example: InitVar[torch.Tensor]
    images_at_a_time: int
    teacher: Teacher | None = None

    def __post_init__(self, example: torch.Tensor) -> None:
        # An attack may see one copy of each image, or all.
        shapes = {self.images_at_a_time, self.images_at_a_time * self.objective.copies}
        self.forward = self.execution.compiled(self.model, shapes)
        self._form = attacked_form(
            self.model, example, CONVOLUTION_DTYPES[self.execution.precision]
        )
        # For evaluation, whose batches have other shapes than those compiled for.
        self.attacked_uncompiled = self.model if self._form is None else self._form
        self.attacked = self.execution.compiled(self.attacked_uncompiled, shapes)
        # May be replaced by something that does the same, like a GraphedUpdate.
        self.compute: Callable[[Inputs], torch.Tensor] = self.computed

    @property
    def _always_attacks(self) -> bool:
        """Whether the objective may attack where its epsilon, which it does not define, is 0."""
        kind = type(self.objective)
        is_own = (
            kind.attacked is not Objective.attacked or kind.adversarial is not Objective.adversarial
        )
        return is_own and kind.epsilon is Objective.epsilon

    def refresh_attacked(self) -> None:
        """Copy the model's present weights to the form that is attacked."""
        if self._form is not None:
            self._form.refresh()

    def __call__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        whole: int,
        part: slice,
        address: Address,
        weight: float,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Update on images [b, C, H, W], which are ``part`` of a batch of ``whole`` images in all
        processes.

        ``weight`` multiplies the loss. ``indices`` int64 [b] of the images are for the votes of a
        teacher. Returns the sums over this process's noisy copies, as ``no_sums``.
        """
        self.model.train()
        self.processes.share_buffers(self.model)
        # Drawn for the whole batch, so that the noise does not depend on the number of processes.
        generator = address.generator(self.device, Purpose.OBJECTIVE)
        noise = self.objective.draw(images[:1].expand(whole, *images.shape[1:]), generator)[part]
        batch = self.objective.batch(images, labels, noise, address.epoch)
        further: dict[str, Any] = {} if self.teacher is None else self.teacher.supplies(indices)
        if self.objective.uniforms:
            further["uniforms"] = draw_uniforms(whole, self.objective.uniforms, generator)[part]
        sums = self.compute(
            Inputs(**{**vars(batch), **further}, whole=whole, address=address, weight=weight)
        )
        if self.processes.size > 1:
            self.processes.average_gradients(self.model)
            self.optimizer.step()
        return sums

    def seeded(self, inputs: Inputs) -> torch.Generator:
        """Seed layers that draw random numbers, like dropout; returns the generator of the
        attack.
        """
        address, rank = inputs.address, self.processes.rank
        torch.manual_seed(address.generator("cpu", Purpose.LAYERS, rank).initial_seed())
        return address.generator(self.device, Purpose.ATTACK_CHOICES, rank)

    def computed(self, inputs: Inputs, choices: torch.Generator | None = None) -> torch.Tensor:
        """Compute this process's gradients, and update the weights if it is the only one; returns
        the sums.

        Nothing here looks at the values of a tensor. ``choices`` is the attack's generator, if it
        is seeded already.
        """
        choices = self.seeded(inputs) if choices is None else choices
        if isinstance(inputs.epsilon, torch.Tensor) or inputs.epsilon > 0 or self._always_attacks:
            self.refresh_attacked()
        sums: list[torch.Tensor] = []
        self.optimizer.zero_grad(set_to_none=True)
        starts = range(0, len(inputs.images), self.images_at_a_time)
        for start in starts:
            batch = inputs.part(slice(start, start + starts.step))
            # Makes the loss a mean over all images of the batch: later the processes' gradients are
            # averaged.
            share = len(batch.images) * self.processes.size / inputs.whole
            with self.execution.autocast(
                self.device
            ):  # its copies of weights end with it, within a CUDA graph
                outcome = self.objective.on_batch(self.forward, batch, choices, self.attacked)
            outcome.loss.backward(torch.ones_like(outcome.loss).mul_(inputs.weight * share))
            sums.append(sums_of(outcome, self.objective.TERMS))
        if self.processes.size == 1:
            self.optimizer.step()
        return reduce(torch.add, sums)
