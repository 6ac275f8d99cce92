"""What all gradient attacks on a smoothed classifier share: checks, the model's state, the final projection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from smoothadv.attacks.geometry import project_ball
from smoothadv.attacks.gradients import GradientEstimator, frozen, no_noise, plug_in
from smoothadv.settings import perturbation_size, positive_int, setting


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
        if not self.epsilon >= 0 or self.num_steps < 1:
            raise ValueError(f"need epsilon >= 0 and num_steps >= 1, got {self.epsilon} and {self.num_steps}")

    def __call__(
        self,
        model: Callable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Adversarial inputs [B, ...] for inputs [B, ...] and labels int64 [B]; see the package's docstring."""
        if self.epsilon == 0:
            return inputs.detach()
        with frozen(model):
            v = self.perturbation(model, inputs, labels, no_noise(inputs) if noise is None else noise, generator)
        return self.finish(inputs, project_ball(v, self.epsilon)).detach()

    def finish(self, inputs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The adversarial inputs of perturbations ``v`` that are in the ball."""
        # The clamp only catches the last rounding of a sum that is in [0, 1] already.
        return (inputs + v).clamp(0, 1)

    @abstractmethod
    def perturbation(
        self,
        model: Callable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        """The perturbation v [B, ...] with inputs + v in [0, 1]; it is projected to the ball afterwards."""

    @property
    def direction(self) -> int:
        """1 to ascend the loss of the labels, -1 to descend it towards them."""
        return -1 if self.targeted else 1
