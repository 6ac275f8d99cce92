"""Training objectives: a batch becomes a loss, one objective per file.

An objective is a frozen dataclass, derived from ``Objective`` and registered in ``OBJECTIVES``. Its fields made by
``settings.setting`` become options of the training commands; a field called ``attack`` receives the attack that
the command line describes, if it has no default or one is described. The methods of ``Objective`` itself are Gaussian
augmentation: one noisy copy of each image. ``draw``, ``adversarial`` and ``criterion`` can be replaced independently.
"""

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.noise import training_noise
from smoothadv.registry import Registry, discover


@dataclass(frozen=True)
class Outcome:
    """``loss`` (a scalar with its graph), and how many of ``examples`` noisy copies were classified correctly.

    ``unattacked_correct`` of ``unattacked_examples`` copies were classified correctly before the attack's first step,
    in eval mode; 0 and 0 without an attack. ``terms`` are parts of the loss, each a scalar without a graph.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    examples: int
    unattacked_correct: torch.Tensor | int = 0
    unattacked_examples: int = 0
    terms: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Objective(ABC):
    """What ``training`` needs of an objective; ``noise_sd`` is the standard deviation of its noise.

    TERMS names the parts of the loss that ``criterion`` returns, for the log.
    """

    TERMS: ClassVar[tuple[str, ...]] = ()
    NOISY: ClassVar[slice] = slice(None)
    """The copies that have noise: what is correct is counted among them."""
    noise_sd: float

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a training log for TERMS."""
        return tuple(f"train_{name}" for name in self.TERMS)

    @property
    def copies(self) -> int:
        """m, the noise draws per image."""
        return 1

    def epsilon(self, epoch: int) -> float:
        """The attack's l2 norm in that epoch, counted from 0; 0 without an attack."""
        return 0.0

    @property
    def full_epsilon(self) -> float:
        """The attack's l2 norm once it has grown to its full value."""
        return 0.0

    def draw(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The noise [B, m, C, H, W] for images [B, C, H, W]."""
        return training_noise(images, self.copies, self.noise_sd, generator)

    def adversarial(
        self,
        model: Callable[[torch.Tensor], torch.Tensor],
        images: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor,
        epsilon: float | torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """The images [B, C, H, W] to train on, at most ``epsilon`` (l2) from ``images``; these without an attack.

        A tensor [] is above 0, and on a device: a CUDA graph cannot let the host read it.
        """
        return images

    def loss(self, model: nn.Module, adversarial: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor) -> Outcome:
        """The ``criterion`` of the logits of images + noise, for the images that the method ``adversarial`` returned.

        Pseudocode 1 of SmoothAdv: the m copies of an image form one batch of B * m, each with the image's label.
        """
        logits = self.logits(model, adversarial, noise)
        loss, terms = self.criterion(logits, labels)
        hits = logits.detach()[:, self.NOISY].argmax(-1) == labels.unsqueeze(1)
        return Outcome(loss, hits.sum(), hits.numel(), terms=terms)

    def logits(self, model: nn.Module, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The logits [B, m, K] of all noisy copies of images [B, C, H, W], in one pass."""
        return model((images.unsqueeze(1) + noise).flatten(0, 1)).unflatten(0, noise.shape[:2])

    def criterion(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, a mean over images, and its TERMS, for the logits [B, m, K] of noisy copies; the cross-entropy."""
        return mean_cross_entropy(logits, labels), {}

    def on_noise(
        self,
        model: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor,
        epoch: int,
        generator: torch.Generator | None = None,
        attacked: nn.Module | None = None,
        epsilon: torch.Tensor | None = None,
    ) -> Outcome:
        """Attack images [B, C, H, W] in [0, 1] with labels int64 [B] as in that epoch; returns the loss on the result.

        ``attacked`` is the same classifier in a form that is faster to attack; None attacks ``model``. A tensor
        ``epsilon`` [] replaces that of the epoch.
        """
        watched = FirstLogits(model if attacked is None else attacked)
        size = self.epsilon(epoch) if epsilon is None else epsilon
        adversarial = self.adversarial(watched, images, labels, noise, size, generator)
        outcome = self.loss(model, adversarial, labels, noise)
        if watched.logits is None:
            return outcome
        targets = labels.repeat_interleave(len(watched.logits) // len(labels))
        hits = (watched.logits.argmax(1) == targets).sum()
        return replace(outcome, unattacked_correct=hits, unattacked_examples=len(targets))

    def __call__(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epoch: int, generator: torch.Generator
    ) -> Outcome:
        """As ``on_noise``, with fresh noise. All randomness comes from ``generator``, on the images' device."""
        return self.on_noise(model, images, labels, self.draw(images, generator), epoch, generator)


class FirstLogits(nn.Module):
    """A classifier that keeps the first logits it returns: of unattacked copies, where an attack starts with them."""

    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.logits: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.model(images)
        if self.logits is None:
            self.logits = logits.detach()
        return logits


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images and copies of -log softmax(logits)[label], for logits [B, m, K] and labels int64 [B]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(logits.shape[1]))


OBJECTIVES: Registry[type[Objective]] = Registry("objective")

discover(__name__, __path__)
