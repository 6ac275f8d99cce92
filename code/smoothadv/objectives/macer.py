"""MACER (Zhai et al., 2020): maximizes a soft certified radius of the images that are classified
correctly.
"""

from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.attacks import GradientAttack
from smoothadv.attacks.estimators import noisy_logits
from smoothadv.base.settings import non_negative_int, positive_float, positive_int, setting
from smoothadv.objectives import OBJECTIVES, Batch, BatchLoss
from smoothadv.objectives.bases import AttackedObjective, weight

_TINY = 1e-10


@OBJECTIVES.register("macer")
@dataclass(frozen=True)
class Macer(AttackedObjective):
    """mean over images of -log p_y + lambda sigma / 2 max(gamma - xi, 0) [correct].

    p is the mean of softmax f over k noisy copies. q is that of softmax(beta f), its two largest
    values q1 and q2: xi = inverse(q1) - inverse(q2) with the quantile function of the normal
    distribution, so that sigma / 2 xi is a radius. The second term counts for images whose class of
    q1 is y. As in the released code, it is 0 where a quantile is infinite, and 1e-10 is added to
    p_y. Before ``lambda_from_epoch`` lambda is 0. The cost is k forward and backward passes.
    """

    TERMS = ("cross_entropy", "hinge")
    BY_NOISE = {"regularization": {0.25: 12.0, 0.5: 6.0, 1.0: 12.0}}
    attack: GradientAttack | None = setting(None, kw_only=True)
    num_noise_vec: int = setting(16, parse=positive_int, help="k, the noise draws per image")
    regularization: float = weight()
    lambda_from_epoch: int = setting(
        0,
        parse=non_negative_int,
        metavar="E",
        help="MACER's lambda is 0 before this epoch, counted from 0 (its authors at sigma 1: 200)",
    )
    sharpness: float = setting(
        16.0,
        flag="--sharpness",
        parse=positive_float,
        help="beta, which multiplies logits in the soft radius",
    )
    gamma: float = setting(
        8.0,
        flag="--hinge",
        parse=positive_float,
        help="MACER's gamma, beyond which a radius is enough",
    )

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        """The ``criterion`` of the noisy copies, with the lambda of the epoch."""
        logits = noisy_logits(model, attacked.images, attacked.noise)
        # That may be a tensor, which the host must not read.
        lambda_ = self.regularization * (batch.epoch >= self.lambda_from_epoch)
        loss, terms = self.criterion(logits, attacked.labels, lambda_)
        return BatchLoss.of_logits(loss, terms, logits, attacked.labels)

    def criterion(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        lambda_: float | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As that of ``Objective``, with ``lambda_`` [] (None: ``regularization``)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        likely = logits.softmax(-1).mean(1).gather(1, labels.unsqueeze(1))
        sharp = (self.sharpness * logits).softmax(-1).mean(1)
        (first, second), (top, _) = (values.unbind(1) for values in sharp.topk(2))
        distance = torch.special.ndtri(first) - torch.special.ndtri(second)
        is_counted = (top == labels) & distance.isfinite() & (distance.abs() <= self.gamma)
        # Where it does not count, the gradient must not be that of an infinite quantile times 0.
        first, second = (torch.where(is_counted, values, 0.5) for values in (first, second))
        distance = torch.special.ndtri(first) - torch.special.ndtri(second)
        hinge = (self.noise_sd / 2) * torch.where(is_counted, self.gamma - distance, 0.0).mean()
        terms = -(likely + _TINY).log().mean(), hinge
        loss = terms[0] + (self.regularization if lambda_ is None else lambda_) * terms[1]
        return loss, dict(zip(self.TERMS, terms))
