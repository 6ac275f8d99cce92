"""CAT-RS (Jeong et al., 2023): which of an image's noisy copies count depends on the confidence in
the image.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.attacks.estimators import noisy_logits
from smoothadv.attacks.noise_attacks import from_targets
from smoothadv.base.settings import (
    non_negative_int,
    perturbation_size,
    positive_int,
    setting,
)
from smoothadv.objectives import OBJECTIVES, Batch, BatchLoss
from smoothadv.objectives.bases import CopiesObjective, weight


@dataclass(frozen=True)
class MovedNoise(CopiesObjective):
    """What CAT-RS and FT-CADIS have: copies, and an attack that moves the noise of each."""

    num_noise_vec: int = setting(4, parse=positive_int, help="m, the noise draws per image")
    regularization: float = weight()
    noise_steps: int = setting(4, parse=positive_int, help="T, the steps of an attack of noise")
    noise_epsilon: float = setting(
        1.0, parse=perturbation_size, help="l2 distance that the attack moves noise"
    )
    double_from_epoch: int | None = setting(
        None,
        parse=non_negative_int,
        metavar="E",
        help="double --noise-epsilon from this epoch on, counted from 0 (default: never)",
    )

    def epsilon(self, epoch: float) -> float:
        """``noise_epsilon``, and twice that from ``double_from_epoch`` on."""
        is_doubled = self.double_from_epoch is not None and epoch >= self.double_from_epoch
        return self.noise_epsilon * (1 + is_doubled)

    def moved(self, model: nn.Module, batch: Batch, targets: torch.Tensor) -> Batch:
        """The batch with noise that increases the divergence from ``targets`` [B, K]."""
        noise = from_targets(
            model, batch.images, targets, batch.noise, self.noise_steps, batch.epsilon
        )
        return replace(batch, noise=noise)


def worst_divergence(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The largest KL(targets || softmax) [B] of the copies with logits [B, m, K], for targets [B,
    K].
    """
    others = targets.unsqueeze(1).expand_as(logits)
    return F.kl_div(logits.log_softmax(-1), others, reduction="none").sum(-1).amax(1)


def each_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[label] [B, m] of copies with logits [B, m, K]."""
    each = labels.unsqueeze(1).expand(logits.shape[:2])
    return F.cross_entropy(logits.movedim(-1, 1), each, reduction="none")


@OBJECTIVES.register("cat-rs")
@dataclass(frozen=True)
class CatRS(MovedNoise):
    """1/m times the sum of the K smallest CE(f_i, y) + lambda [K = m] max_i KL(q || softmax f(x +
    noise*_i)).

    q are a Gaussian-trained teacher's shares of the votes on noisy copies of x. K is binomial of m
    trials, but at least 1; its probability is the share of the m copies that the model classifies
    correctly or, with the ``confidence`` "teacher", q_y (--confidence_mask of the released code).
    noise* is the noise after T steps that increase the divergence from q
    (``attacks.noise_attacks.from_targets``). The formula is that of the released code, which moves
    the statistics of batch normalization by the unattacked copies before it attacks; here the
    attack comes first. The cost is 2 m forward and backward passes, m T gradients, and the
    teacher's votes once.
    """

    TERMS = ("cross_entropy", "divergence")
    UNIFORMS = "copy"
    TEACHER = "votes"
    BY_NOISE = {"regularization": {0.25: 0.5, 0.5: 1.0, 1.0: 2.0}}
    confidence: str = setting(
        "model",
        choices=("model", "teacher"),
        help="whose votes for the label are the confidence in an image: the model's on the m "
        "copies, or the teacher's",
    )

    def attacked(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Batch:
        """The batch with attacked noise."""
        targets = batch.targets
        if not len(targets):  # of test images, for which no teacher voted
            classes = model(batch.images[:1].clone()).shape[1]
            targets = F.one_hot(batch.labels, classes).to(batch.images.dtype)
        return self.moved(model, batch, targets)

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        """The loss of the noisy copies, and of those with attacked noise."""
        if not len(batch.targets):
            raise ValueError("CAT-RS needs a teacher's shares of votes: Batch.targets")
        logits = noisy_logits(model, batch.images, batch.noise)
        labels = batch.labels.unsqueeze(1)
        confidence = batch.targets.gather(1, labels)
        if self.confidence == "model":
            confidence = (logits.argmax(-1) == labels).to(confidence).mean(1, keepdim=True)
        counted = (batch.uniforms < confidence).sum(1).clamp(min=1)
        others = noisy_logits(model, batch.images, attacked.noise)
        loss, terms = self.combined(logits, others, batch.labels, batch.targets, counted)
        return BatchLoss.of_logits(loss, terms, logits, batch.labels)

    def combined(
        self,
        logits: torch.Tensor,
        others: torch.Tensor,
        labels: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and terms, for logits [B, m, K] of copies and of attacked ones, q [B, K] and K int64
        [B].
        """
        copies = logits.shape[1]
        smallest = each_cross_entropy(logits, labels).sort(1).values
        is_counted = torch.arange(copies, device=counted.device) < counted.unsqueeze(1)
        worst = worst_divergence(others, targets)
        terms = (smallest * is_counted).sum(1).mean() / copies, (worst * (counted == copies)).mean()
        loss = terms[0] + self.regularization * terms[1]
        return loss, dict(zip(self.TERMS, terms))
