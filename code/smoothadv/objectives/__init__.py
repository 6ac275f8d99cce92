"""Training objectives: a batch becomes a loss, one objective per file.

An objective is a frozen dataclass, derived from ``Objective`` and registered in ``OBJECTIVES``. Its
fields made by ``settings.setting`` become options of the training commands; a field called
``attack`` receives the attack that the command line describes, if it has no default or one is
described. The methods of ``Objective`` itself are Gaussian augmentation: one noisy copy of each
image. ``draw``, ``adversarial`` and ``criterion`` can be replaced independently; ``attacked`` and
``outcome`` are for attacks of noise and for losses that need more of a batch.
"""

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.base.registry import Registry, discover
from smoothadv.base.settings import Checked
from smoothadv.noise import training_noise
from smoothadv.objectives.shared.policy import DataPolicy as DataPolicy

_NOTHING = torch.empty(0)
Some = TypeVar("Some", bound="Batch")


@dataclass(frozen=True)
class Batch:
    """What a loss may use: ``images`` [B, C, H, W] in [0, 1], labels int64 [B] and ``noise`` [B, m,
    C, H, W].

    ``epsilon`` is the size of the attack (0: none) and ``ramp`` a factor of the epoch: numbers, or
    tensors [] on the device that the host must not read. ``uniforms`` [B, n] are drawn from [0, 1)
    where an objective asks for n of them. ``earlier`` [B, C, H, W] is an earlier point of an attack
    that needs one. ``targets`` [B, K] are a teacher's shares of votes, and ``teacher`` maps images
    to its logits. What there is not has no entries.
    """

    images: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor
    epsilon: float | torch.Tensor = 0.0
    ramp: float | torch.Tensor = 1.0
    uniforms: torch.Tensor = field(default=_NOTHING, kw_only=True)
    earlier: torch.Tensor = field(default=_NOTHING, kw_only=True)
    targets: torch.Tensor = field(default=_NOTHING, kw_only=True)
    teacher: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, kw_only=True)

    def part(self: Some, chosen: slice) -> Some:
        """The same of some of the images."""
        parts: dict[str, Any] = {
            name: value[chosen]
            for name, value in vars(self).items()
            if torch.is_tensor(value) and value.dim()
        }
        return replace(self, **parts)


