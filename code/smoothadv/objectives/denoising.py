"""Objectives of denoisers (Salman et al., 2020): what a denoised noisy image shall have in common
with the image.

The model is a denoiser D, and ``Batch.teacher`` the classifier F behind it, frozen, where there is
one. Accuracies are those of F(D(.)); without F they are nan.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.base.registry import Registry
from smoothadv.base.settings import positive_noise_level, setting
from smoothadv.objectives import Batch, BatchLoss, Objective, TeacherUse

DENOISING: Registry[type[Objective]] = Registry("objective of denoisers")


@dataclass(frozen=True)
class Denoising(Objective):
    """A loss of D(x + noise), of one noisy copy of each image."""

    DENOISES: ClassVar[bool] = True
    TEACHER: ClassVar[TeacherUse] = "accuracy"
    noise_sd: float = setting(
        flag="--noise",
        parse=positive_noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1]: the sigma of the "
        "smoothed classifier",
    )

    @abstractmethod
    def distance(
        self, denoised: torch.Tensor, logits: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """The loss, a mean over images, of denoised images [B, C, H, W], to which F gives
        ``logits`` [B, K].
        """

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        loss, hits = self._judged(model(batch.images + batch.noise[:, 0]), batch)
        return BatchLoss(loss, hits, len(batch.images))

    def test(
        self, model: nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        loss, hits = self._judged(model(batch.images + batch.noise[:, 0]), batch)
        return loss * len(batch.images), hits, self._judged(model(batch.images.clone()), batch)[1]

    def _judged(self, denoised: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and of how many images F finds the class."""
        logits, hits = None, torch.full((), math.nan, device=denoised.device)
        if batch.teacher is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.TEACHER == "logits"):
                logits = batch.teacher(denoised)
            hits = (logits.detach().argmax(1) == batch.labels).sum()
        return self.distance(denoised, logits, batch), hits


@DENOISING.register("mse")
@dataclass(frozen=True)
class MeanSquaredError(Denoising):
    """The mean over pixels of (D(x + noise) - x)^2 (Salman et al., 2020: the MSE objective)."""

    def distance(
        self, denoised: torch.Tensor, logits: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        return F.mse_loss(denoised.float(), batch.images)


@DENOISING.register("stability")
@dataclass(frozen=True)
class DenoisedStability(Denoising):
    """CE(F(D(x + noise)), F's class for x), with F frozen (Salman et al., 2020: the Stab
    objective).

    Gradients pass through F to D. Each update has a pass of F on the images and one forth and back
    behind D.
    """

    TEACHER = "logits"

    def distance(
        self, denoised: torch.Tensor, logits: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        if batch.teacher is None or logits is None:
            raise ValueError("stability needs a classifier: Batch.teacher")
        with torch.no_grad():
            classes = batch.teacher(batch.images).argmax(1)
        return F.cross_entropy(logits.float(), classes)
