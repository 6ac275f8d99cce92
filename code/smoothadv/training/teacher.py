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
from smoothadv.base.errors import UserError, warn
from smoothadv.base.files import cached, digest, keep
from smoothadv.base.progress import Progress
from smoothadv.datasets import ImageDataset
from smoothadv.models.checkpoint import digest_of, read_checkpoint
from smoothadv.models.load import RESIZE, load, load_checkpoint
from smoothadv.models.name import LIBRARY, members_of, parse_model
from smoothadv.models.spec import ModelSpec
from smoothadv.noise import GaussianNoise, Purpose
from smoothadv.records.logs import DENOISER
from smoothadv.statistics import Draws
from smoothadv.training.spec import TrainSpec
from smoothadv.voting.classifier import optimized_for_inference
from smoothadv.voting.counter import Poll, VoteCounter

_IMAGES_AT_A_TIME = 512


@dataclass
class Teacher:
    """``network`` maps images [B, C, H, W] to logits [B, K]; ``sha256`` is that of its
    checkpoint.
    """

    network: nn.Module
    sha256: str = ""

    def fields(self, indices: torch.Tensor, part: slice) -> dict[str, Any]:
        """The fields of a ``Batch`` of a ``part`` of the training images ``indices`` int64 [B].
        All processes call this with the same indices.
        """
        return {"teacher": self.network}

    def keep(self) -> None:
        """Save for other trainings what was computed."""


def for_label(draws: int, label: int) -> Generator[Draws, np.ndarray, int]:
    """Ask for so many votes; returns how many are for the label."""
    return int((yield Draws(draws))[label])


