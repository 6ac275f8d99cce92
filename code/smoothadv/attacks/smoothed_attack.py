"""Attacks on a smoothed classifier as functions of (model, inputs, labels): noise, restarts,
targets, memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from smoothadv.architectures.logits import frozen
from smoothadv.attacks.estimators import (
    Model,
    PlugIn,
    Stein,
    no_noise,
    noisy_logits,
    smoothed_loss,
)
from smoothadv.attacks.geometry import uniform_in_ball
from smoothadv.attacks.gradient_attack import GradientAttack
from smoothadv.attacks.micro_batches import (
    FixedShape,
    InParts,
    places_in_pass,
    rows_per_pass,
)
from smoothadv.base.devices import within_memory
from smoothadv.base.errors import NonFiniteError, UserError
from smoothadv.base.settings import checked, found_value
from smoothadv.noise import GaussianNoise, Purpose, Rows, derive_generator

TargetRule = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Generator]], torch.Tensor]
"""Probabilities [B, K], labels int64 [B] and a generator for each example give the targets, int64
[B].
"""


def _random(
    probabilities: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """A class other than the label, uniformly distributed, from the generator of each example."""
    classes = probabilities.shape[1]
    shifts = [
        int(torch.randint(1, classes, (1,), generator=generator, device="cpu"))
        for generator in generators
    ]
    return (labels + torch.tensor(shifts, device=labels.device)) % classes


TARGET_RULES: dict[
    str, TargetRule
] = {  # the most and the least probable class other than the label, or any such class
    "runner-up": lambda probabilities, labels, _: probabilities.scatter(
        1, labels[:, None], -1.0
    ).argmax(1),
    "least-likely": lambda probabilities, labels, _: probabilities.scatter(
        1, labels[:, None], 2.0
    ).argmin(1),
    "random": _random,
}
EVERY = "every"
"""Aim at each class in turn, and keep the attack after which the label is least probable."""
KNOWN_TARGETS = (*TARGET_RULES, EVERY)


def best_of(found: Sequence[torch.Tensor], success: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of each example, among the results ``found`` [B, ...], the one of most ``success`` [B]; of
    equal ones the first.
    """
    best = torch.stack(list(success)).argmax(0)
    return torch.stack(list(found))[best, torch.arange(len(best), device=best.device)]


@dataclass(frozen=True)
class Examples:
    """What an attack gets of each example: the arguments of ``SmoothedAttack``, but the model."""

    inputs: torch.Tensor
    labels: torch.Tensor
    indices: Sequence[int] | None
    epsilon: torch.Tensor | None = None
    targets: torch.Tensor | None = None

    @property
    def numbers(self) -> Sequence[int]:
        """The indices, by default 0 to B - 1."""
        return range(len(self.inputs)) if self.indices is None else self.indices

    def checked(self) -> Examples:
        """ValueError unless inputs are floats in [0, 1], labels whole numbers of at least 0, and
        there is one value per example.
        """
        for name, kind in (("inputs", "float32 in [0, 1], [B, ...]"), ("labels", "int64 [B]")):
            values = getattr(self, name)
            is_tensor = isinstance(values, torch.Tensor) and values.dim() > 0
            if not is_tensor or values.is_floating_point() != (name == "inputs"):
                raise ValueError(f"{name}: {found_value(values)}, expected a tensor {kind}")
        for name, values in vars(self).items():
            if values is not None and len(values) != len(self.inputs):
                raise ValueError(f"{len(values)} {name} for {len(self.inputs)} inputs")
        for classes in (self.labels, self.targets):
            if classes is not None and bool((classes < 0).any()):
                raise ValueError(f"there is no class {int(classes.min())}")
        if not bool(((self.inputs >= 0) & (self.inputs <= 1)).all()):
            raise ValueError(
                "inputs must lie in [0, 1], as perturbations are measured there and stay there"
            )
        return self

    def of(self, rows: list[int]) -> Examples:
        """The examples with these numbers alone."""
        epsilon, targets = (
            None if values is None else values[rows] for values in (self.epsilon, self.targets)
        )
        return Examples(
            self.inputs[rows],
            self.labels[rows],
            [self.numbers[row] for row in rows],
            epsilon,
            targets,
        )


