"""The Gaussian that smooths: reproducible draws, one stream per example.

Noise is N(0, sigma^2 I) on images in [0, 1] (SmoothAdv eq. 2; Cohen et al. eq. 1); sigma is its
standard deviation per coordinate, on the same scale as the images.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What a random stream is for: a part of its key, so that no two uses ever share their draws."""

    VOTES = 0
    ATTACK_NOISE = 1
    ATTACK_CHOICES = 2
    DATA_ORDER = 3
    OBJECTIVE = 4
    EVALUATION = 5
    LAYERS = 6
    AUGMENTATION = 7


def derive_generator(device: torch.device | str, *key: int) -> torch.Generator:
    """A torch generator on ``device`` whose state is a hash of the non-negative integers ``key``.

    Equal keys give equal draws on the same kind of device; different keys give streams as independent as
    numpy.random.SeedSequence makes them, but that torch's CPU generator reads 32 bits of the hash: among
    10,000 streams two are the same with probability 1.2 %. Nothing reads or changes torch's global generators.
    """
    # 63 bits: Generator.manual_seed takes a signed 64-bit integer.
    # The length goes first because SeedSequence pads with zeros: (1, 0) would otherwise equal (1,).
    seed = int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.Generator(device=device).manual_seed(seed)


class NoiseStream:
    """An unending sequence of Gaussian draws; every draw is fresh.

    Draws are generated in blocks of a fixed size, so that the k-th draw is the same number for number
    however many are asked for at a time.
    """

    BLOCK = 64

    def __init__(self, sigma: float, generator: torch.Generator) -> None:
        self.sigma = sigma
        self.generator = generator
        self._left: torch.Tensor | None = None  # the unused end of a block, [<BLOCK, C, H, W]

    def draw(self, count: int, image: torch.Tensor) -> torch.Tensor:
        """The next ``count`` draws for an image [C, H, W]: [count, C, H, W], float32, on the stream's device.

        All draws of a stream must be for images of one shape.
        """
        noise = torch.empty((count, *image.shape), dtype=torch.float32, device=self.generator.device)
        filled = 0
        while filled < count:
            if self._left is None and count - filled >= self.BLOCK:
                self._fill(noise[filled : filled + self.BLOCK])
                filled += self.BLOCK
                continue
            if self._left is None:
                self._left = self._fill(torch.empty((self.BLOCK, *image.shape), device=noise.device))
            part = self._left[: count - filled]
            noise[filled : filled + len(part)] = part
            filled += len(part)
            self._left = self._left[len(part) :] if len(part) < len(self._left) else None
        return noise

    def _fill(self, block: torch.Tensor) -> torch.Tensor:
        return block.normal_(0.0, self.sigma, generator=self.generator)


@dataclass(frozen=True)
class GaussianNoise:
    """Isotropic Gaussian noise of standard deviation ``sigma`` > 0, reproducible from ``seed`` >= 0.

    The stream of an example depends on (seed, example) alone, so the order in which examples are
    visited, and which were visited before an interruption, cannot change anyone's draws.
    """

    sigma: float
    seed: int

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and np.isfinite(self.sigma)):
            raise ValueError(f"sigma must be a positive finite number, got {self.sigma}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def stream(self, example: int, device: torch.device | str, purpose: int = Purpose.VOTES) -> NoiseStream:
        """The stream of the example with index ``example`` >= 0 in its dataset.

        Streams of other ``purpose`` >= 0 are independent: an attack must not see the prediction's noise.
        """
        return NoiseStream(self.sigma, derive_generator(device, self.seed, example, purpose))


def training_noise(images: torch.Tensor, copies: int, sigma: float, generator: torch.Generator) -> torch.Tensor:
    """``copies`` independent draws for each image [B, C, H, W]: [B, copies, C, H, W], of the images' dtype.

    sigma = 0 gives zeros, which is training or attacking without noise. Drawn on the images' device, which
    must be the generator's.
    """
    batch, *shape = images.shape
    noise = torch.zeros((batch, copies, *shape), dtype=images.dtype, device=images.device)
    return noise.normal_(0.0, sigma, generator=generator) if sigma > 0 else noise
