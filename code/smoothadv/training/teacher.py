"""A frozen teacher, whose logits, or whose votes on the training images, an objective uses; and how
a classifier votes on noisy copies of training images.
"""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from smoothadv.base.distributed import Processes
from smoothadv.base.errors import UserError
from smoothadv.base.files import cached, digest, keep
from smoothadv.base.progress import Progress
from smoothadv.datasets import DatasetDescription, ImageDataset
from smoothadv.models.checkpoint import digest_of
from smoothadv.models.load import BaseClassifier, load, load_checkpoint
from smoothadv.models.name import LIBRARY, members_of, parse_model
from smoothadv.models.spec import ModelSpec
from smoothadv.noise import GaussianNoise, Purpose
from smoothadv.statistics import Draws
from smoothadv.training.spec import TrainSpec
from smoothadv.voting.classifier import optimized_for_inference
from smoothadv.voting.counter import Poll, VoteCounter

_IMAGES_AT_A_TIME = 512


@dataclass(frozen=True)
class Teacher:
    """``network`` maps images [B, C, H, W] to logits [B, K]; ``shares`` float32 [N, K] are its
    shares of the votes on noisy copies of the N training images, if an objective asks for them
    (``TeacherVotes``). ``sha256`` is that of its checkpoint.
    """

    network: nn.Module
    shares: torch.Tensor | None = None
    sha256: str = ""

    def batch_fields(self, indices: torch.Tensor | None) -> dict[str, Any]:
        """The fields of a ``Batch`` of the training images ``indices`` int64 [B]."""
        fields: dict[str, Any] = {"teacher": self.network}
        if self.shares is not None and indices is not None:
            fields["targets"] = self.shares[indices]
        return fields


class TeacherVotes:
    """A teacher's votes on noisy copies of training images, counted when an image first comes.

    ``shares`` float32 [N, K] are those of the classes, 0 of images that had no vote yet. An image
    has as many votes as ``until_precise`` asks for. The cache of the user keeps them, for every
    training: they are a function of the checkpoint, the images, ``noise_sd`` and ``draws``, up to
    the rounding of passes of other sizes than ``batch`` copies.
    """

    def __init__(
        self,
        teacher: Teacher,
        images: ImageDataset,
        noise_sd: float,
        draws: int,
        device: torch.device,
        batch: int,
        processes: Processes,
    ) -> None:
        key = [teacher.sha256, images.fingerprint(), repr(float(noise_sd)), str(draws)]
        identity = digest(["\n".join([*key, "until precise"])])
        noise = GaussianNoise(noise_sd, int(identity[:16], 16))
        self._name, self._is_kept = f"teacher_votes/{identity}", True
        how: dict[str, Any] = {"draws": draws, "noise": noise, "device": device, "batch": batch}
        how |= {"processes": processes, "early": True}
        self._counted = partial(count_votes, teacher.network, images, **how)
        shape, content = (len(images), images.description.num_classes), b""
        if processes.is_first:
            content = cached(self._name, lambda: np.zeros(shape, "<u4").tobytes())
        self._votes = np.frombuffer(processes.received(content), "<u4").reshape(shape).copy()
        self.shares = _shares(self._votes).to(device)

    def count(self, indices: torch.Tensor) -> None:
        """Let the teacher vote on those of the training images ``indices`` int64 [B] on which it
        has not yet; all processes call this with the same.
        """
        asked = np.unique(indices.numpy())
        new = asked[self._votes[asked].sum(1) == 0]
        if len(new):
            self._votes[new] = self._counted(indices=new)
            self.shares[new] = _shares(self._votes[new]).to(self.shares.device)
            self._is_kept = False

    def keep(self) -> None:
        """Save what was counted in the cache."""
        if not self._is_kept:
            keep(self._name, self._votes.tobytes())
        self._is_kept = True


def _shares(votes: np.ndarray) -> torch.Tensor:
    """The shares float32 [n, K] of votes [n, K]; 0 where there are none."""
    return torch.from_numpy(votes / np.maximum(votes.sum(1, keepdims=True), 1)).float()


def load_teacher(spec: TrainSpec, training: ImageDataset, device: torch.device) -> Teacher:
    """The teacher of a training on these images, in the form that votes in certification, on the
    device: in a checkpoint, or behind a denoiser also of a library. UserError if it is of other
    images.
    """
    name, images = str(spec.teacher), training.description
    is_library = spec.objective.DENOISES and parse_model(name).kind == LIBRARY
    if is_library and name.startswith("onnx:"):
        raise UserError(f"{name} has no gradients: name the network of which it was exported")
    if not is_library and members_of(name).mean is not None:
        raise UserError(f"the teacher {name} is an ensemble: name one checkpoint")
    input_layer = spec.input_layer if spec.objective.DENOISES else None
    if is_library:
        _, base = load(ModelSpec(dataset=training, model=name, input_layer=input_layer))
        network, sha256 = _of_library(base, images)
    else:
        base = load_checkpoint(name, images, input_layer=input_layer)
        network, sha256 = base.module, base.settings["checkpoint_sha256"]
    return Teacher(
        optimized_for_inference(network, device, torch.full(images.image_shape, 0.5)), sha256=sha256
    )


