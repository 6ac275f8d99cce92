"""SmoothAdv: adversarial training of the smoothed classifier (Salman et al., 2019, Pseudocode 1)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from smoothadv.attacks import Attack
from smoothadv.noise import training_noise
from smoothadv.objectives import OBJECTIVES, Outcome, noisy_cross_entropy
from smoothadv.settings import noise_level, non_negative_int, positive_int, setting


@OBJECTIVES.register("smoothadv")
@dataclass(frozen=True)
class SmoothAdv:
    """Attack the smoothed classifier on m noise draws, then train on the same m copies of the adversarial image.

    The draws are fixed through all attack steps and the update; the model is attacked in eval mode and
    updated in train mode. ``attack`` carries the full epsilon; the first epoch has none and it then
    grows linearly to its full value over ``warmup`` epochs (0: full from the start).
    """

    attack: Attack
    noise_sd: float = setting(
        flag="--noise",
        parse=noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1] (paper: 0.12, 0.25, 0.5, 1.0)",
    )
    num_noise_vec: int = setting(
        1, parse=positive_int, help="m, the noise draws per image in attack and update (paper: 1 to 8)"
    )
    warmup: int = setting(10, parse=non_negative_int, help="epochs over which epsilon grows from 0 to its full value")

    def epsilon(self, epoch: int) -> float:
        """epsilon * min(1, epoch / warmup), epochs counted from 0 (SmoothAdv, appendix A)."""
        return self.attack.epsilon * (min(1.0, epoch / self.warmup) if self.warmup else 1.0)

    def __call__(
        self, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epoch: int, generator: torch.Generator
    ) -> Outcome:
        noise = training_noise(images, self.num_noise_vec, self.noise_sd, generator)
        attack = dataclasses.replace(self.attack, epsilon=self.epsilon(epoch))
        adversarial = attack(model, images, labels, noise, generator)
        return noisy_cross_entropy(model, adversarial, labels, noise)
