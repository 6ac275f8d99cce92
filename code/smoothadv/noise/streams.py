"""Random numbers with addresses: a stream of draws for each example, and generators for all other
uses.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from types import ModuleType
from typing import ClassVar

import numpy as np
import torch

from smoothadv.base.devices import to_device
from smoothadv.base.errors import first_line, warn
from smoothadv.base.files import digest
from smoothadv.noise.philox import Words, philox

_MOST = 2**32
# So many counters are computed at a time: their temporary tensors then fit into a processor's
# cache.
_CHUNK = 2**16


class Purpose(IntEnum):
    """What a random stream is used for. It is part of the key, so that no two uses share their
    draws.
    """

    VOTES = 0
    ATTACK_NOISE = 1
    ATTACK_CHOICES = 2
    DATA_ORDER = 3
    OBJECTIVE = 4
    EVALUATION = 5
    LAYERS = 6
    AUGMENTATION = 7
    SELF_CHECK = 8
    ATTACK_TARGETS = 9
    ATTACKED_VOTES = 10
    CALIBRATION = 11
    TRAINING_VOTES = 12


def derive_generator(device: torch.device | str, *key: int) -> torch.Generator:
    """A torch generator on ``device`` whose state is a hash of the non-negative integers ``key``.

    Equal keys give equal draws on the same kind of device; different keys give streams as
    independent as numpy.random.SeedSequence makes them. However, torch's CPU generator uses only 32
    bits of the hash: among 10,000 streams, two are identical with probability 1.2 %. Torch's global
    generators are neither read nor changed.
    """
    # 63 bits: Generator.manual_seed takes a signed 64-bit integer.
    # The length goes first because SeedSequence pads with zeros: (1, 0) would otherwise equal (1,).
    seed = int(
        np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )
    return torch.Generator(device=device).manual_seed(seed)


@dataclass(frozen=True)
class NoiseKey:
    """Keys the noise of a log by what the log is about, so that no classifier can be made to
    recognise its own noise.

    ``classifier`` is a digest of the classifier's weights, buffers and names, ``dataset`` the
    fingerprint of the dataset, ``sigma`` the standard deviation of the noise, ``seed`` >= 0 the
    user's. Whoever changes a weight changes all draws.
    """

    classifier: str
    dataset: str
    sigma: float
    seed: int

    @cached_property
    def _digest(self) -> bytes:
        named = (
            "smoothadv noise",
            self.classifier,
            self.dataset,
            float(self.sigma).hex(),
            str(self.seed),
        )
        return bytes.fromhex(digest(["\n".join(named)]))

    @property
    def words(self) -> tuple[int, int, int, int]:
        """Four words of 32 bits: two for the key of Philox, two that are combined with example and
        purpose.
        """
        first, second, third, fourth = np.frombuffer(self._digest, "<u4", count=4).tolist()
        return first, second, third, fourth

    @property
    def attack_seed(self) -> int:
        """A seed of 128 bits for the randomness of an attack, which shares no bits with
        ``words``.
        """
        return int.from_bytes(self._digest[16:], "little")


@dataclass(frozen=True)
class Noise(ABC):
    """Adds noise to images: this class gives every draw its random bits, subclasses turn them into
    a distribution.

    ``sigma`` > 0 is the standard deviation on images in [0, 1]. All streams are keyed by ``key``,
    or by ``seed`` >= 0 alone where there is none. The random bits of a draw are a function of the
    key and its address (example, purpose, number of the draw): they do not depend on the batch, the
    order of examples, the device or an interruption.
    """

    is_sound: ClassVar[bool] = False
    """Whether certificates under this noise hold for the executed arithmetic."""
    sigma: float
    seed: int
    key: NoiseKey | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and np.isfinite(self.sigma)):
            raise ValueError(f"sigma must be a positive finite number, got {self.sigma}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    @cached_property
    def _words(self) -> tuple[int, int, int, int]:
        if self.key is not None:
            return self.key.words
        first, second = np.random.SeedSequence(self.seed).generate_state(2, np.uint32).tolist()
        return first, second, 0, 0

    def stream(
        self, example: int, device: torch.device | str, purpose: int = Purpose.VOTES
    ) -> NoiseStream:
        """The draws of the example with index ``example`` >= 0 in its dataset, from the first on.

        Streams of another ``purpose`` >= 0 are independent: an attack must not see the prediction's
        noise.
        """
        return NoiseStream(self, example, device, purpose)

    @abstractmethod
    def distance(self, dimension: int) -> float:
        """An upper bound on the total variation distance to N(0, sigma^2 I) in ``dimension``
        coordinates.

        0 where certificates treat the noise as an exact Gaussian.
        """

    @abstractmethod
    def check_image(self, image: torch.Tensor, name: str = "the image") -> None:
        """UserError, which calls the image [C, H, W] ``name``, if this noise cannot be added to
        it.
        """

    def fill(self, out: torch.Tensor, batch: Sequence[Rows]) -> None:
        """Set ``out`` [B, C, H, W], of any float type, to noisy images: the rows of ``batch``, at
        least one, in order.

        Image and noise are summed in float32, or in integers, before they are rounded to the type
        of ``out``. Rows of ``out`` that are left over repeat one of the others. A kernel (see
        ``kernels_on``) does it in one launch. ValueError where a stream has another noise.
        """
        if any(rows.stream.noise != self for rows in batch):
            raise ValueError("the streams of a batch have several noises")
        kernels = kernels_on(out.device)
        if kernels is not None and len(out):
            images = [rows.image.to(out.device, torch.float32).contiguous() for rows in batch]
            self._launch(kernels, out, to_device(self._plan(len(out), batch, images), out.device))
            return
        filled = 0
        for rows in batch:
            part = out[filled : filled + rows.count]
            self._fill_plainly(
                part, rows.image, rows.stream.example, rows.first, rows.stream.purpose
            )
            filled += rows.count
        out[filled:] = out[:1]

    @abstractmethod
    def _fill_plainly(
        self, out: torch.Tensor, image: torch.Tensor, example: int, first: int, purpose: int
    ) -> None:
        """Set ``out`` [B, ...] to ``image`` [...] plus the draws of a stream from ``first`` on,
        with torch alone.
        """

    @abstractmethod
    def _launch(self, kernels: ModuleType, out: torch.Tensor, plan: torch.Tensor) -> None:
        """Set ``out`` [B, ...] to the rows of a plan, by one kernel of the module ``kernels``."""

    def _plan(
        self, size: int, batch: Sequence[Rows], images: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """What a kernel reads: int64 [1 + size, 4], in memory from which a GPU copies at once.

        First the key of Philox and sigma, as the bits of a float64; then for each row the address
        of its image in memory, the draw, and the words of example and purpose. Rows that are left
        over repeat the first.
        """
        first_word, second_word, example_word, purpose_word = self._words
        is_pinned = images[0].device.type == "cuda"
        memory = torch.empty((1 + size, 4), dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        plan = memory.numpy()
        plan[0] = first_word, second_word, np.float64(self.sigma).view(np.int64), 0
        filled = 1
        for rows, image in zip(batch, images):
            example, purpose = rows.stream.example, rows.stream.purpose
            self._check_address(image.numel(), rows.count, example, rows.first, purpose)
            part = plan[filled : filled + rows.count]
            part[:] = image.data_ptr(), rows.first, example ^ example_word, purpose ^ purpose_word
            part[:, 1] += np.arange(rows.count)
            filled += rows.count
        plan[filled:] = plan[1:2]
        return memory

    @staticmethod
    def _check_address(counters: int, draws: int, example: int, first: int, purpose: int) -> None:
        """ValueError where a number has no address; one that wrapped around would be the address of
        another draw.
        """
        if (
            max(counters, first + draws, example + 1, purpose + 1) > _MOST
            or min(first, example, purpose) < 0
        ):
            raise ValueError(
                f"example {example}, purpose {purpose} or draw {first + draws - 1} has no address"
            )

    def words(
        self,
        device: torch.device,
        counters: int,
        draws: int,
        example: int,
        first: int,
        purpose: int,
    ) -> Iterator[tuple[slice, Words]]:
        """4 * ``counters`` words for each draw, in chunks: (slice of the draws, four int64 [chunk,
        counters]).
        """
        self._check_address(counters, draws, example, first, purpose)

        def constant(value: int) -> torch.Tensor:
            return torch.full((1, 1), value, dtype=torch.int64, device=device)

        position = torch.arange(counters, dtype=torch.int64, device=device).unsqueeze(0)
        first_word, second_word, example_word, purpose_word = self._words
        # Exclusive or permutes the words, so different addresses stay different.
        stream = constant(example ^ example_word), constant(purpose ^ purpose_word)
        chunk = max(1, draws if device.type != "cpu" else _CHUNK // counters)
        for start in range(0, draws, chunk):
            stop = min(draws, start + chunk)
            draw = torch.arange(
                first + start, first + stop, dtype=torch.int64, device=device
            ).unsqueeze(1)
            yield slice(start, stop), philox((position, draw, *stream), (first_word, second_word))


class NoiseStream:
    """The draws of one example for one purpose, in order; each draw is returned once."""

    def __init__(
        self, noise: Noise, example: int, device: torch.device | str, purpose: int
    ) -> None:
        self.noise, self.example, self.purpose = noise, example, purpose
        self.device = torch.device(device)
        self._position = 0

    def reserve(self, count: int) -> int:
        """Reserve the next ``count`` draws for the caller; returns the number of the first one."""
        first, self._position = self._position, self._position + count
        return first

    def fill(self, out: torch.Tensor, image: torch.Tensor, first: int) -> None:
        """Set ``out`` [B, C, H, W] to ``image`` [C, H, W] plus the reserved draws from ``first``
        on.
        """
        self.noise.fill(out, [Rows(self, image, first, len(out))])

    def noisy(self, count: int, image: torch.Tensor, name: str = "the image") -> torch.Tensor:
        """The next ``count`` noisy copies of an image [C, H, W]: float32 [count, C, H, W] on the
        stream's device. An error calls the image ``name``.
        """
        self.noise.check_image(image, name)
        out = torch.empty((count, *image.shape), dtype=torch.float32, device=self.device)
        self.fill(out, image.to(self.device), self.reserve(count))
        return out

    def draw(self, count: int, image: torch.Tensor) -> torch.Tensor:
        """The next ``count`` draws without an image, in the shape of ``image``: ``noisy`` on a
        black image.
        """
        return self.noisy(count, torch.zeros(image.shape, dtype=torch.float32, device=self.device))


@dataclass(frozen=True)
class Rows:
    """``count`` rows of a batch: ``image`` [C, H, W], float32, plus the reserved draws of
    ``stream`` from ``first`` on.

    The caller has passed the image to ``check_image``.
    """

    stream: NoiseStream
    image: torch.Tensor
    first: int
    count: int


@cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """The module ``noise.kernels`` where the device can run them: with CUDA, Triton and a C
    compiler; else None.
    """
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    try:
        from smoothadv.noise import kernels
    except ImportError:
        return None
    try:
        kernels.try_out(device)
    except Exception as error:  # a compiler may fail with any exception
        warn(
            "Triton's kernel for the noise does not run here, which costs speed: "
            f"{first_line(error)}"
        )
        return None
    return kernels
