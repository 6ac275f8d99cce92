"""One update of the weights: noise, attack, loss and gradient of a batch, in micro-batches where it
is large; and the evaluation on test images, which is for the log, not for model selection.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import reduce

import torch
from torch import nn

from smoothadv.architectures.denoisers import Denoised
from smoothadv.base.devices import layout_on
from smoothadv.base.distributed import Processes
from smoothadv.base.errors import UserError
from smoothadv.datasets import ImageDataset
from smoothadv.noise import Purpose, derive_generator
from smoothadv.objectives import Batch, BatchLoss, Objective, Some, first_logits
from smoothadv.training.execution import CONVOLUTION_DTYPES, Execution, folded_form
from smoothadv.training.teacher import Teacher

TEST_COLUMNS = (
    "test_loss",
    "test_accuracy",
    "test_clean_accuracy",
    "test_adversarial_accuracy",
    "test_images",
)
NOT_EVALUATED: dict[str, float] = dict(zip(TEST_COLUMNS, [math.nan] * 4 + [0]))
"""The columns of an epoch without an evaluation."""


COUNTS = ("correct", "examples", "unattacked_correct", "unattacked_examples")
"""What an update counts, behind the sum of the loss and before those of its terms."""


def sums_of(loss: BatchLoss, terms: Sequence[str]) -> torch.Tensor:
    """The sums over examples, float64 [5 + terms]: the loss, the COUNTS, and the ``terms`` of the
    loss. They are on the device, since reading them makes it wait.
    """
    if absent := [name for name in terms if name not in loss.terms]:
        raise ValueError(f"TERMS has {', '.join(absent)}, which the loss does not return")
    whole, *parts = (
        value.detach().double() * loss.examples
        for value in (loss.loss, *(loss.terms[name] for name in terms))
    )
    values = whole, *(getattr(loss, name) for name in COUNTS), *parts
    sums = torch.zeros(len(values), dtype=torch.float64, device=loss.loss.device)
    for place, value in enumerate(values):
        sums[place].add_(value)  # to assign would copy a number from the host, and wait
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
    """Updates ``model``, already on its device, with ``optimizer``, behind a frozen ``denoiser`` if
    there is one.

    The gradient of each tensor is shortened to the norm ``clip_gradients``, if that is given.
    Gradients are computed for ``images_at_a_time`` images with all their copies. ``example`` [B, C,
    H, W] holds images of the dataset: on them the form of the model that is attacked is checked.
    ``routes`` are fields of a batch by name, of all N training images, if a router is trained.
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
    denoiser: nn.Module | None = None
    clip_gradients: float | None = None
    routes: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self, example: torch.Tensor) -> None:
        # An attack may see one copy of each image, or all.
        shapes = {self.images_at_a_time, self.images_at_a_time * self.objective.copies}
        self._form = folded_form(self.model, example, CONVOLUTION_DTYPES[self.execution.precision])
        folded = self.model if self._form is None else self._form
        # For evaluation, whose batches have other shapes than those compiled for.
        self.folded_uncompiled = self._behind(folded)
        # An objective that moves what is left of the noise sees the network behind the denoiser.
        trained, attacked = self._behind(self.model), self.folded_uncompiled
        if self.objective.MOVES_RESIDUE:
            trained, attacked = self.model, folded
        self.attacked = attacked
        self.forward = self.execution.compiled(trained, shapes)
        self.folded = self.execution.compiled(attacked, shapes)
        # May be replaced by something that does the same, like a GraphedUpdate.
        self.compute: Callable[[Inputs], torch.Tensor] = self.computed

    def _behind(self, network: nn.Module) -> nn.Module:
        return network if self.denoiser is None else Denoised(self.denoiser, network)

    def _seen(self, batch: Some) -> Some:
        """The batch of an objective that MOVES_RESIDUE: its noise is what the denoiser leaves."""
        if self.denoiser is None or not self.objective.MOVES_RESIDUE:
            return batch
        images = batch.images.unsqueeze(1)
        with torch.no_grad():
            denoised = self.denoiser((images + batch.noise).flatten(0, 1))
        return replace(batch, noise=denoised.unflatten(0, batch.noise.shape[:2]) - images)

    def _step(self) -> None:
        """Change the weights by their gradients."""
        for weight in self.model.parameters():
            if self.clip_gradients is not None and weight.grad is not None:
                nn.utils.clip_grad_norm_(weight, self.clip_gradients)
        self.optimizer.step()

    def refresh_folded(self) -> None:
        """Copy the model's present weights to the form that is attacked."""
        if self._form is not None:
            self._form.refresh()

    def __call__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        indices: torch.Tensor,
        address: Address,
        weight: float = 1.0,
    ) -> torch.Tensor:
        """Update on images [b, C, H, W], this process's part of the batch ``indices`` int64 [B] of
        all processes.

        ``weight`` multiplies the loss. Returns the sums over this process's noisy copies, in the
        form of ``sums_of``.
        """
        self.model.train()
        self.processes.share_buffers(self.model)
        images = images.contiguous(
            memory_format=layout_on(self.device, CONVOLUTION_DTYPES[self.execution.precision])
        )
        _, part = self.processes.share(indices)
        further = {name: each[indices[part]].to(self.device) for name, each in self.routes.items()}
        further |= self.teacher.fields(indices, part) if self.teacher else {}
        batch = self.objective.batch(
            images,
            labels,
            address.epoch,
            address.generator(self.device, Purpose.OBJECTIVE),
            len(indices),
            part,
            **further,
        )
        inputs = Inputs(**vars(batch), whole=len(indices), address=address, weight=weight)
        sums = self.compute(inputs)
        if self.processes.size > 1:
            self.processes.average_gradients(self.model)
            self._step()
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
        kind = type(self.objective)
        # An objective that defines no epsilon has one of 0, and may attack all the same.
        always = kind.attacked is not Objective.attacked and kind.epsilon is Objective.epsilon
        if isinstance(inputs.epsilon, torch.Tensor) or inputs.epsilon > 0 or always:
            self.refresh_folded()
        sums: list[torch.Tensor] = []
        self.optimizer.zero_grad(set_to_none=True)
        starts = range(0, len(inputs.images), self.images_at_a_time)
        for start in starts:
            batch = inputs.part(slice(start, start + starts.step))
            # Makes the loss a mean over all images of the batch: later the processes' gradients are
            # averaged.
            share = len(batch.images) * self.processes.size / inputs.whole
            # Copies of weights end with the context, within a CUDA graph.
            with self.execution.autocast(self.device):
                batch = self._seen(batch)
                with first_logits(self.folded) as first:
                    attacked = self.objective.attacked(self.folded, batch, choices)
                outcome = self.objective.loss(self.forward, batch, attacked)
                outcome = outcome.before_attack(first, batch.labels)
            if not outcome.loss.requires_grad:
                raise UserError(
                    f"{type(self.model).__name__} computes its loss without gradients: let its "
                    "forward return the logits without detach, no_grad or argmax"
                )
            outcome.loss.backward(torch.ones_like(outcome.loss).mul_(inputs.weight * share))
            sums.append(sums_of(outcome, self.objective.TERMS))
        if self.processes.size == 1:
            self._step()
        return reduce(torch.add, sums)

    @torch.no_grad()
    def evaluate(
        self, test_set: ImageDataset, indices: torch.Tensor, batch: int, address: Address
    ) -> dict[str, float]:
        """Loss and accuracy under one draw of noise, without noise, and under noise and the
        objective's attack: TEST_COLUMNS.

        The attack has its full epsilon from the first epoch on; nan where the objective has none.
        All randomness is a function of ``address``.
        """
        self.model.eval()
        self.refresh_folded()
        objective, model = self.objective, self.attacked
        epsilon = objective.epsilon(math.inf)
        taught = {"teacher": self.teacher.network} if self.teacher else {}
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        batches = [
            (number, len(whole), *self.processes.share(whole))
            for number, whole in enumerate(indices.split(batch))
        ]
        batches = [one for one in batches if len(one[2])]
        loaded = test_set.evaluation_batches([own for _, _, own, _ in batches], self.device)
        for (number, whole, _, part), (images, labels) in zip(batches, loaded):
            generator = address.generator(self.device, Purpose.EVALUATION, number)
            seen = objective.batch(images, labels, address.epoch, generator, whole, part, **taught)
            with self.execution.autocast(self.device):
                found = [*objective.test(self.folded_uncompiled, seen)]
                if epsilon:
                    seen = self._seen(replace(seen, epsilon=epsilon))
                    moved = objective.attacked(model, seen, generator)
                    logits = model(moved.images + moved.noise[:, 0])
                    found.append((logits.argmax(1) == labels).sum())
            sums[: len(found)] += torch.stack([value.double() for value in found])
        means = [round(one / len(indices), 6) for one in self.processes.total(sums).tolist()]
        if not epsilon:
            means[3] = math.nan
        return dict(zip(TEST_COLUMNS, [*means, len(indices)]))
