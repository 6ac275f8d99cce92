"""SmoothAdv-DDN: decoupled direction and norm (Rony et al., CVPR 2019) on the smoothed classifier."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from smoothadv.attacks import ATTACKS
from smoothadv.attacks.geometry import l2_norm, per_example, project_box, quantize, unit
from smoothadv.attacks.gradient_attack import GradientAttack
from smoothadv.attacks.gradients import noisy_logits
from smoothadv.settings import number, positive_float, setting

_levels = number(int, "a number of grey levels of at least 2, like 256", lambda v: v >= 2)
_unit_interval = number(float, "a number strictly between 0 and 1, like 0.05", lambda v: 0 < v < 1)


@ATTACKS.register("DDN")
@dataclass(frozen=True)
class DDN(GradientAttack):
    """The closest adversarial example among T iterates, brought back into the ball of radius ``epsilon``.

    The direction follows the gradient with cosine-annealed steps; the norm shrinks by ``gamma`` while the
    example is adversarial and grows while it is not. Adversarial means that the majority of the m noisy
    copies is not classified as the label (``targeted``: is). Where no iterate was adversarial the
    clean input is returned. ``quantization_levels`` rounds every iterate to that many grey levels, as the
    released code does with 256; nothing is rounded after the final projection, so that ||v|| <= epsilon holds.
    """

    initial_norm: float = setting(1.0, flag="--init-norm-DDN", parse=positive_float, help="l2 norm at DDN's first step")
    gamma: float = setting(
        0.05, flag="--gamma-DDN", parse=_unit_interval, help="DDN's relative change of norm per step"
    )
    quantization_levels: int | None = setting(
        None, flag="--levels-DDN", parse=_levels, help="round DDN's iterates to this many grey levels (default: none)"
    )
    evaluate_last: bool = setting(False, flag="--evaluate-last-DDN", help="let DDN's last update compete as well")

    def perturbation(
        self,
        model: Callable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        v, best = torch.zeros_like(inputs), torch.zeros_like(inputs)
        worst_norm = l2_norm(torch.maximum(inputs, 1 - inputs))
        best_norm = worst_norm
        norm = torch.full_like(worst_norm, self.initial_norm)
        for k in range(self.num_steps):
            estimate = self.estimator(model, inputs + v, labels, noise)
            adversarial = self._adversarial(estimate.logits, labels)
            best, best_norm = _keep_shorter(adversarial, v, best, best_norm)
            v = v + self.direction * self._step_length(k) * unit(estimate.gradient)
            norm = torch.minimum(torch.where(adversarial, norm * (1 - self.gamma), norm * (1 + self.gamma)), worst_norm)
            v = project_box(inputs, unit(v) * per_example(norm, v))
            if self.quantization_levels is not None:
                v = quantize(inputs + v, self.quantization_levels) - inputs
        if self.evaluate_last:
            with torch.no_grad():
                logits = noisy_logits(model, inputs + v, noise)
            best, _ = _keep_shorter(self._adversarial(logits, labels), v, best, best_norm)
        return best

    def _step_length(self, k: int) -> float:
        """Cosine annealing from 1 at k = 0 to 0.01 at k = T - 1."""
        if self.num_steps == 1:
            return 1.0
        return 0.01 + 0.495 * (1 + math.cos(math.pi * k / (self.num_steps - 1)))

    def _adversarial(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Whether the majority of copies errs (or, targeted, obeys): [B, m, K] and [B] give bool [B].

        Ties go to the smaller class.
        """
        votes = F.one_hot(logits.argmax(-1), logits.shape[-1]).sum(1)
        return (votes.argmax(-1) == labels) if self.targeted else (votes.argmax(-1) != labels)


def _keep_shorter(
    adversarial: torch.Tensor, v: torch.Tensor, best: torch.Tensor, best_norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shorter of v and best where v is adversarial, else best; with its norm [B]."""
    norm = l2_norm(v)
    better = adversarial & (norm < best_norm)
    return torch.where(per_example(better, v), v, best), torch.where(better, norm, best_norm)
