"""Training objectives: a batch becomes a loss, one objective per file.

An objective is a frozen dataclass, derived from ``Objective`` and registered in ``OBJECTIVES``. Its
fields made by ``settings.setting`` become options of the training commands. A field of the type
``GradientAttack`` receives the attack that the command line describes.

``Objective`` itself is Gaussian augmentation: one noisy copy of each image. A subclass replaces any
of its seven methods ``policy``, ``epsilon``, ``draw``, ``attacked``, ``loss``, ``criterion`` and
``test``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.attacks import GradientAttack
from smoothadv.attacks.estimators import noisy_logits
from smoothadv.base.registry import Registry, discover
from smoothadv.base.settings import Checked
from smoothadv.noise import training_noise
from smoothadv.objectives.policy import DataPolicy as DataPolicy

_NOTHING = torch.empty(0)
Some = TypeVar("Some", bound="Batch")
TeacherUse = Literal["", "logits", "votes", "drops", "accuracy"]


@dataclass(frozen=True)
class Batch:
    """What a loss may use: ``images`` [B, C, H, W] in [0, 1], labels int64 [B] and ``noise`` [B, m,
    C, H, W].

    ``epsilon`` is the size of the attack (0: none), ``epoch`` counts from 0: numbers, or tensors []
    on the device that the host must not read. ``uniforms`` [B, n] are drawn from [0, 1) where an
    objective has UNIFORMS. ``earlier`` [B, C, H, W] is an earlier point of an attack that needs
    one. ``targets`` [B, K] are a teacher's shares of votes, or shares of the classes with which a
    router learns in place of its labels, multiplied by the image's weight. ``stages`` [B, K, 2]
    are sigma and radius of each stage of a router. ``teacher`` maps images to its logits. A missing
    tensor has no entries.
    """

    images: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor
    epsilon: float | torch.Tensor = 0.0
    epoch: float | torch.Tensor = 0.0
    uniforms: torch.Tensor = field(default=_NOTHING, kw_only=True)
    earlier: torch.Tensor = field(default=_NOTHING, kw_only=True)
    targets: torch.Tensor = field(default=_NOTHING, kw_only=True)
    stages: torch.Tensor = field(default=_NOTHING, kw_only=True)
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
class BatchLoss:
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

    @classmethod
    def of_logits(
        cls,
        loss: torch.Tensor,
        terms: Mapping[str, torch.Tensor],
        logits: torch.Tensor,
        labels: torch.Tensor,
    ) -> BatchLoss:
        """The outcome with this loss, for logits [B, m, K] of noisy copies with labels int64 [B].

        ``terms`` may have graphs, which the outcome drops.
        """
        hits = logits.detach().argmax(-1) == labels.unsqueeze(1)
        terms = {name: term.detach() for name, term in terms.items()}
        return cls(loss, hits.sum(), hits.numel(), terms=terms)

    def before_attack(self, first: Sequence[torch.Tensor], labels: torch.Tensor) -> BatchLoss:
        """With the counts of the ``first_logits``, if any, of copies of images with labels int64
        [B].
        """
        if not first:
            return self
        targets = labels.repeat_interleave(len(first[0]) // len(labels))
        hits = (first[0].argmax(1) == targets).sum()
        return replace(self, unattacked_correct=hits, unattacked_examples=len(targets))


class Objective(Checked, ABC):
    """What training needs of an objective; ``noise_sd`` is the standard deviation of its noise."""

    EXAMPLE = "an object like smoothadv.objectives.gaussian.Gaussian(noise_sd=0.25)"
    TERMS: ClassVar[tuple[str, ...]] = ()
    """The parts of the loss that ``criterion`` returns, for the log."""
    UNIFORMS: ClassVar[str] = ""
    """The loss needs a uniform random number for each "image", for each "copy" of it, or none."""
    TEACHER: ClassVar[TeacherUse] = ""
    """What a frozen teacher is for. "": there is none. It must be there for its "logits", or for
    its "votes" on the training images. It may be there to say by its votes which training images
    are left out ("drops"), or for the "accuracy" in the log.
    """
    DENOISES: ClassVar[bool] = False
    """Whether the model is a denoiser, and the teacher the classifier behind it."""
    TAKES_SHARES: ClassVar[bool] = False
    """Whether ``criterion`` takes weighted shares of the classes, float [B, K], too, in place of
    labels."""
    MOVES_RESIDUE: ClassVar[bool] = False
    """Whether the noise of a batch is what a denoiser D before the model leaves of it, D(x + noise)
    - x, and the model that is trained and attacked is the one behind D."""
    BY_NOISE: ClassVar[Mapping[str, Mapping[float, Any]]] = {}
    """Settings with the paper's values by noise level: the nearest one takes the place of None."""
    noise_sd: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in self.BY_NOISE.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, nearest(values, self.noise_sd))

    @property
    def policy(self) -> DataPolicy | None:
        """How the objective chooses the training images unless asked otherwise; None: each once in
        an epoch.
        """
        return None

    def epsilon(self, epoch: float) -> float:
        """The attack's l2 norm in that epoch, counted from 0; its full value for infinity, 0
        without an attack.
        """
        return 0.0

    def draw(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The noise [B, m, C, H, W] for images [B, C, H, W]."""
        return training_noise(images, self.copies, self.noise_sd, generator)

    def attacked(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Batch:
        """The batch to train on: other images, at most ``batch.epsilon`` (l2) away, or other noise.

        An epsilon that is a tensor [] is above 0, and on a device: a CUDA graph cannot let the host
        read it.
        """
        return batch

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        """The ``criterion`` of the logits of attacked images + noise.

        Pseudocode 1 of SmoothAdv: the m copies of an image form one batch of B * m, each with the
        image's label, or its ``targets`` where the objective TAKES_SHARES.
        """
        logits = noisy_logits(model, attacked.images, attacked.noise)
        takes_shares = self.TAKES_SHARES and len(attacked.targets)
        learned = attacked.targets if takes_shares else attacked.labels
        loss, terms = self.criterion(logits, learned)
        return BatchLoss.of_logits(loss, terms, logits, attacked.labels)

    def criterion(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, a mean over images, and its TERMS, for the logits [B, m, K] of noisy copies;
        the cross-entropy.
        """
        return mean_cross_entropy(logits, labels), {}

    def test(
        self, model: nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of test images, with one copy of noise each: the sum of the loss, and how many are
        classified correctly with that noise and without (nan: unknown)."""
        noisy, clean = model(batch.images + batch.noise[:, 0]).float(), model(batch.images.clone())
        hits = [(logits.argmax(1) == batch.labels).sum() for logits in (noisy, clean)]
        return F.cross_entropy(noisy, batch.labels, reduction="sum"), hits[0], hits[1]

    # Subclasses leave alone what follows.

    @property
    def gradient_attack(self) -> GradientAttack | None:
        """The attack in the field of the type ``GradientAttack``; None without one."""
        one = attack_field(type(self))
        return None if one is None else getattr(self, one.name)

    @property
    def copies(self) -> int:
        """m, the noise draws per image: the field ``num_noise_vec``, 1 without it."""
        return getattr(self, "num_noise_vec", 1)

    def batch(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        epoch: int,
        generator: torch.Generator,
        whole: int | None = None,
        part: slice = slice(None),
        **further: Any,
    ) -> Batch:
        """A batch in that epoch, with fresh noise and ``further`` fields.

        The images are ``part`` of ``whole`` ones. Random numbers are drawn for all of these, so
        that they do not depend on how many processes share them.
        """
        whole = len(images) if whole is None else whole
        if "noise" not in further:
            everything = images[:1].expand(whole, *images.shape[1:])
            further["noise"] = self.draw(everything, generator)[part]
        if self.UNIFORMS:
            each = self.copies if self.UNIFORMS == "copy" else 1
            drawn = torch.rand(whole, each, generator=generator, device=generator.device)
            further["uniforms"] = drawn[part]
        return Batch(images, labels, epsilon=self.epsilon(epoch), epoch=float(epoch), **further)

    def __call__(
        self,
        model: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        epoch: int,
        generator: torch.Generator,
        **further: Any,
    ) -> BatchLoss:
        """The loss in that epoch, with fresh noise, after the attack; ``further`` are fields of the
        Batch like ``teacher`` or ``noise``.

        All randomness comes from ``generator``, on the images' device.
        """
        batch = self.batch(images, labels, epoch, generator, **further)
        with first_logits(model) as first:
            attacked = self.attacked(model, batch, generator)
        return self.loss(model, batch, attacked).before_attack(first, labels)


@contextmanager
def first_logits(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """A context with a list of the first logits that a model returns within it, once there are
    some: of unattacked copies, where an attack starts with them.
    """
    found: list[torch.Tensor] = []

    def keep(model: nn.Module, inputs: object, logits: torch.Tensor) -> None:
        if not found:
            found.append(logits.detach())

    hook = model.register_forward_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


def nearest(values: Mapping[float, Any], noise_sd: float) -> Any:
    """The value for the noise level that is nearest to ``noise_sd``."""
    return values[min(values, key=lambda level: abs(level - noise_sd))]


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over images and copies of -log softmax(logits)[label], for logits [B, m, K] and
    labels int64 [B]; with shares of the classes, float [B, K], in place of labels, of the sum of
    these with the shares.
    """
    return F.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(logits.shape[1], 0))


def attack_field(objective: type[Objective]) -> dataclasses.Field[Any] | None:
    """The field of an objective whose type is ``GradientAttack``, or that or None; None without
    one.
    """
    types = get_type_hints(objective)
    for one in dataclasses.fields(objective):  # type: ignore[arg-type]  # they are dataclasses
        kinds = (types[one.name], *get_args(types[one.name]))
        if any(isinstance(kind, type) and issubclass(kind, GradientAttack) for kind in kinds):
            return one
    return None


OBJECTIVES: Registry[type[Objective]] = Registry("objective")

discover(__name__, __path__)
