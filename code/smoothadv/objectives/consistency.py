"""Consistency regularization (Jeong and Shin, 2020): the predictions on noisy copies of an image
shall agree.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.attacks import GradientAttack
from smoothadv.attacks.estimators import noisy_logits
from smoothadv.base.settings import non_negative_float, positive_int, setting
from smoothadv.objectives import OBJECTIVES, Batch, BatchLoss, mean_cross_entropy
from smoothadv.objectives.bases import AttackedObjective, weight


@OBJECTIVES.register("consistency")
@dataclass(frozen=True)
class Consistency(AttackedObjective):
    """mean_i CE(f_i, y) + lambda mean_i KL(p || p_i) + eta H(p), with p_i = softmax f_i and p their
    mean over i.

    f_i [B, K] are the logits of m >= 2 noisy copies, H is the entropy; the formula is that of the
    released code. With an attack, the copies are those of attacked images. With weighted shares of
    the classes in place of y, all three terms of an image have its weight, the sum of its shares.
    With ``route_consistency``, of a router, the latter two are also multiplied by the radius of the
    image at one of the stages to which its noisy copies are sent: that with the most noise
    ("strong") or with the least ("weak"; dual randomized smoothing). The cost is m forward and
    backward passes.
    """

    TAKES_SHARES = True
    TERMS = ("cross_entropy", "divergence", "entropy")
    BY_NOISE = {"regularization": {0.25: 20.0, 0.5: 10.0, 1.0: 10.0}}
    attack: GradientAttack | None = setting(None, kw_only=True)
    num_noise_vec: int = setting(2, parse=positive_int, help="m, the noise draws per image")
    regularization: float = weight()
    eta: float = setting(
        0.5,
        parse=non_negative_float,
        help="weight of the entropy of the mean prediction",
    )
    route_consistency: str | None = setting(
        None,
        choices=("strong", "weak"),
        help="of a router: multiply divergence and entropy of an image by its radius at the stage "
        "with the most (strong) or the least (weak) noise to which a noisy copy is sent",
    )

    def __post_init__(self) -> None:
        if self.attack is not None and self.regularization is None:
            raise ValueError(
                "with an attack, --lambda has no default: the authors took 1 and 2, far less than "
                "without"
            )
        super().__post_init__()
        if self.num_noise_vec < 2:
            raise ValueError(
                "consistency compares noisy copies: --num-noise-vec must be at least 2"
            )

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        if self.route_consistency is None:
            return super().loss(model, batch, attacked)
        logits = noisy_logits(model, attacked.images, attacked.noise)
        sent = logits.detach().argmax(-1)
        sigmas, radii = (each.gather(1, sent) for each in attacked.stages.unbind(-1))
        copy = sigmas.argmax(1) if self.route_consistency == "strong" else sigmas.argmin(1)
        factors = radii.gather(1, copy.unsqueeze(1)).squeeze(1)
        loss, terms = self.criterion(logits, attacked.targets, factors)
        return BatchLoss.of_logits(loss, terms, logits, attacked.labels)

    def criterion(
        self, logits: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor | float = 1.0
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_softmax = logits.log_softmax(-1)
        log_mean = log_softmax.logsumexp(1) - math.log(
            logits.shape[1]
        )  # finite, where a mean may underflow to 0
        mean = log_mean.exp()
        ones = logits.new_ones(len(logits))
        weights = factors * (labels.sum(1) if labels.is_floating_point() else ones)
        negative_entropy = weights * (mean * log_mean).sum(-1)
        overlap = weights.unsqueeze(1) * (mean.unsqueeze(1) * log_softmax).sum(-1)
        divergence = (negative_entropy.unsqueeze(1) - overlap).mean()
        terms = mean_cross_entropy(logits, labels), divergence, -negative_entropy.mean()
        loss = terms[0] + self.regularization * terms[1] + self.eta * terms[2]
        return loss, dict(zip(self.TERMS, terms))
