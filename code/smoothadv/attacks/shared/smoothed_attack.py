"""An attack on a smoothed classifier as one function of (model, inputs, labels): noise, restarts, targets, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from smoothadv.attacks.estimators import Stein, frozen, no_noise, noisy_logits, smoothed_loss
from smoothadv.attacks.shared.geometry import per_example, uniform_in_ball
from smoothadv.attacks.shared.gradient_attack import GradientAttack
from smoothadv.attacks.shared.micro_batches import FixedShape, InParts, places_in_pass, rows_per_pass
from smoothadv.attacks.target_rules import EVERY, KNOWN_TARGETS, TARGET_RULES
from smoothadv.errors import NonFiniteError, UserError
from smoothadv.memory import first_line, free_cached_memory, is_out_of_memory
from smoothadv.noise import GaussianNoise, Purpose, derive_generator


class SmoothedAttack:
    """Attacks the classifier that ``model`` becomes under Gaussian smoothing (SmoothAdv, section 2.2 and appendix B).

        attack = SmoothedAttack(PGD(epsilon=0.5, num_steps=20), sigma=0.25, num_noise_vec=64)
        adversarial = attack(model, inputs, labels)

    ``attack`` is any of ``ATTACKS``; ``sigma`` >= 0 is the standard deviation of the smoothing noise on inputs in
    [0, 1], 0 for the base classifier itself; ``num_noise_vec`` is m_test, the draws that stand for it. They, and all
    other randomness, are functions of (``seed``, index of the example) alone: the same example is attacked alike
    whatever else is in the batch, to the last bit where a call names indices.

    Of ``restarts`` runs, the first from where the attack begins, the others from uniform points of the ball, that one
    is kept whose objective is best on the draws. ``target`` makes it targeted: a class, a name in ``TARGET_RULES``, or
    ``EVERY``; examples whose label is the target are left alone.

    ``batch`` bounds the noisy copies per forward and backward pass. It is halved where memory runs out, which
    ``on_smaller_batch`` is told; it decides nothing but the rounding of sums.
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
        if min(num_noise_vec, restarts, batch) < 1 or seed < 0 or not 0 <= sigma < math.inf:
            raise ValueError("need num_noise_vec, restarts and batch of at least 1, seed and sigma of at least 0")
        if sigma == 0 and (num_noise_vec > 1 or isinstance(attack.estimator, Stein)):
            raise ValueError("without noise, sigma = 0, there is one copy and no gradient to be estimated from noise")
        if attack.targeted:
            raise ValueError("give the target here, and an attack that is not targeted by itself")
        _check_target(target)
        self.attack, self.sigma, self.num_noise_vec, self.seed = attack, sigma, num_noise_vec, seed
        self.restarts, self.target, self.batch = restarts, target, batch
        self.on_smaller_batch = on_smaller_batch

    @property
    def examples_per_pass(self) -> int:
        """How many examples share a pass over the model.

        Each has a place of its own there, by its index: where calls name indices, several times as many leave fewer
        places empty.
        """
        return max(1, self.batch // self.num_noise_vec)

    def __call__(
        self,
        model: Callable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int] | None = None,
        *,
        epsilon: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Adversarial inputs for ``inputs`` [B, ...] in [0, 1] and ``labels`` int64 [B]: as inputs, detached.

        ``model`` maps [B, ...] to logits [B, K]; ``indices`` are those of the examples in their dataset (default: 0 to
        B - 1). ``epsilon`` [B] takes the place of the attack's own, ``targets`` int64 [B] that of the target rule.
        UserError where not even one noisy copy fits into memory, NonFiniteError where a gradient is NaN or infinite.
        """
        if epsilon is not None:
            epsilon = torch.atleast_1d(torch.as_tensor(epsilon, dtype=torch.float64))
        self._check(inputs, labels, indices, epsilon, targets)
        needed = self._classes_needed(labels, targets)
        found = self._in_groups(self._attack, needed, model, inputs, labels, indices, epsilon, targets)
        if not bool(found.isfinite().all()):
            raise NonFiniteError(
                "the attack met gradients that are not finite: the classifier's weights are broken, or its precision "
                "is too low"
            )
        return found

    def choose_targets(
        self, model: Callable, inputs: torch.Tensor, labels: torch.Tensor, indices: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """The classes int64 [B] that the attack would want of these examples; None if it has no single one."""
        if self.target is None or self.target == EVERY:
            return None
        self._check(inputs, labels, indices)
        if not len(inputs):
            return labels.clone()
        return self._in_groups(self._choose, self._classes_needed(labels, None), model, inputs, labels, indices)

    def _check(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int] | None,
        epsilon: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> None:
        """ValueError where an argument is not one value per example, a class is none, or an input no image."""
        given = {"labels": labels, "indices": indices, "epsilon": epsilon, "targets": targets}
        for name, values in given.items():
            if values is not None and len(values) != len(inputs):
                raise ValueError(f"{len(values)} {name} for {len(inputs)} inputs")
        for classes in (labels, targets):
            if classes is not None and bool((classes < 0).any()):
                raise ValueError(f"there is no class {int(classes.min())}")
        if not bool(((inputs >= 0) & (inputs <= 1)).all()):
            raise ValueError("inputs must lie in [0, 1], as perturbations are measured there and stay there")

    def _in_groups(
        self,
        work: Callable,
        classes: int,
        model: Callable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int] | None,
        *more: torch.Tensor | None,
    ) -> torch.Tensor:
        """``work`` on as many examples at a time as share a pass; on fewer once memory has run out.

        Kernels round alike for the same shape and the same place in it: examples with indices are given both.
        ValueError where the model has fewer than ``classes``.
        """
        # Without indices a batch stands for itself, and need not be padded to the shape of others.
        is_padded = indices is not None
        indices = range(len(inputs)) if indices is None else indices
        results: dict[int, torch.Tensor] = {}
        waiting = list(range(len(inputs)))
        while waiting:
            count = self.examples_per_pass
            placed = places_in_pass({row: indices[row] for row in waiting}, count) if is_padded else waiting[:count]
            rows = [waiting[0] if row is None else row for row in placed]
            parts = [None if values is None else values[rows] for values in more]
            try:
                shape = rows_per_pass(self.num_noise_vec, self.batch)
                shape = shape if is_padded else min(shape, len(inputs) * self.num_noise_vec)
                seen = FixedShape(model, shape, classes)
                with frozen(model):
                    found = work(seen, inputs[rows], labels[rows], [indices[row] for row in rows], *parts)
                results |= {row: result for row, result in zip(placed, found) if row is not None}
                waiting = [row for row in waiting if row not in results]
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            self._halve(reason, inputs.device)  # here, where the error no longer holds what was allocated
        return torch.stack([results[row] for row in range(len(inputs))]) if results else inputs.detach()

    def _classes_needed(self, labels: torch.Tensor, targets: torch.Tensor | None) -> int:
        """How many classes the model must have for the labels and targets to be among them."""
        named = [int(classes.max()) for classes in (labels, targets) if classes is not None and len(classes)]
        # A rule needs another class than the label.
        return 1 + max([self.target if isinstance(self.target, int) else int(self.target is not None), *named])

    def _halve(self, reason: str, device: torch.device) -> None:
        if self.batch == 1:
            raise UserError(f"out of memory with one noisy copy at a time: fewer draws may fit ({reason})")
        self.batch //= 2
        free_cached_memory(device)
        self.on_smaller_batch(self.batch)

    def _attack(
        self,
        model: FixedShape,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int],
        epsilon: torch.Tensor | None,
        targets: torch.Tensor | None,
    ) -> torch.Tensor:
        noise = self._noise(inputs, indices)
        if epsilon is None:
            epsilon = torch.full((len(inputs),), self.attack.epsilon, dtype=torch.float64)
        if targets is None and self.target not in (None, EVERY):
            targets = self._chosen(model, inputs, labels, indices, noise)
        if targets is not None:
            epsilon = torch.where((targets == labels).cpu(), 0.0, epsilon.cpu())
        attack = dataclasses.replace(self.attack, estimator=InParts(self.attack.estimator, model.rows))
        best = best_loss = None
        for goal, (targeted, wanted) in enumerate(self._goals(model, inputs, labels, targets)):
            for run in range(self.restarts):
                generators = self._generators(indices, Purpose.ATTACK_CHOICES, *(goal, run) * (goal + run > 0))
                start = uniform_in_ball(inputs, epsilon.to(inputs.device), generators) if run else None
                found = dataclasses.replace(attack, targeted=targeted)(
                    model, inputs, wanted, noise, generators, epsilon=epsilon, start=start
                )
                if self.restarts == 1 and self.target != EVERY:
                    return found
                loss = self._loss(model, found, labels if targets is None else targets, noise, targets is not None)
                if best is not None:
                    better = loss > best_loss
                    found = torch.where(per_example(better, found), found, best)
                    loss = torch.where(better, loss, best_loss)
                best, best_loss = found, loss
        return best

    @torch.no_grad()
    def _goals(
        self, model: FixedShape, inputs: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor | None
    ) -> list[tuple[bool, torch.Tensor]]:
        """What to try: (whether it is targeted, the labels of the attack [B]) each."""
        if targets is not None:
            return [(True, targets)]
        if self.target is None:
            return [(False, labels)]
        classes = model(inputs[:1]).shape[-1]
        return [(True, (labels + shift) % classes) for shift in range(1, classes)]

    def _noise(self, inputs: torch.Tensor, indices: Sequence[int]) -> torch.Tensor | None:
        """The draws of each example, [B, m, ...], apart from those of any prediction; None for the base classifier."""
        if self.sigma == 0:
            return None
        noise = GaussianNoise(self.sigma, self.seed)
        drawn = torch.empty(
            (len(inputs), self.num_noise_vec, *inputs.shape[1:]), dtype=inputs.dtype, device=inputs.device
        )
        for index, image, row in zip(indices, inputs, drawn):
            stream = noise.stream(int(index), inputs.device, Purpose.ATTACK_NOISE)
            for part in row.split(self.batch):  # generating draws takes several times their memory
                part.copy_(stream.draw(len(part), image))
        return drawn

    def _generators(self, indices: Sequence[int], *purpose: int) -> list[torch.Generator]:
        """One per example for this purpose, on the CPU, so that all devices choose alike."""
        return [derive_generator("cpu", self.seed, int(index), *purpose) for index in indices]

    def _choose(
        self, model: Callable, inputs: torch.Tensor, labels: torch.Tensor, indices: Sequence[int]
    ) -> torch.Tensor:
        return self._chosen(model, inputs, labels, indices, self._noise(inputs, indices))

    def _chosen(
        self,
        model: Callable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int],
        noise: torch.Tensor | None,
    ) -> torch.Tensor:
        """The targets int64 [B], by the rule or all the same."""
        if isinstance(self.target, int):
            return torch.full_like(labels, self.target)
        probabilities = F.softmax(self._logits(model, inputs, noise), dim=-1).mean(1)
        return TARGET_RULES[self.target](probabilities, labels, self._generators(indices, Purpose.ATTACK_TARGETS))

    @torch.no_grad()
    def _logits(self, model: Callable, inputs: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Logits [B, m, K] of the noisy copies."""
        return noisy_logits(model, inputs, no_noise(inputs) if noise is None else noise)

    def _loss(
        self, model: Callable, found: torch.Tensor, wanted: torch.Tensor, noise: torch.Tensor | None, targeted: bool
    ) -> torch.Tensor:
        """How well an attack did, [B], by what it is allowed to see: the loss J, or of hard decisions the votes."""
        logits = self._logits(model, found, noise)
        if isinstance(self.attack.estimator, Stein) and self.attack.estimator.hard:
            loss = (logits.argmax(-1) != wanted[:, None]).to(found.dtype).mean(1)
        else:
            loss = smoothed_loss(logits, wanted)
        return -loss if targeted else loss


def _check_target(target: int | str | None) -> None:
    """ValueError unless it can be the number of a class, or is a rule."""
    is_number = isinstance(target, int) and not isinstance(target, bool)
    if is_number and target < 0:
        raise ValueError(f"there is no class {target}")
    if target is not None and not is_number and target not in KNOWN_TARGETS:
        raise ValueError(f"unknown target {target!r}; known: {', '.join(KNOWN_TARGETS)}, or the number of a class")
