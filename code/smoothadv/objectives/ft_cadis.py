"""FT-CADIS (Jang et al., 2024): fine-tuning behind a frozen denoiser, on the copies that it leaves
recognizable.
"""

from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.attacks.estimators import noisy_logits
from smoothadv.base.settings import perturbation_size, setting
from smoothadv.objectives import OBJECTIVES, Batch, BatchLoss
from smoothadv.objectives.cat_rs import MovedNoise, each_cross_entropy, worst_divergence


@OBJECTIVES.register("ft-cadis")
@dataclass(frozen=True)
class FTCADIS(MovedNoise):
    """1/m times the sum of CE(f_i, y) over the copies f_i of class y, of the smallest CE if there
    are none, + lambda [all are of class y] max_i KL(p || softmax F(x + eta*_i)).

    f_i = F(x + eta_i), and eta_i = D(x + noise_i) - x is what a denoiser D before F leaves of the
    noise, without gradient; without a denoiser it is the noise. p is the mean of softmax f_i, and
    eta* is eta after T steps that increase the divergence from p (``attacks.noise_attacks``). As in
    the released code, gradients pass through p; there, the targets of the attack are those of the
    network in training mode, here in eval mode, as its steps. The cost is the denoiser's m passes,
    m forward passes, m T gradients, and 2 m forward and backward passes.
    """

    TERMS = ("cross_entropy", "divergence")
    MOVES_RESIDUE = True
    BY_NOISE = {"regularization": {1.0: 4.0}}
    noise_epsilon: float = setting(
        0.125, parse=perturbation_size, help="l2 distance that the attack moves noise"
    )

    def attacked(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Batch:
        """The batch with attacked noise."""
        with torch.no_grad():
            targets = noisy_logits(model, batch.images, batch.noise).softmax(-1).mean(1)
        return self.moved(model, batch, targets)

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        """The loss of the copies, and of those with attacked noise."""
        logits = noisy_logits(model, batch.images, batch.noise)
        others = noisy_logits(model, batch.images, attacked.noise)
        loss, terms = self.combined(logits, others, batch.labels)
        return BatchLoss.of_logits(loss, terms, logits, batch.labels)

    def combined(
        self, logits: torch.Tensor, others: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and terms, for logits [B, m, K] of copies and of attacked ones."""
        each, is_right = each_cross_entropy(logits, labels), logits.argmax(-1) == labels[:, None]
        is_smallest = torch.arange(each.shape[1], device=each.device) == each.argmin(1)[:, None]
        counted = is_right | (is_smallest & ~is_right.any(1, keepdim=True))
        shares = logits.softmax(-1).mean(1)
        # The gradient of p log p at 0 is not finite.
        worst = worst_divergence(others, shares.clamp_min(torch.finfo(shares.dtype).tiny))
        terms = (each * counted).mean(), (worst * is_right.all(1)).mean()
        return terms[0] + self.regularization * terms[1], dict(zip(self.TERMS, terms))
