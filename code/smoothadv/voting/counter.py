"""Counts votes: the draws of several images share batches of one fixed shape, each batch for one of
the classifiers that vote.

Kernels may round differently for another shape, so every forward pass has the same shape, with
padding where there are too few draws. Then it does not matter which draws share a batch: an image's
votes are a function of its noise stream.
"""

import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from smoothadv.architectures.integers import NetworkOfIntegers, digest_of_logits
from smoothadv.base.devices import layout_on, to_device, to_host, within_memory
from smoothadv.base.errors import NonFiniteError, UserError
from smoothadv.base.files import digest
from smoothadv.noise import NoiseStream, Purpose, Rows, derive_generator
from smoothadv.statistics import Draws

_PROBED_AT_ONCE = 64
_ONE = (1, 1, 1)
_NO_VOTE = -1
# So many images are open at a time where several classifiers vote: without a limit, an image could
# wait for as long as there are others whose requests fill batches of another stage.
_MOST_OPEN = 64


@dataclass(frozen=True)
class Poll:
    """An image [C, H, W] whose votes are counted: ``voting`` requests votes until it returns,
    ``streams`` make the noise of each stage.

    The caller recognizes the poll's result by ``tag``.
    """

    image: torch.Tensor
    streams: tuple[NoiseStream, ...]
    voting: Generator[Draws, np.ndarray, Any]
    tag: Any = None


@dataclass(frozen=True)
class Result:
    """The ``outcome`` that a poll's ``voting`` returned, and the poll's share of the time that the
    batches took.
    """

    tag: Any
    outcome: Any
    seconds: float


class _OpenPoll:
    """An unfinished poll: its current request, the votes counted for it, and the draws already put
    into batches.
    """

    def __init__(self, poll: Poll, num_classes: Sequence[int]) -> None:
        self.poll, self.num_classes = poll, num_classes
        for stream in poll.streams:
            stream.noise.check_image(poll.image)
        self.image = to_device(poll.image, poll.streams[0].device).contiguous()
        self.seconds, self.closed, self.outcome = 0.0, False, None
        self.round, self.stage, self.next_draw = -1, 0, 0
        self._proceed(None)

    def _proceed(self, answer: np.ndarray | None) -> None:
        """Answer the current request and take the next one; when ``voting`` returns, the poll is
        closed.
        """
        self.round += 1
        self.wanted = 0
        try:
            self.request = (
                next(self.poll.voting) if answer is None else self.poll.voting.send(answer)
            )
        except StopIteration as end:
            self.closed, self.outcome = True, end.value
            return
        self.wanted, self.stage = self.request.count, self.request.stage
        self.counts = np.zeros(self.num_classes[self.stage], dtype=np.int64)
        self.next_draw = self.poll.streams[self.stage].reserve(self.wanted)
        if self.wanted == 0:
            self._proceed(self.counts)

    def count(self, round_: int, votes: np.ndarray) -> None:
        """Count the votes, in order, of draws taken in ``round_``; the votes of a finished round
        are ignored.
        """
        if round_ != self.round or self.closed:
            return
        is_settled = self.request.is_settled or (lambda counts: False)

        def counts_after(number: int) -> np.ndarray:
            return self.counts + np.bincount(votes[:number], minlength=len(self.counts))

        counts = counts_after(len(votes))
        if decided := is_settled(counts):
            # Count exactly up to the vote that decides: otherwise the counts would depend on the
            # batch.
            numbers = range(1, len(votes) + 1)
            place = bisect_left(numbers, True, key=lambda number: is_settled(counts_after(number)))
            counts = counts_after(numbers[place])
        self.counts = counts
        if decided or counts.sum() == self.request.count:
            self._proceed(counts)


@dataclass(frozen=True)
class _Share:
    """The rows start..stop-1 of a batch: draws of one open poll, numbered from ``first``."""

    owner: _OpenPoll
    round: int
    first: int
    start: int
    stop: int


