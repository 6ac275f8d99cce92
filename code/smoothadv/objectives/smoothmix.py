"""SmoothMix (Jeong et al., 2021): less confidence on the way from an image to an adversarial
one.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.attacks.estimators import noisy_logits
from smoothadv.attacks.geometry import per_example, project_ball
from smoothadv.attacks.pgd import PGD
from smoothadv.base.settings import non_negative_float, positive_float, positive_int, setting
from smoothadv.objectives import OBJECTIVES, Batch, BatchLoss, mean_cross_entropy
from smoothadv.objectives.bases import CopiesObjective


@OBJECTIVES.register("smoothmix")
@dataclass(frozen=True)
class SmoothMix(CopiesObjective):
    """mean_i CE(f_i(x), y) + eta r [p correct] mean_i KL((1 - t) p + t / K || softmax f_i((1 - t) x
    + t x')).

    p is the mean softmax of m noisy copies of x, and x' the end of T steps of length
    ``mix_step_size`` along the gradient of -log p_y, which stay in [0, 1] and in no ball. t is
    uniform in (0, 1/2], one for each image, and r = min(1, (epoch + 1) / warmup). With
    ``one_step_adversary`` the first step, of at most r times its length, takes the place of x. The
    formula is that of the released code, where the gradient also goes through the first p. The cost
    is 2 m forward and backward passes and m T gradients of images.
    """

    TERMS = ("cross_entropy", "mixup")
    UNIFORMS = "image"
    BY_NOISE = {"mix_step_size": {0.25: 0.5, 0.5: 1.0, 1.0: 2.0}}
    num_noise_vec: int = setting(2, parse=positive_int, help="m, the noise draws per image")
    mix_steps: int = setting(4, parse=positive_int, help="T, the steps of SmoothMix's attack")
    mix_step_size: float = setting(
        None,
        parse=positive_float,
        help="l2 length of a step of SmoothMix's attack (default: by --noise)",
    )
    eta: float = setting(5.0, parse=non_negative_float, help="weight of SmoothMix's mixed images")
    warmup: int = setting(
        10, parse=positive_int, help="epochs over which the loss on mixed images grows"
    )
    one_step_adversary: bool = setting(
        False, help="train SmoothMix on the first step of its attack, not on the image"
    )

    def epsilon(self, epoch: float) -> float:
        return self.mix_steps * self.mix_step_size

    def ramp(self, epoch: float | torch.Tensor) -> float | torch.Tensor:
        """r in that epoch, counted from 0, which may be a tensor [] on the device."""
        share = (epoch + 1) / self.warmup
        return share.clamp(max=1.0) if isinstance(share, torch.Tensor) else min(1.0, share)

    def attacked(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Batch:
        """The batch at the end of the attack, with its beginning as ``earlier``."""
        images, start = batch.images, None
        earlier = images
        steps = self.mix_steps
        if self.one_step_adversary:
            first = PGD(self.mix_step_size, 1, step_size=self.mix_step_size)(
                model, images, batch.labels, batch.noise
            )
            start, steps = first - images, steps - 1
            ramp = self.ramp(batch.epoch)
            earlier = (images + project_ball(start, ramp * self.mix_step_size)).clamp(0, 1)
        if steps:
            attack = PGD(self.mix_steps * self.mix_step_size, steps, step_size=self.mix_step_size)
            images = attack(model, images, batch.labels, batch.noise, start=start)
        else:
            images = first
        return replace(batch, images=images, earlier=earlier)

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        """The loss of the noisy copies of the image, and of those of the mixed one."""
        images, share = attacked.earlier, (1 - batch.uniforms[:, 0]) / 2
        logits = noisy_logits(model, images, batch.noise)
        mixed = images + per_example(share, images) * (attacked.images - images)
        others, ramp = noisy_logits(model, mixed, batch.noise), self.ramp(batch.epoch)
        loss, terms = self.combined(logits, others, batch.labels, share, ramp)
        return BatchLoss.of_logits(loss, terms, logits, batch.labels)

    def combined(
        self,
        logits: torch.Tensor,
        mixed: torch.Tensor,
        labels: torch.Tensor,
        share: torch.Tensor,
        ramp: float | torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and terms, for logits [B, m, K] of copies of images and of mixed ones with shares t
        [B].
        """
        mean = logits.softmax(-1).mean(1)
        correct = (mean.argmax(1) == labels).to(mean.dtype)
        targets = mean + share.unsqueeze(1) * (1 / mean.shape[1] - mean)
        divergences = F.kl_div(
            mixed.log_softmax(-1), targets.unsqueeze(1).expand_as(mixed), reduction="none"
        ).sum(-1)
        terms = mean_cross_entropy(logits, labels), (correct * divergences.mean(1)).mean()
        weight = self.eta * ramp
        if isinstance(weight, torch.Tensor):  # float64, which would make the loss so
            weight = weight.to(terms[1].dtype)
        loss = terms[0] + weight * terms[1]
        return loss, dict(zip(self.TERMS, terms))
