"""SmoothAdv-PGD: projected gradient descent on the smoothed classifier (SmoothAdv, section 3)."""

from dataclasses import dataclass

import torch

from smoothadv.attacks import ATTACKS
from smoothadv.attacks.geometry import (
    gaussian_like,
    per_example,
    project_ball,
    project_box,
    uniform_in_ball,
    unit,
)
from smoothadv.attacks.gradient_attack import GradientAttack, Problem
from smoothadv.base.settings import positive_float, setting


@ATTACKS.register("PGD")
@dataclass(frozen=True)
class PGD(GradientAttack):
    """T steps of length ``step_size`` along the unit gradient, each followed by clipping to [0, 1]
    and the ball.

    v <- ball(box(v + step unit(grad J))), v = 0 at first; the step is 2 epsilon / T. ``targeted``
    decreases J instead. Where the gradient is zero, the example does not move.
    """

    step_size: float | None = setting(
        None, parse=positive_float, help="l2 length of a PGD step (default: 2 epsilon / T)"
    )
    random_start: bool = setting(
        False, help="start PGD at a uniform point of the epsilon ball, not at the image"
    )
    random_if_flat: bool = setting(
        False,
        help="where the gradient is 0, step in a random direction to the sphere, as the released "
        "code does",
    )

    def perturbation(self, problem: Problem) -> torch.Tensor:
        inputs, epsilon = problem.inputs, problem.epsilon
        if problem.start is not None:
            v = problem.start
        elif self.random_start:
            v = project_box(inputs, uniform_in_ball(inputs, epsilon, problem.generator))
        else:
            v = torch.zeros_like(inputs)
        # The step of SmoothAdv, appendix D, unless stated.
        length = (
            2 * epsilon / self.num_steps
            if self.step_size is None
            else torch.full_like(epsilon, self.step_size)
        )
        step = per_example((self.direction * length).to(inputs.dtype), inputs)
        for _ in range(self.num_steps):
            direction = unit(problem.estimate(v).gradient)
            if self.random_if_flat:
                # Gaussian vectors, not of length 1, replace directions that are 0.
                is_flat = per_example((direction == 0).flatten(1).all(1), direction)
                direction = torch.where(
                    is_flat, gaussian_like(direction, problem.generator), direction
                )
            v = project_ball(project_box(inputs, v + step * direction), epsilon)
        return v