@dataclass(frozen=True)
class Outcome:
    """``loss`` (a scalar with its graph), and how many of ``examples`` noisy copies were classified
    correctly.

    ``unattacked_correct`` of ``unattacked_examples`` copies were classified correctly before the
    attack's first step, in eval mode; 0 and 0 without an attack. ``terms`` are parts of the loss,
    each a scalar without a graph.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    examples: int
    unattacked_correct: torch.Tensor | int = 0
    unattacked_examples: int = 0
    terms: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Objective(Checked, ABC):
    """What ``training`` needs of an objective; ``noise_sd`` is the standard deviation of its noise.

    TERMS names the parts of the loss that ``criterion`` returns, for the log.
    """

    TERMS: ClassVar[tuple[str, ...]] = ()
    NOISY: ClassVar[slice] = slice(None)
    """The copies that have noise: what is correct is counted among them."""
    TEACHER: ClassVar[str] = ""
    """What a frozen teacher supplies: "logits", "votes" on the training images, or nothing;
    "accuracy" if it may be missing and is for the log only."""
    DENOISES: ClassVar[bool] = False
    """Whether the model is a denoiser, and the teacher the classifier behind it."""
    noise_sd: float

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a training log for TERMS."""
        return tuple(f"train_{name}" for name in self.TERMS)

    @property
    def copies(self) -> int:
        """m, the noise draws per image."""
        return 1

    @property
    def uniforms(self) -> int:
        """How many uniform random numbers the loss needs for each image."""
        return 0

    @property
    def policy(self) -> DataPolicy | None:
        """How the objective chooses the training images unless asked otherwise; None: each once in
        an epoch.
        """
        return None

    def ramp(self, epoch: int) -> float:
        """A factor of that epoch, counted from 0, for the loss: ``Batch.ramp``."""
        return 1.0

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
        """The images [B, C, H, W] to train on, at most ``epsilon`` (l2) from ``images``; these
        without an attack.

        A tensor [] is above 0, and on a device: a CUDA graph cannot let the host read it.
        """
        return images

    def loss(
        self, model: nn.Module, adversarial: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> Outcome:
        """The ``criterion`` of the logits of images + noise, for the images that the method
        ``adversarial`` returned.

        Pseudocode 1 of SmoothAdv: the m copies of an image form one batch of B * m, each with the
        image's label.
        """
        logits = self.logits(model, adversarial, noise)
        loss, terms = self.criterion(logits, labels)
        return self.counted(loss, terms, logits, labels)

    def counted(
        self,
        loss: torch.Tensor,
        terms: Mapping[str, torch.Tensor],
        logits: torch.Tensor,
        labels: torch.Tensor,
    ) -> Outcome:
        """The outcome with this loss and these terms, of the logits [B, m, K] of copies with labels
        int64 [B].
        """
        hits = logits.detach()[:, self.NOISY].argmax(-1) == labels.unsqueeze(1)
        return Outcome(loss, hits.sum(), hits.numel(), terms=terms)

    def logits(
        self,
        model: Callable[[torch.Tensor], torch.Tensor],
        images: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        """The logits [B, m, K] of all noisy copies of images [B, C, H, W], in one pass."""
        return model((images.unsqueeze(1) + noise).flatten(0, 1)).unflatten(0, noise.shape[:2])

    def criterion(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, a mean over images, and its TERMS, for the logits [B, m, K] of noisy copies;
        the cross-entropy.
        """
        return mean_cross_entropy(logits, labels), {}

    def attacked(
        self,
        model: Callable[[torch.Tensor], torch.Tensor],
        batch: Batch,
        generator: torch.Generator | None = None,
    ) -> Batch:
        """The batch with other images, or other noise, to train on: here with those of
        ``adversarial``.
        """
        images = self.adversarial(
            model, batch.images, batch.labels, batch.noise, batch.epsilon, generator
        )
        return replace(batch, images=images)

    def outcome(self, model: nn.Module, batch: Batch, attacked: Batch) -> Outcome:
        """The loss, for a batch and what ``attacked`` made of it: here that of the method
        ``loss``.
        """
        return self.loss(model, attacked.images, attacked.labels, attacked.noise)

    def tested(
        self, model: nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of test images, with one copy of noise each: the sum of the loss, and how many are
        classified correctly with that noise and without (nan: unknown)."""
        noisy, clean = model(batch.images + batch.noise[:, 0]).float(), model(batch.images)
        hits = [(logits.argmax(1) == batch.labels).sum() for logits in (noisy, clean)]
        return F.cross_entropy(noisy, batch.labels, reduction="sum"), hits[0], hits[1]

    def batch(
        self, images: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor, epoch: int
    ) -> Batch:
        """The batch of images [B, C, H, W] with labels int64 [B] and this noise in that epoch."""
        return Batch(images, labels, noise, self.epsilon(epoch), self.ramp(epoch))

    def on_batch(
        self,
        model: nn.Module,
        batch: Batch,
        generator: torch.Generator | None = None,
        attacked: nn.Module | None = None,
    ) -> Outcome:
        """Attack the batch; returns the loss on the result.

        ``attacked`` is the same classifier in a form that is faster to attack; None attacks
        ``model``.
        """
        watched = FirstLogits(model if attacked is None else attacked)
        outcome = self.outcome(model, batch, self.attacked(watched, batch, generator))
        if watched.logits is None:
            return outcome
        targets = batch.labels.repeat_interleave(len(watched.logits) // len(batch.labels))
        hits = (watched.logits.argmax(1) == targets).sum()
        return replace(outcome, unattacked_correct=hits, unattacked_examples=len(targets))

    def __call__(
        self,
        model: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        epoch: int,
        generator: torch.Generator,
        **further: Any,
    ) -> Outcome:
        """As ``on_batch`` in that epoch, with fresh noise, and with fields of the Batch like
        ``teacher``.

        All randomness comes from ``generator``, on the images' device.
        """
        batch = self.batch(images, labels, self.draw(images, generator), epoch)
        if self.uniforms:
            further["uniforms"] = draw_uniforms(len(images), self.uniforms, generator)
        return self.on_batch(model, replace(batch, **further), generator)


class FirstLogits(nn.Module):
    """A classifier that keeps the first logits it returns: of unattacked copies, where an attack
    starts with them.
    """

    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.logits: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.model(images)
        if self.logits is None:
            self.logits = logits.detach()
        return logits


def draw_uniforms(images: int, each: int, generator: torch.Generator) -> torch.Tensor:
    """Float32 [images, each] from [0, 1), on the device of the generator."""
    return torch.rand(images, each, generator=generator, device=generator.device)


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images and copies of -log softmax(logits)[label], for logits [B, m, K] and
    labels int64 [B].
    """
    return F.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(logits.shape[1]))


OBJECTIVES: Registry[type[Objective]] = Registry("objective")

discover(__name__, __path__)