class VoteCounter:
    """Counts the votes of ``classifiers``, which map noisy images [B, C, H, W] to logits [B, K];
    ``num_classes`` has the K of each. The stage of a request says which of them votes.

    ``batch`` is the number of noisy images per forward pass, ``dtype`` the float type to which the
    sums of image and noise are rounded. When memory runs out, the batch is halved and
    ``on_smaller_batch`` is called with the new one; with ``keep_batch`` that is a UserError
    instead. ``on_batch`` is called with the number of draws after every batch.
    """

    def __init__(
        self,
        classifiers: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        num_classes: Sequence[int],
        batch: int,
        device: torch.device,
        keep_batch: bool = False,
        on_smaller_batch: Callable[[int], None] = lambda batch: None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if batch < 1:
            raise ValueError(f"the batch must be at least 1, got {batch}")
        self.classifiers, self.num_classes, self.batch = classifiers, num_classes, batch
        self.keep_batch, self.on_smaller_batch = keep_batch, on_smaller_batch
        self.device, self.dtype, self.layout = device, dtype, layout_on(device, dtype)
        self.on_batch: Callable[[int], None] = lambda draws: None
        self._buffer: torch.Tensor | None = None
        # An accelerator works on the next batch while the votes of this one are counted.
        self._depth = 1 if device.type == "cpu" else 2
        self._most_open = _MOST_OPEN if len(classifiers) > 1 else sys.maxsize

    def run(self, polls: Iterable[Poll]) -> Iterator[Result]:
        """The results of ``polls``, in their order. A batch takes draws of earlier polls first,
        then of later ones.

        NonFiniteError if a logit is NaN or infinite; ValueError if a classifier has other than
        ``num_classes`` classes.
        """
        waiting: Iterator[Poll] = iter(polls)
        open_polls: deque[_OpenPoll] = deque()
        in_flight: deque[tuple[list[_Share], Callable[[], torch.Tensor]]] = deque()
        last = time.perf_counter()
        while True:
            while len(in_flight) < self._depth and (shares := self._plan(open_polls, waiting)):
                votes = within_memory(partial(self._forward, shares), self._halve)
                in_flight.append((shares, to_host(votes)))
            if not (in_flight or open_polls):
                return
            if in_flight:
                shares, waited = in_flight.popleft()
                counted = waited().numpy()  # waits for this batch, not for the next
                if invalid := int((counted == _NO_VOTE).sum()):
                    raise not_finite(invalid, len(counted))
                now = time.perf_counter()
                each, last = (now - last) / len(counted), now
                for share in shares:
                    share.owner.seconds += each * (share.stop - share.start)
                    share.owner.count(share.round, counted[share.start : share.stop])
                self.on_batch(len(counted))
            while open_polls and open_polls[0].closed:
                done = open_polls.popleft()
                yield Result(done.poll.tag, done.outcome, done.seconds)

    def _plan(self, open_polls: deque[_OpenPoll], waiting: Iterator[Poll]) -> list[_Share]:
        """Choose the draws of the next batch, all of the stage of which most are wanted; starts
        further polls if the batch has room for them.
        """
        wanted = [0] * len(self.classifiers)
        for owner in open_polls:
            wanted[owner.stage] += owner.wanted
        while max(wanted) < self.batch and len(open_polls) < self._most_open:
            if (poll := next(waiting, None)) is None:
                break
            owner = _OpenPoll(poll, self.num_classes)
            open_polls.append(owner)
            wanted[owner.stage] += owner.wanted
        stage, shares, filled = wanted.index(max(wanted)), list[_Share](), 0
        for owner in open_polls:
            count = min(self.batch - filled, owner.wanted)
            if count and owner.stage == stage:
                shares.append(_Share(owner, owner.round, owner.next_draw, filled, filled + count))
                owner.next_draw += count
                owner.wanted -= count
                filled += count
        return shares

    @torch.inference_mode()
    def logits_digest(self, image_shape: tuple[int, ...], stage: int = 0) -> str:
        """A SHA-256, in hexadecimal, of the logits of a stage for a fixed batch of images [C, H, W]
        of random grey levels.

        Different digests show that two processes vote with different functions. It depends on the
        batch, which is halved where memory runs out.
        """

        def logits() -> torch.Tensor:
            # On the CPU, so that all devices get equal images.
            generator = derive_generator("cpu", Purpose.SELF_CHECK)
            buffer = self._batch_buffer(image_shape)
            for rows in buffer.split(_PROBED_AT_ONCE):
                grey = torch.randint(0, 256, rows.shape, generator=generator, dtype=torch.uint8)
                rows.copy_(grey.float().div_(255))
            return self.classifiers[stage](buffer).float().cpu().contiguous()

        return digest([within_memory(logits, self._halve).numpy()])

    @torch.inference_mode()
    def _forward(self, shares: list[_Share]) -> torch.Tensor:
        """The votes of a plan, int64 [draws]; _NO_VOTE where logits are not finite. The last batch
        is padded; there are several where the batch was halved.
        """
        stage, votes = shares[0].owner.stage, []
        for start in range(0, shares[-1].stop, self.batch):
            batch = []
            for share in shares:
                low, high = max(share.start, start), min(share.stop, start + self.batch)
                owner, first = share.owner, share.first + low - share.start
                if low < high:
                    batch.append(Rows(owner.poll.streams[stage], owner.image, first, high - low))
            logits = self.logits(batch, stage)
            broken = (logits * 0).sum(1) != 0  # 0 times infinity, or NaN, is NaN
            votes.append(logits.argmax(1).masked_fill_(broken, _NO_VOTE))
        return torch.cat(votes)[: shares[-1].stop]

    def logits(self, batch: Sequence[Rows], stage: int = 0) -> torch.Tensor:
        """The logits [B, K] of a stage for one padded batch: those of its ``batch`` come first."""
        image = batch[0].image
        for rows in batch:
            if rows.image.shape != image.shape:
                raise ValueError(
                    f"images of shapes {tuple(image.shape)} and {tuple(rows.image.shape)}"
                )
        buffer = self._batch_buffer(image.shape)
        batch[0].stream.noise.fill(buffer, batch)
        logits = self.classifiers[stage](buffer)
        if logits.shape != (len(buffer), self.num_classes[stage]):
            raise ValueError(
                f"the base classifier returned shape {tuple(logits.shape)} for {len(buffer)} "
                f"images and {self.num_classes[stage]} classes"
            )
        return logits

    def _batch_buffer(self, image_shape: tuple[int, ...]) -> torch.Tensor:
        shape = (self.batch, *image_shape)
        if self._buffer is None or self._buffer.shape != shape:
            self._buffer = torch.empty(
                shape, dtype=self.dtype, device=self.device, memory_format=self.layout
            )
        return self._buffer

    def _halve(self, reason: str) -> None:
        """Continue with half the batch; draws keep their numbers, so none is lost or repeated."""
        if self.keep_batch or self.batch == 1:
            raise UserError(
                f"out of memory with --batch {self.batch}: give a smaller one ({reason})"
            )
        self._buffer = None
        self.batch //= 2
        self.on_smaller_batch(self.batch)


def not_finite(invalid: int, images: int) -> NonFiniteError:
    """The error where the logits of so many ``images`` are not finite."""
    return NonFiniteError(
        f"the base classifier returned logits that are not finite for {invalid} of {images} noisy "
        "images: its weights are broken, training diverged, or --precision fp16 overflowed"
    )


@torch.inference_mode()
def check_repeatable(
    counter: VoteCounter, image: torch.Tensor, stream: NoiseStream, stage: int = 0
) -> None:
    """Spot check: UserError unless noisy images get the same logits of a stage again, also in other
    rows, beside other images.

    NonFiniteError where a logit is NaN or infinite: NaN is not even equal to itself. Certificates
    for the executed arithmetic need a classifier whose logits depend on one image only. One batch
    of noisy copies of ``image`` [C, H, W] can show that they depend on more, and cannot show that
    they never do.
    """
    classifier = counter.classifiers[stage]
    draws = (stream.noisy(counter.batch, image) for _ in range(2))
    images, others = (noisy.to(counter.dtype, memory_format=counter.layout) for noisy in draws)
    logits = classifier(images)
    # CUDA's roll returns channels first, and for another layout a compiler would make another
    # classifier.
    rolled_images = images.roll(1, 0).to(memory_format=counter.layout)
    again, rolled = classifier(images), classifier(rolled_images)
    others[::2] = images[::2]
    if invalid := len(logits) - int(logits.isfinite().all(1).sum()):
        raise not_finite(invalid, len(logits))
    if not torch.equal(logits, again):
        raise UserError(
            "the base classifier gives different logits for the same batch: on this device it is "
            "not deterministic"
        )
    if not torch.equal(logits[::2], classifier(others)[::2]):
        raise UserError(
            "the base classifier's logits for an image depend on the other images in a batch"
        )
    if not torch.equal(logits.roll(1, 0), rolled):
        raise UserError(
            "the base classifier's logits depend on an image's row in the batch at --batch "
            f"{counter.batch}: choose another batch (a multiple of 16, or 1)"
        )


@torch.inference_mode()
def check_integers(
    counter: VoteCounter, network: NetworkOfIntegers, form: Any = None, stage: int = 0
) -> None:
    """UserError unless, on the network's probe images, the counter's batches of a stage have the
    logits of ``network`` as computed in float64.

    ``form`` votes (None: the network itself) and is compared layer by layer. A compiled form has
    nothing but its logits, so that a second batch must have the logits of the network, too.
    """
    classifier = counter.classifiers[stage]
    images = network.probe_images().to(counter.device, counter.dtype, memory_format=counter.layout)
    rows = torch.arange(
        -(-len(images) // counter.batch) * counter.batch, device=counter.device
    ) % len(images)
    logits = torch.cat([classifier(images[some]) for some in rows.split(counter.batch)])
    first, batch = logits[: len(images)], images[rows[: counter.batch]]
    generator = torch.Generator().manual_seed(0)
    grey, contrast, noise = (
        torch.rand(len(batch), *more, generator=generator) for more in (_ONE, _ONE, batch.shape[1:])
    )
    varied = (grey + contrast * (noise - 0.5)).to(batch)  # from flat images to noise
    if (
        not torch.equal(logits, first[rows])
        or digest_of_logits(first) != network.probe
        or (form or network).inexact_layer(batch) is not None
        or not torch.equal(classifier(varied), network(varied))
    ):
        raise UserError(
            "the kernels of this machine do not compute this network of integers exactly, so that "
            f"it is another classifier here: choose another --batch than {counter.batch}, leave "
            "--compile out, or use the CPU"
        )
