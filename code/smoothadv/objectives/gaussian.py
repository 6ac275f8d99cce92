"""Gaussian data augmentation (Cohen et al., 2019): the baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smoothadv.noise import training_noise
from smoothadv.objectives import OBJECTIVES, Outcome, noisy_cross_entropy
from smoothadv.settings import noise_level, setting


@OBJECTIVES.register("gaussian")
@dataclass(frozen=True)
class Gaussian:
    """Cross-entropy on one noisy copy of each image."""

    noise_sd: float = setting(
        flag="--noise",
        parse=noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1] (paper: 0.12, 0.25, 0.5, 1.0)",
    )

    def epsilon(self, epoch: int) -> float:
        return 0.0

    def __call__(
        self, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epoch: int, generator: torch.Generator
    ) -> Outcome:
        return noisy_cross_entropy(model, images, labels, training_noise(images, 1, self.noise_sd, generator))