def _of_library(teacher: BaseClassifier, description: DatasetDescription) -> tuple[nn.Module, str]:
    """The pretrained network of a library, like timm:resnet18, which may know more classes than the
    images have, and its digest.

    UserError where classes of the images are one of its.
    """
    name, network = teacher.name, teacher.module
    known = description.class_names, [*range(description.num_classes)]
    names, first = teacher.classes or known
    if len({*first}) != len(first):
        raise UserError(
            f"several classes of '{description.name}' are one of {name}: give it one folder"
        )
    order = [*first, *sorted({*range(len(names))} - {*first})]
    sha256 = digest_of([name, teacher.settings["library"], network.state_dict()])
    return _Reordered(network, order), sha256


class _Reordered(nn.Module):
    """A network whose logits [B, K] are in another order: the classes of the images
    first.
    """

    def __init__(self, network: nn.Module, order: list[int]) -> None:
        super().__init__()
        self.network, self.order = network, order

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)[:, self.order]


def count_votes(
    classifier: Callable[[torch.Tensor], torch.Tensor],
    images: ImageDataset,
    indices: np.ndarray,
    draws: int,
    noise: GaussianNoise,
    device: torch.device,
    batch: int,
    processes: Processes,
    doing: str = "",
    for_labels: bool = False,
    early: bool = False,
    check: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """The votes int64 [n, K] of ``draws`` noisy copies of each of the images ``indices`` [n],
    without augmentation.

    ``for_labels`` returns those for the images' labels alone, [n, 1]; with ``early``, an image has
    the votes of ``until_precise``. The noise of an image is a function of ``noise`` and its index.
    Processes share the images; ``batch`` is the number of noisy images in a pass of ``classifier``.
    ``doing`` says what progress is shown of, if any. ``check`` is called now and then, and may
    raise an exception.
    """
    classes = images.description.num_classes
    votes = torch.zeros(len(indices), 1 if for_labels else classes, dtype=torch.int64)
    own, part = processes.share(torch.from_numpy(indices))
    counter = VoteCounter([classifier], [classes], batch, device)

    def polls() -> Iterator[Poll]:
        parts = own.split(_IMAGES_AT_A_TIME)
        for some, (loaded, labels) in zip(parts, images.evaluation_batches(parts, device)):
            check()
            for index, image, label in zip(some.tolist(), loaded, labels.tolist()):
                chosen = slice(label, label + 1) if for_labels else slice(None)
                stream = noise.stream(index, device, Purpose.TRAINING_VOTES)
                yield Poll(image, (stream,), (until_precise if early else _all)(draws), chosen)

    quiet = not doing or not processes.is_first
    progress = Progress(total=len(own), desc=doing, unit=" images", quiet=quiet, leave=False)
    with progress, torch.inference_mode():
        for place, result in enumerate(counter.run(polls()), start=part.start):
            votes[place] = torch.from_numpy(result.outcome[result.tag])
            progress.update()
    return processes.total(votes).numpy()


def _all(draws: int) -> Generator[Draws, np.ndarray, np.ndarray]:
    """Ask for so many votes; returns them, [K]."""
    return (yield Draws(draws))


def until_precise(draws: int) -> Generator[Draws, np.ndarray, np.ndarray]:
    """Ask for votes, at most ``draws``, until the standard error of every class's share is at most
    1 / (2 sqrt(draws)); returns them, [K].

    That is what ``draws`` votes have for the least clear image, at a share of 1/2. A loss whose
    gradient is linear in the shares, like CAT-RS's, feels an error of one size alike for all
    images: with more votes for the clear ones, it would still feel that one. With k of n votes, a
    share is taken for (k + 2) / (n + 4) (Agresti and Coull, 1998), since n unanimous votes have a
    standard error, too: n = sqrt(8 draws) suffice, and are asked for first. How many are asked for
    next depends on the votes alone.
    """
    votes, more = np.zeros(1, np.int64), min(draws, math.isqrt(8 * draws) + 1)
    while more > 0:
        votes = votes + (yield Draws(more))
        count = int(votes.sum())
        shares = (votes + 2) / (count + 4)
        more = min(draws, math.ceil(4 * draws * (shares * (1 - shares)).max())) - count
    return votes