@dataclass(frozen=True)
class NoisyVotes:
    """The votes of ``classifier`` on noisy copies of the training ``images``, without
    augmentation.

    ``batch`` is the number of noisy images in a pass. Processes share the images.
    """

    classifier: Callable[[torch.Tensor], torch.Tensor]
    images: ImageDataset
    noise_sd: float
    device: torch.device
    batch: int
    processes: Processes

    def count(
        self,
        indices: np.ndarray,
        seed: int,
        voting: Callable[[int], Generator[Draws, np.ndarray, Any]],
        shape: tuple[int, ...] = (),
        doing: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> np.ndarray:
        """What ``voting`` of an image's label asks for and returns, int64 [n, *shape], for each of
        the images ``indices`` [n].

        The noise of an image is a function of ``seed`` and its index. ``doing`` says what progress
        is shown of, if any. ``check`` is called now and then, and may raise an exception.
        """
        found = torch.zeros(len(indices), *shape, dtype=torch.int64)
        own, part = self.processes.share(torch.from_numpy(indices))
        classes = self.images.description.num_classes
        counter = VoteCounter([self.classifier], [classes], self.batch, self.device)
        noise = GaussianNoise(self.noise_sd, seed)

        def polls() -> Iterator[Poll]:
            parts = own.split(_IMAGES_AT_A_TIME)
            batches = self.images.evaluation_batches(parts, self.device)
            for some, (images, labels) in zip(parts, batches):
                check()
                for index, image, label in zip(some.tolist(), images, labels.tolist()):
                    stream = noise.stream(index, self.device, Purpose.TRAINING_VOTES)
                    yield Poll(image, (stream,), voting(label))

        quiet = not doing or not self.processes.is_first
        progress = Progress(total=len(own), desc=doing, unit=" images", quiet=quiet, leave=False)
        with progress, torch.inference_mode():
            for place, result in enumerate(counter.run(polls()), start=part.start):
                found[place] = torch.as_tensor(result.outcome)
                progress.update()
        return self.processes.total(found).numpy()


class VotingTeacher(Teacher):
    """A teacher whose shares of the votes on noisy copies of training images are the ``targets`` of
    a batch; it votes on an image when that first comes.

    An image has as many votes as ``until_precise`` asks for. The cache of the user keeps them, for
    every training: they are a function of the checkpoint, the images, the noise and ``draws``, up
    to the rounding of passes of other sizes.
    """

    def __init__(self, teacher: Teacher, votes: NoisyVotes, draws: int) -> None:
        super().__init__(teacher.network, teacher.sha256)
        images, processes = votes.images, votes.processes
        key = [teacher.sha256, images.fingerprint(), repr(float(votes.noise_sd)), str(draws)]
        identity = digest(["\n".join([*key, "until precise"])])
        shape, content = (len(images), images.description.num_classes), b""
        self._name = f"teacher_votes/{identity}"
        if processes.is_first:
            content = cached(self._name, lambda: np.zeros(shape, "<u4").tobytes())
        self._votes = np.frombuffer(processes.received(content), "<u4").reshape(shape).copy()
        self._is_kept, self._device = True, votes.device
        self._count = partial(
            votes.count,
            seed=int(identity[:16], 16),
            voting=lambda label: until_precise(draws),
            shape=shape[1:],
        )

    def fields(self, indices: torch.Tensor, part: slice) -> dict[str, Any]:
        asked = np.unique(indices.numpy())
        new = asked[self._votes[asked].sum(1) == 0]
        if len(new):
            self._votes[new] = self._count(new)
            self._is_kept = False
        votes = self._votes[indices[part].numpy()]
        shares = torch.from_numpy(votes / votes.sum(1, keepdims=True)).float()
        return {"teacher": self.network, "targets": shares.to(self._device)}

    def keep(self) -> None:
        if not self._is_kept:
            keep(self._name, self._votes.tobytes())
        self._is_kept = True


def load_teacher(spec: TrainSpec, training: ImageDataset, device: torch.device) -> Teacher:
    """The teacher of a training on these images, in the form that votes in certification, on the
    device: in a checkpoint, or behind a denoiser also a pretrained network of a library, which may
    know more classes than the images have. UserError if it is of other images.
    """
    name, images = str(spec.teacher), training.description
    input_layer = spec.input_layer if spec.objective.DENOISES else None
    if not spec.objective.DENOISES or parse_model(name).kind != LIBRARY:
        if members_of(name).mean is not None:
            raise UserError(f"the teacher {name} is an ensemble: name one checkpoint")
        content = read_checkpoint(name)
        asked: dict[str, Any] = {"input_layer": input_layer}
        asked["resize"] = content.get("recipe", {}).get("resize")
        if "behind" in content:
            if spec.objective.DENOISES:
                raise UserError(
                    f"--classifier {name} was trained behind a denoiser: give one that was not"
                )
            if spec.denoiser is None:
                raise UserError(
                    f"the teacher {name} was trained behind a denoiser: name that with --denoiser"
                )
            asked |= {"denoiser": spec.denoiser, "timestep": spec.timestep}
            asked["sigma"] = spec.objective.noise_sd
        base = load_checkpoint(name, images, **asked)
        for doubt in base.doubts:
            warn(f"the teacher: {doubt}")
        network, sha256 = base.module, base.settings["checkpoint_sha256"]
        if before := [base.settings[one] for one in (DENOISER, RESIZE) if one in base.settings]:
            sha256 = digest_of([sha256, before])
    elif name.startswith("onnx:"):
        raise UserError(f"{name} has no gradients: name the network of which it was exported")
    else:
        _, base = load(ModelSpec(dataset=training, model=name, input_layer=input_layer))
        sha256 = digest_of([base.name, base.settings["library"], base.module.state_dict()])
        names, first = base.classes or (images.class_names, [*range(images.num_classes)])
        if len({*first}) != len(first):
            raise UserError(
                f"several classes of '{images.name}' are one of {name}: give it one folder"
            )
        network = _Reordered(base.module, [*first, *sorted({*range(len(names))} - {*first})])
    example = torch.full(images.image_shape, 0.5)
    return Teacher(optimized_for_inference(network, device, example), sha256)


class _Reordered(nn.Module):
    """A network whose logits [B, K] are in another order: the classes of the images
    first.
    """

    def __init__(self, network: nn.Module, order: list[int]) -> None:
        super().__init__()
        self.network, self.order = network, order

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)[:, self.order]


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
