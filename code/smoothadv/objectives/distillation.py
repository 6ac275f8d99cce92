"""Certified robustness transfer (Vaishnavi et al., 2022): a robust teacher's logits, learned on
noisy images.
"""

from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.attacks.estimators import noisy_logits
from smoothadv.base.settings import number, setting
from smoothadv.objectives import OBJECTIVES, Batch, BatchLoss, mean_cross_entropy
from smoothadv.objectives.bases import CopiesObjective


@OBJECTIVES.register("distillation")
@dataclass(frozen=True)
class Distillation(CopiesObjective):
    """a mean_i || f(x + noise_i) - teacher(x + noise_i) ||_2 + (1 - a) mean_i CE(f(x + noise_i),
    y), with a = 1.

    The teacher is the base classifier of a smoothed one, in eval mode; the norm is that of the
    logits, as in the released code. The cost is m forward and backward passes and m forward passes
    of the teacher.
    """

    TERMS = ("distance", "cross_entropy")
    TEACHER = "logits"
    transfer: float = setting(
        1.0,
        parse=number(float, "a weight from 0 to 1", lambda value: 0 <= value <= 1),
        help="a, the weight of the distance from the teacher; that of the cross-entropy is 1 - a",
    )

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        """The loss of noisy copies, which the teacher sees, too."""
        if batch.teacher is None:
            raise ValueError("distillation needs a teacher: Batch.teacher")
        with torch.no_grad():
            taught = noisy_logits(batch.teacher, batch.images, batch.noise)
        logits = noisy_logits(model, batch.images, batch.noise)
        distance = (logits - taught).norm(dim=-1).mean()
        cross_entropy = mean_cross_entropy(logits, batch.labels)
        loss = self.transfer * distance + (1 - self.transfer) * cross_entropy
        return BatchLoss.of_logits(
            loss, {"distance": distance, "cross_entropy": cross_entropy}, logits, batch.labels
        )
