"""SmoothAdv-PGD: projected gradient descent on the smoothed classifier (SmoothAdv, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from smoothadv.attacks import ATTACKS
from smoothadv.attacks.geometry import per_example, project_ball, project_box, uniform_in_ball, unit
from smoothadv.attacks.gradient_attack import GradientAttack
from smoothadv.settings import positive_float, setting


@ATTACKS.register("PGD")
@dataclass(frozen=True)
class PGD(GradientAttack):
    """T steps of length ``step_size`` along the unit gradient, each followed by clipping to [0, 1] and the ball.

    v <- ball(box(v + step unit(grad J))), v = 0 at first; the step is 2 epsilon / T. ``targeted`` descends
    J instead, towards the labels given. A zero gradient leaves the example where it is.
    """

    step_size: float | None = setting(
        None, parse=positive_float, help="l2 length of a PGD step (default: 2 epsilon / T)"
    )
    random_start: bool = setting(False, help="start PGD at a uniform point of the epsilon ball, not at the image")
    random_if_flat: bool = setting(
        False, help="where the gradient is 0, step in a random direction to the sphere, as the released code does"
    )

    def perturbation(
        self,
        model: Callable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        step = 2 * self.epsilon / self.num_steps if self.step_size is None else self.step_size
        v = torch.zeros_like(inputs)
        if self.random_start:
            v = project_box(inputs, uniform_in_ball(inputs, self.epsilon, generator))
        for _ in range(self.num_steps):
            direction = unit(self.estimator(model, inputs + v, labels, noise).gradient)
            if self.random_if_flat:
                direction = _random_where_flat(direction, generator)
            v = project_box(inputs, v + self.direction * step * direction)
            v = project_ball(v, self.epsilon)
        return v


def _random_where_flat(direction: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Directions [B, ...] with Gaussian vectors, not brought to length 1, in the place of those that are 0."""
    gaussian = torch.empty_like(direction).normal_(generator=generator)
    return torch.where(per_example((direction == 0).flatten(1).all(1), direction), gaussian, direction)
