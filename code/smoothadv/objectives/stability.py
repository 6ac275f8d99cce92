"""Stability training (Li et al., 2019): the prediction on a noisy copy shall be that on the
image.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.base.settings import noise_level, setting
from smoothadv.objectives import OBJECTIVES, Batch, BatchLoss, Objective, mean_cross_entropy
from smoothadv.objectives.bases import weight


@OBJECTIVES.register("stability")
@dataclass(frozen=True)
class Stability(Objective):
    """CE(f(x), y) + lambda CE(softmax f(x), f(x + noise)): the cross-entropy of the second
    prediction under the first.

    The weights are those of Jeong and Shin (2020); as in their code, batch normalization sees the
    images, and then the noisy copies, as a batch of their own. The cost is two forward and backward
    passes.
    """

    TERMS = ("cross_entropy", "stability")
    BY_NOISE = {"regularization": {0.25: 2.0, 0.5: 2.0, 1.0: 1.0}}
    noise_sd: float = setting(
        flag="--noise",
        parse=noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1]",
    )
    regularization: float = weight()

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        clean = model(batch.images.clone())
        noisy = model(batch.images + batch.noise[:, 0])
        logits = torch.stack([noisy, clean], dim=1)
        loss, terms = self.criterion(logits, batch.labels)
        return BatchLoss.of_logits(loss, terms, logits[:, :1], batch.labels)

    def criterion(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its terms, for the logits [B, 2, K] of a noisy copy and of the image."""
        noisy, clean = logits.unbind(1)
        terms = mean_cross_entropy(logits[:, 1:], labels), F.cross_entropy(noisy, clean.softmax(-1))
        loss = terms[0] + self.regularization * terms[1]
        return loss, dict(zip(self.TERMS, terms))
