"""Training objectives: a batch becomes a loss, one objective per file.

An objective is a frozen dataclass registered in ``OBJECTIVES``. Its fields made by ``settings.setting``
become options of the training commands; a field called ``attack`` receives the attack that the
command line describes. ``training`` relies on

    noise_sd                      the standard deviation that the classifier is trained for
    epsilon(epoch) -> float       the attack's l2 norm in that epoch (0-based), 0 without an attack
    __call__(model, images, labels, epoch, generator) -> Outcome
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from smoothadv.registry import Registry, discover


@dataclass(frozen=True)
class Outcome:
    """``loss`` (a scalar with its graph), and how many of ``examples`` noisy copies were classified correctly."""

    loss: torch.Tensor
    correct: torch.Tensor
    examples: int


class Objective(Protocol):
    """What ``training`` needs of an objective; see the package's docstring."""

    noise_sd: float

    def epsilon(self, epoch: int) -> float: ...

    def __call__(
        self, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epoch: int, generator: torch.Generator
    ) -> Outcome:
        """Images [B, C, H, W] in [0, 1] and labels int64 [B]; all randomness comes from ``generator``."""


def noisy_cross_entropy(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
) -> Outcome:
    """The mean cross-entropy over all copies images[b] + noise[b, i]: noise is [B, m, C, H, W].

    Pseudocode 1 of SmoothAdv: the m copies of an image form one batch of B * m, each with the image's label.
    """
    copies = noise.shape[1]
    logits = model((images.unsqueeze(1) + noise).flatten(0, 1))
    targets = labels.repeat_interleave(copies)
    return Outcome(F.cross_entropy(logits, targets), (logits.detach().argmax(1) == targets).sum(), len(targets))


OBJECTIVES: Registry[type] = Registry("objective")

discover(__name__, __path__)
