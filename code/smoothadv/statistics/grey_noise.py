"""Gaussian noise in whole grey levels: the thresholds by which it is drawn, and how far its
distribution is from the exact one.
"""

import math
from fractions import Fraction
from functools import lru_cache

BITS = 62
WHITE = 255
_DIGITS = 40
_REACH = 6  # in sigmas: the range is clipped to [-6 sigma, 255 + 6 sigma]


def clip(sigma: float) -> int:
    """B: how far below black and above white noisy pixels may lie, in grey levels."""
    return math.ceil(_REACH * WHITE * Fraction(sigma))


@lru_cache(maxsize=8)
def thresholds(sigma: float) -> tuple[list[int], float]:
    """T_i = 2^62 Phi((i + 1/2) / 255 sigma), i = -M..M-1, rounded; and the sum of their errors /
    2^62.

    M = 255 + B: noise beyond M is clipped for every pixel value, so it needs no further thresholds.
    """
    import mpmath

    reach = WHITE + clip(sigma)
    with mpmath.workdps(_DIGITS):
        scale = mpmath.mpf(WHITE) * mpmath.mpf(sigma)
        exact = [
            mpmath.ldexp(mpmath.ncdf((i + mpmath.mpf(1) / 2) / scale), BITS)
            for i in range(-reach, reach)
        ]
        nearest = [int(mpmath.nint(value)) for value in exact]
        error = mpmath.fsum(abs(value - integer) for value, integer in zip(exact, nearest))
        distance = float(mpmath.ldexp(error, -BITS))
    return nearest, distance * (1 + 1e-12)


def grey_noise_distance(sigma: float, dimension: int) -> float:
    """The total variation distance between the noise of an image of ``dimension`` pixels and
    round(N(0, (255 sigma)^2)), from above.
    """
    return dimension * thresholds(sigma)[1]
