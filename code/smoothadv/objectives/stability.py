"""Stability training (Li et al., 2019): the prediction on a noisy copy shall be that on the
image.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from smoothadv.base.settings import noise_level, setting
from smoothadv.noise import training_noise
from smoothadv.objectives import OBJECTIVES, Objective, mean_cross_entropy
from smoothadv.objectives.shared.weights import resolve, weight

_PAPER = {0.25: 2.0, 0.5: 2.0, 1.0: 1.0}


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
    NOISY = slice(1)
    noise_sd: float = setting(
        flag="--noise",
        parse=noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1]",
    )
    regularization: float = weight()

    def __post_init__(self) -> None:
        resolve(self, regularization=_PAPER)

    @property
    def copies(self) -> int:
        return 2

    def draw(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = training_noise(images, 1, self.noise_sd, generator)
        return torch.cat([noise, torch.zeros_like(noise)], dim=1)

    def logits(
        self,
        model: Callable[[torch.Tensor], torch.Tensor],
        images: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        clean = model(images + noise[:, 1])
        return torch.stack([model(images + noise[:, 0]), clean], dim=1)

    def criterion(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        noisy, clean = logits.unbind(1)
        terms = mean_cross_entropy(logits[:, 1:], labels), F.cross_entropy(noisy, clean.softmax(-1))
        return terms[0] + self.regularization * terms[1], {
            name: term.detach() for name, term in zip(self.TERMS, terms)
        }
