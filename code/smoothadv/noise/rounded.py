"""Gaussian noise in integer grey levels: smoothing whose certificates hold for the executed
arithmetic.

Float noise added to a float image leaks the image through its last bits, and float32 noise is not
exactly Gaussian (Jin et al., 2022, arXiv 2205.10159; Voracek and Hein, 2023, arXiv 2207.07209).
Here an 8-bit image X in {0..255}^d receives round(N(0, (255 sigma)^2)), an integer, and the sum is
clipped to a range that contains 0..255. Rounding commutes with integer shifts and clipping comes
after them, so Cohen et al.'s theorem applies to the classifier that first rounds and clips, and the
discretisation costs nothing.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from types import ModuleType
from typing import ClassVar

import torch

from smoothadv.base.errors import UserError
from smoothadv.noise.scale import grey_levels
from smoothadv.noise.streams import Noise
from smoothadv.statistics.grey_noise import BITS, WHITE, clip, grey_noise_distance, thresholds


class RoundedGaussianNoise(Noise):
    """round(N(0, (255 sigma)^2)) per pixel, by inversion of a 62-bit uniform integer, added to an
    8-bit image.

    The noisy image is Y / 255 in float32 for an integer Y in [-B, 255 + B], B = ceil(6 * 255
    sigma): a function of Y, so that a classifier of it is one of Y. The same integers come out on
    every device.
    """

    is_sound: ClassVar[bool] = True

    @cached_property
    def clip(self) -> int:
        """B: how far below black and above white noisy pixels may lie, in grey levels."""
        return clip(self.sigma)

    def distance(self, dimension: int) -> float:
        return grey_noise_distance(self.sigma, dimension)

    def check_image(self, image: torch.Tensor, name: str = "the image") -> None:
        _, are_meant = grey_levels(image)
        if not bool(are_meant.all()):
            raise UserError(
                f"{name} is not of 8 bits: it has the value {image[~are_meant][0].item():.9g}, "
                "expected k/255 with k in 0..255, rounded to float32, or the number next to that"
            )

    def _fill_plainly(
        self, out: torch.Tensor, image: torch.Tensor, example: int, first: int, purpose: int
    ) -> None:
        dimension, device = image.numel(), out.device
        # Every device divides by a tensor as IEEE 754 specifies.
        white = torch.full((), float(WHITE), device=device)
        grey = (image.to(device) * WHITE).round().to(torch.int64)
        thresholds = _ranks_on(self, device)
        chunks = self.words(device, -(-dimension // 2), len(out), example, first, purpose)
        for part, (w0, w1, w2, w3) in chunks:
            uniform = torch.cat([_join(w0, w1), _join(w2, w3)], dim=1)[:, :dimension]
            # The number of thresholds that are at most the uniform: P[the number <= i + M] = T_i /
            # 2^62.
            noise = thresholds.at_most(uniform).sub_(WHITE + self.clip)
            noisy = noise.view(-1, *image.shape).add_(grey).clamp_(-self.clip, WHITE + self.clip)
            torch.div(noisy.to(torch.float32), white, out=out[part])

    def _launch(self, kernels: ModuleType, out: torch.Tensor, plan: torch.Tensor) -> None:
        ranks = _ranks_on(self, out.device)
        tables, steps = (ranks.thresholds, ranks.starts), len(ranks.thresholds).bit_length()
        kernels.launch(
            kernels.rounded, out, plan, 2, *tables, self.clip, SHIFT=ranks.shift, STEPS=steps
        )


@lru_cache(maxsize=8)  # a process may make any number of noises
def _ranks_on(noise: RoundedGaussianNoise, device: torch.device) -> _Ranks:
    return _Ranks(torch.tensor(thresholds(noise.sigma)[0], device=device))


class _Ranks:
    """Counts the ascending ``thresholds``, int64 in 0..2^62, that are at most a given integer.

    As torch.bucketize, but faster: given the first bits of the integer, one comparison nearly
    always remains.
    """

    _FIRSTBITS = 13

    def __init__(self, thresholds: torch.Tensor) -> None:
        self.thresholds, self.shift = thresholds, BITS - self._FIRSTBITS
        firsts = torch.arange(2**self._FIRSTBITS + 1, device=thresholds.device) << self.shift
        # For integers that begin with these bits, the number is at least that of ``starts``, at
        # most the next of them.
        self.starts = self._searched(firsts).to(torch.int32)
        self.rank, self.several = self.starts[:-1].long(), self.starts.diff() > 1
        beyond = torch.full((1,), 2**BITS, dtype=torch.int64, device=thresholds.device)
        self.following = torch.cat([thresholds, beyond])[self.rank]

    def _searched(self, values: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(values, self.thresholds, right=True)

    def at_most(self, values: torch.Tensor) -> torch.Tensor:
        """For each of ``values``, int64 in 0..2^62-1 of any shape, the number of thresholds at most
        that value.
        """
        if values.device.type != "cpu":
            return self._searched(values)  # nonzero() below would wait for the device
        flat = values.reshape(-1)
        first = flat >> self.shift
        rank = self.rank.index_select(0, first)
        rank += flat >= self.following.index_select(0, first)
        rare = self.several.index_select(0, first).nonzero().view(-1)
        if len(rare):
            rank[rare] = self._searched(flat[rare])
        return rank.view(values.shape)


def _join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """62 random bits from two words of 32."""
    return (high << 30) | (low >> 2)
