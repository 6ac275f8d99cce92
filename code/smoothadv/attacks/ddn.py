"""SmoothAdv-DDN: decoupled direction and norm (Rony et al., CVPR 2019) on the smoothed
classifier.
"""

import math
from dataclasses import dataclass

import torch

from smoothadv.attacks import ATTACKS
from smoothadv.attacks.geometry import l2_norm, per_example, project_box, unit
from smoothadv.attacks.gradient_attack import GradientAttack, Problem
from smoothadv.base.settings import number, positive_float, setting


@ATTACKS.register("DDN")
@dataclass(frozen=True)
class DDN(GradientAttack):
    """The closest adversarial example among T iterates, brought back into the ball of radius
    ``epsilon``.

    The direction follows the gradient with cosine-annealed steps; the norm shrinks by ``gamma``
    while the example is adversarial and grows while it is not. Adversarial means that the majority
    of the m noisy copies is not classified as the label (``targeted``: is). Where no iterate was
    adversarial, the result is the clean input. An input that is adversarial before the first step
    is returned unchanged.
    """

    initial_norm: float = setting(
        1.0, flag="--init-norm-DDN", parse=positive_float, help="l2 norm at DDN's first step"
    )
    gamma: float = setting(
        0.05,
        flag="--gamma-DDN",
        parse=number(
            float, "a number strictly between 0 and 1, like 0.05", lambda value: 0 < value < 1
        ),
        help="DDN's relative change of norm per step",
    )

    def perturbation(self, problem: Problem) -> torch.Tensor:
        unmoved = torch.zeros_like(problem.inputs)
        if self.num_steps == 1:  # which asks whether the image is adversarial already
            problem.logits(unmoved)
            return unmoved
        clean = problem.estimate(unmoved)
        found = self._search(problem, unit(clean.gradient))
        is_open = ~self._adversarial(clean.logits, problem.labels)
        return torch.where(per_example(is_open, found), found, unmoved)

    def _search(self, problem: Problem, direction: torch.Tensor) -> torch.Tensor:
        """The shortest adversarial iterate [B, ...], 0 if there is none.

        ``direction`` [B, ...] is the unit gradient at the inputs.
        """
        inputs, labels = problem.inputs, problem.labels
        best = torch.zeros_like(inputs)
        best_norm = worst_norm = l2_norm(torch.maximum(inputs, 1 - inputs))
        norm = torch.full_like(worst_norm, self.initial_norm)
        v, adversarial = best, torch.zeros_like(labels, dtype=torch.bool)
        if problem.start is not None:
            v, direction = problem.start, unit(problem.estimate(problem.start).gradient)
        last = self.num_steps - 1
        for k in range(last):
            # Cosine annealing from 1 at k = 0 to 0.01 at k = T - 1.
            step = 0.01 + 0.495 * (1 + math.cos(math.pi * k / last))
            v = v + self.direction * step * direction
            norm = torch.minimum(
                torch.where(adversarial, norm * (1 - self.gamma), norm * (1 + self.gamma)),
                worst_norm,
            )
            v = project_box(inputs, unit(v) * per_example(norm, v))
            if k + 2 < self.num_steps:
                estimate = problem.estimate(v)
                direction, logits = unit(estimate.gradient), estimate.logits
            else:
                logits = problem.logits(v)  # no step follows that needs a gradient
            adversarial = self._adversarial(logits, labels)
            length = l2_norm(v)
            better = adversarial & (length < best_norm)
            best, best_norm = (
                torch.where(per_example(better, v), v, best),
                torch.where(better, length, best_norm),
            )
        return best

    def _adversarial(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Whether most copies get another class than the label (targeted: the label): [B, m, K] and
        [B] give bool [B].

        Of classes with equally many copies, the smallest counts.
        """
        classes = torch.arange(logits.shape[-1], device=logits.device)
        votes = (logits.argmax(-1, keepdim=True) == classes).sum(1)
        return (votes.argmax(-1) == labels) if self.targeted else (votes.argmax(-1) != labels)