class SmoothedAttack:
    """Attacks the classifier that ``model`` becomes under Gaussian smoothing (SmoothAdv, sections
    2.2 and 3).

        attack = SmoothedAttack(PGD(epsilon=0.5, num_steps=20), sigma=0.25, num_noise_vec=64)
        adversarial = attack(model, inputs, labels)

    ``attack`` is any of ``ATTACKS``; ``sigma`` >= 0 is the standard deviation of the smoothing
    noise on inputs in [0, 1], 0 for the base classifier itself; ``num_noise_vec`` is m_test, the
    number of noise draws per example. They, and all other randomness, are functions of (``seed``,
    index of the example) alone: the result for an example does not depend on the other examples of
    the batch, not even in its last bit where a call names indices.

    Of ``restarts`` runs, the first begins where the attack does, the others at uniform points of
    the ball; the one with the best objective on the draws is kept. ``target`` makes the attack
    targeted: a class, a name in ``TARGET_RULES``, or ``EVERY``; examples whose label is the target
    are returned unchanged.

    ``batch`` is the largest number of noisy copies in a forward and backward pass. Where memory
    runs out, it is halved and ``on_smaller_batch`` is called with the new value; it affects nothing
    but the rounding of sums.
    """

    def __init__(
        self,
        attack: GradientAttack,
        sigma: float,
        num_noise_vec: int = 1,
        *,
        seed: int = 0,
        restarts: int = 1,
        target: int | str | None = None,
        batch: int = 256,
        on_smaller_batch: Callable[[int], None] = lambda batch: None,
    ) -> None:
        attack = checked("attack", attack, None, GradientAttack)
        if min(num_noise_vec, restarts, batch) < 1 or seed < 0 or not 0 <= sigma < math.inf:
            raise ValueError(
                "need num_noise_vec, restarts and batch of at least 1, seed and sigma of at least 0"
            )
        if sigma == 0 and (num_noise_vec > 1 or isinstance(attack.estimator, Stein)):
            raise ValueError(
                "without noise, sigma = 0, there is one copy and no gradient to be estimated from "
                "noise"
            )
        if attack.targeted:
            raise ValueError("give the target here, and an attack that is not targeted itself")
        if isinstance(target, int) and not isinstance(target, bool):
            if not 0 <= target < 2**63:
                raise ValueError(f"target: found {target!r}, but there is no such class")
        elif target is not None and target not in KNOWN_TARGETS:
            raise ValueError(
                f"target: found {target!r}, expected {', '.join(KNOWN_TARGETS)}, or the number of "
                "a class"
            )
        self.attack, self.sigma, self.num_noise_vec, self.seed = attack, sigma, num_noise_vec, seed
        self.restarts, self.target, self.batch = restarts, target, batch
        self.on_smaller_batch = on_smaller_batch

    @property
    def examples_per_pass(self) -> int:
        """The number of examples that share a pass over the model.

        The index of an example decides its place in a pass. A call that names indices should
        therefore have several times as many examples: fewer places then stay empty.
        """
        return max(1, self.batch // self.num_noise_vec)

    def __call__(
        self,
        model: Model,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int] | None = None,
        *,
        epsilon: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Adversarial inputs for ``inputs`` [B, ...] in [0, 1] and ``labels`` int64 [B]: as inputs,
        detached.

        ``model`` maps [B, ...] to logits [B, K]; ``indices`` are those of the examples in their
        dataset (default: 0 to B - 1). ``epsilon`` [B] replaces that of the attack, ``targets``
        int64 [B] replace the target rule. UserError where not even one noisy copy fits into memory,
        NonFiniteError where a gradient is NaN or infinite.
        """
        if epsilon is not None:
            epsilon = torch.atleast_1d(torch.as_tensor(epsilon, dtype=torch.float64))
        found = self._in_groups(
            self._attack, model, Examples(inputs, labels, indices, epsilon, targets).checked()
        )
        if not bool(found.isfinite().all()):
            raise NonFiniteError(
                "the attack met gradients that are not finite: the classifier's weights are "
                "broken, or its precision is too low"
            )
        return found

    def choose_targets(
        self,
        model: Model,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """The classes int64 [B] at which the attack would aim; None if it is untargeted or aims at
        every class.
        """
        if self.target is None or self.target == EVERY:
            return None
        examples = Examples(inputs, labels, indices).checked()

        def choose(seen: FixedShape, group: Examples) -> torch.Tensor:
            return self._chosen(seen, group, self._noise(group.inputs, group.numbers))

        return self._in_groups(choose, model, examples) if len(inputs) else labels.clone()

    @torch.no_grad()
    def shares(
        self, model: Model, inputs: torch.Tensor, indices: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The shares of the votes for each class, float [B, K], on the draws of the attack."""

        def count(seen: FixedShape, group: Examples) -> torch.Tensor:
            logits = noisy_logits(seen, group.inputs, self._noise(group.inputs, group.numbers))
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).float().mean(1)

        no_class = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        return self._in_groups(count, model, Examples(inputs, no_class, indices))

    def _in_groups(
        self,
        work: Callable[[FixedShape, Examples], torch.Tensor],
        model: Model,
        examples: Examples,
    ) -> torch.Tensor:
        """Calls ``work`` for as many examples at a time as share a pass, and for fewer once memory
        has run out.

        Kernels round identically for the same shape and the same place in it: examples with indices
        get both. ValueError where the model has too few classes.
        """
        inputs, numbers = examples.inputs, examples.numbers
        # A target rule needs a class other than the label.
        largest = self.target if isinstance(self.target, int) else int(self.target is not None)
        for named in (examples.labels, examples.targets):
            if named is not None and len(named):
                largest = max(largest, int(named.max()))
        # Without indices, results need not agree with those of other batches: no padding.
        is_padded = examples.indices is not None
        results: dict[int, torch.Tensor] = {}
        waiting = list(range(len(inputs)))

        def results_of_a_pass() -> dict[int, torch.Tensor]:
            count = self.examples_per_pass
            placed = (
                places_in_pass({row: numbers[row] for row in waiting}, count)
                if is_padded
                else waiting[:count]
            )
            rows = [waiting[0] if row is None else row for row in placed]
            shape = rows_per_pass(self.num_noise_vec, self.batch)
            shape = shape if is_padded else min(shape, len(inputs) * self.num_noise_vec)
            with frozen(model):
                found = work(FixedShape(model, shape, 1 + largest), examples.of(rows))
            return {row: result for row, result in zip(placed, found) if row is not None}

        while waiting:
            results |= within_memory(results_of_a_pass, self._halve)
            waiting = [row for row in waiting if row not in results]
        return (
            torch.stack([results[row] for row in range(len(inputs))])
            if results
            else inputs.detach()
        )

    def _halve(self, reason: str) -> None:
        if self.batch == 1:
            raise UserError(
                f"out of memory with one noisy copy at a time: fewer draws may fit ({reason})"
            )
        self.batch //= 2
        self.on_smaller_batch(self.batch)

    def _attack(self, model: FixedShape, group: Examples) -> torch.Tensor:
        inputs, labels, indices = group.inputs, group.labels, group.numbers
        noise = self._noise(inputs, indices)
        epsilon, targets = group.epsilon, group.targets
        if epsilon is None:
            epsilon = torch.full((len(inputs),), self.attack.epsilon, dtype=torch.float64)
        if targets is None and self.target not in (None, EVERY):
            targets = self._chosen(model, group, noise)
        if targets is not None:
            epsilon = torch.where((targets == labels).cpu(), 0.0, epsilon.cpu())
        attack = dataclasses.replace(
            self.attack, estimator=InParts(self.attack.estimator, model.rows)
        )
        # One result is kept, not one for each goal and run: there may be a thousand classes.
        best = inputs.detach()
        most = torch.full((len(inputs),), -math.inf, device=inputs.device)
        for goal, (targeted, classes) in enumerate(self._goals(model, inputs, labels, targets)):
            for run in range(self.restarts):
                generators = self._generators(
                    indices, Purpose.ATTACK_CHOICES, *(goal, run) * (goal + run > 0)
                )
                start = (
                    uniform_in_ball(inputs, epsilon.to(inputs.device), generators) if run else None
                )
                one = dataclasses.replace(attack, targeted=targeted)(
                    model, inputs, classes, noise, generators, epsilon=epsilon, start=start
                )
                if self.restarts == 1 and self.target != EVERY:
                    return one
                wanted = labels if targets is None else targets
                success = self._success(model, one, wanted, noise, targets is not None)
                best = best_of([best, one], [most, success])
                most = torch.maximum(most, success)
        return best

    @torch.no_grad()
    def _goals(
        self,
        model: FixedShape,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        targets: torch.Tensor | None,
    ) -> list[tuple[bool, torch.Tensor]]:
        """The attacks to run: for each, whether it is targeted, and its labels [B]."""
        if targets is not None:
            return [(True, targets)]
        if self.target is None:
            return [(False, labels)]
        classes = model(inputs[:1]).shape[-1]
        return [(True, (labels + shift) % classes) for shift in range(1, classes)]

    def _noise(self, inputs: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        """The draws of each example, [B, m, ...], which no prediction uses; zeros for the base
        classifier.
        """
        if self.sigma == 0:
            return no_noise(inputs)
        noise = GaussianNoise(self.sigma, self.seed)
        drawn = torch.empty(
            (len(inputs), self.num_noise_vec, *inputs.shape[1:]),
            dtype=inputs.dtype,
            device=inputs.device,
        )
        streams = [
            noise.stream(int(index), inputs.device, Purpose.ATTACK_NOISE) for index in indices
        ]
        black = torch.zeros(inputs.shape[1:], device=inputs.device)
        # Drawing may take several times the memory of the draws.
        starts = range(0, self.num_noise_vec, self.batch)
        counts = [(start, min(self.batch, self.num_noise_vec - start)) for start in starts]
        rows = [Rows(stream, black, *count) for stream in streams for count in counts]
        noise.fill(drawn.flatten(0, 1), rows)
        return drawn

    def _generators(self, indices: Sequence[int], *purpose: int) -> list[torch.Generator]:
        """A generator per example for this purpose, on the CPU, so that choices are the same on all
        devices.
        """
        return [derive_generator("cpu", self.seed, int(index), *purpose) for index in indices]

    @torch.no_grad()
    def _chosen(self, model: Model, group: Examples, noise: torch.Tensor) -> torch.Tensor:
        """The targets int64 [B]: the one class, or those that the rule chooses."""
        if isinstance(self.target, int):
            return torch.full_like(group.labels, self.target)
        assert self.target is not None  # an untargeted attack chooses nothing
        probabilities = F.softmax(noisy_logits(model, group.inputs, noise), dim=-1).mean(1)
        generators = self._generators(group.numbers, Purpose.ATTACK_TARGETS)
        return TARGET_RULES[self.target](probabilities, group.labels, generators)

    @torch.no_grad()
    def _success(
        self,
        model: Model,
        found: torch.Tensor,
        classes: torch.Tensor,
        noise: torch.Tensor,
        targeted: bool,
    ) -> torch.Tensor:
        """The success of an attack, [B]: the loss J or, for an attack that sees decisions only, the
        share of votes.
        """
        logits, estimator = noisy_logits(model, found, noise), self.attack.estimator
        if isinstance(estimator, Stein) and estimator.hard:
            loss = (logits.argmax(-1) != classes[:, None]).to(found.dtype).mean(1)
        else:
            loss = smoothed_loss(
                estimator.sharpened(logits) if isinstance(estimator, PlugIn) else logits, classes
            )
        return -loss if targeted else loss
