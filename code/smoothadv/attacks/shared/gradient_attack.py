"""What all gradient attacks on a smoothed classifier share: checks, the model's state, the final projection."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from smoothadv.attacks.estimators import Estimate, GradientEstimator, frozen, no_noise, noisy_logits, plug_in
from smoothadv.attacks.shared.geometry import Randomness, project_ball, project_box
from smoothadv.attacks.shared.micro_batches import FixedShape
from smoothadv.settings import perturbation_size, positive_int, setting


@dataclass(frozen=True)
class Problem:
    """What an attack is to solve, of B examples with m noise draws each.

    ``inputs`` [B, ...], ``labels`` int64 [B], ``noise`` [B, m, ...], ``epsilon`` float64 [B] and, where the search is
    not to begin at the inputs, the perturbations ``start`` [B, ...] with inputs + start in [0, 1].
    """

    model: Callable
    inputs: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor
    epsilon: torch.Tensor
    start: torch.Tensor | None
    generator: Randomness
    estimator: GradientEstimator

    def estimate(self, v: torch.Tensor) -> Estimate:
        """The estimator's answer at inputs + v."""
        return self.estimator(self.model, self.inputs + v, self.labels, self.noise)

    @torch.no_grad()
    def logits(self, v: torch.Tensor) -> torch.Tensor:
        """The logits [B, m, K] at inputs + v, where no gradient is needed."""
        return noisy_logits(self.model, self.inputs + v, self.noise)

    @property
    def keeps_places(self) -> bool:
        """Whether no example may be left out, as each has its place in a pass, which is as large without it."""
        return isinstance(self.model, FixedShape)

    def of(self, rows: torch.Tensor) -> Problem:
        """The same for the examples with the numbers ``rows``."""
        generator = self.generator
        if generator is not None and not isinstance(generator, torch.Generator):
            generator = [generator[row] for row in rows.tolist()]
        return replace(
            self,
            inputs=self.inputs[rows],
            labels=self.labels[rows],
            noise=self.noise[rows],
            epsilon=self.epsilon[rows],
            start=None if self.start is None else self.start[rows],
            generator=generator,
        )


@dataclass(frozen=True)
class GradientAttack(ABC):
    """``num_steps`` steps of some method within the l2 ball of radius ``epsilon``, on images in [0, 1].

    ``estimator`` supplies gradients; ``targeted`` makes the labels what the attack wants instead of what it
    wants to leave. A subclass defines ``perturbation``. ValueError unless epsilon >= 0 and num_steps >= 1.
    """

    epsilon: float = setting(
        parse=perturbation_size, help="l2 norm of the attack on images in [0, 1], like 0.25 or 64/255"
    )
    num_steps: int = setting(
        parse=positive_int, help="steps of the attack (paper: 1 to 10 in training, 20 in evaluation)"
    )
    estimator: GradientEstimator = plug_in
    targeted: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < math.inf or self.num_steps < 1:
            raise ValueError(f"need epsilon >= 0 and num_steps >= 1, got {self.epsilon} and {self.num_steps}")

    @torch.inference_mode(False)  # as evaluations often are: gradients are needed all the same
    def __call__(
        self,
        model: Callable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor | None = None,
        generator: Randomness = None,
        *,
        epsilon: torch.Tensor | None = None,
        start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Adversarial inputs [B, ...] for inputs [B, ...] and labels int64 [B]; see the package's docstring.

        ``epsilon`` [B] takes the place of the attack's own; ``start`` [B, ...] holds perturbations to begin from.
        ValueError unless its entries are at least 0 and finite, one for each example.
        """
        if epsilon is None:
            epsilon = torch.full((len(inputs),), self.epsilon, dtype=torch.float64)
        elif epsilon.shape != (len(inputs),) or not bool(((epsilon >= 0) & epsilon.isfinite()).all()):
            raise ValueError(f"epsilon must hold {len(inputs)} finite numbers of at least 0, one for each example")
        if not bool((epsilon > 0).any()):
            return inputs.detach().clone()
        inputs, labels = (values.clone() if values.is_inference() else values for values in (inputs.detach(), labels))
        epsilon = epsilon.to(device=inputs.device, dtype=torch.float64)
        if start is not None:
            start = project_ball(project_box(inputs, start), epsilon)
        noise = no_noise(inputs) if noise is None else noise
        problem = Problem(model, inputs, labels, noise, epsilon, start, generator, self.estimator)
        with frozen(model):
            v = self.perturbation(problem)
        return self.finish(inputs, project_ball(v, epsilon)).detach()

    def finish(self, inputs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The adversarial inputs of perturbations ``v`` that are in the ball."""
        # The clamp only catches the last rounding of a sum that is in [0, 1] already; what the rounding took further
        # from the input than v comes back, lest many pixels leave a small ball together.
        adversarial = (inputs + v).clamp(0, 1)
        too_far = (adversarial - inputs).abs() > v.abs()
        return torch.where(too_far, torch.nextafter(adversarial, inputs), adversarial)

    @abstractmethod
    def perturbation(self, problem: Problem) -> torch.Tensor:
        """The perturbation v [B, ...] with inputs + v in [0, 1]; it is projected to the ball afterwards."""

    @property
    def direction(self) -> int:
        """1 to ascend the loss of the labels, -1 to descend it towards them."""
        return -1 if self.targeted else 1
