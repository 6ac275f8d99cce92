"""The draws, written down a second time: whole numbers of Python, one coordinate after the
other.
"""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np

WORD = 2**32
# The noise levels of the published models.
SIGMAS = (0.12, 0.25, 0.5, 1.0)
_DIGITS = 60


def philox(counter: tuple[int, ...], key: tuple[int, int], rounds: int = 10) -> tuple[int, ...]:
    """Philox4x32 of Salmon et al. (2011), section 3.3, after this many rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return c0, c1, c2, c3


def key_of(seed: int) -> tuple[int, int]:
    """The key that belongs to a seed."""
    first, second = np.random.SeedSequence(seed).generate_state(2, np.uint32)
    return int(first), int(second)


def gaussian_coordinate(
    coordinate: int, dimension: int, sigma: float, seed: int, example: int, purpose: int, draw: int
) -> float:
    """One coordinate of a draw of N(0, sigma^2 I), in float64.

    With n = ceil(dimension / 4), counter p gives the coordinates p, p + n, p + 2n and p + 3n: two
    pairs by Box and Muller.
    """
    kind, position = divmod(coordinate, -(-dimension // 4))
    words = philox((position, draw, example, purpose), key_of(seed))
    first, second = words[:2] if kind < 2 else words[2:]
    radius = sigma * math.sqrt(-2 * math.log((first + 0.5) / WORD))
    angle = 2 * math.pi * second / WORD
    return radius * (math.sin(angle) if kind % 2 else math.cos(angle))


def uniform_coordinate(
    coordinate: int, dimension: int, seed: int, example: int, purpose: int, draw: int
) -> int:
    """The integer in 0..2^62-1 from which one coordinate of rounded noise is made.

    With n = ceil(dimension / 2), counter p gives the coordinates p and p + n: the first 62 of 64
    bits.
    """
    kind, position = divmod(coordinate, -(-dimension // 2))
    words = philox((position, draw, example, purpose), key_of(seed))
    high, low = words[2 * kind : 2 * kind + 2]
    return high * 2**30 + low // 4


def clip_of(sigma: float) -> int:
    """B = ceil(6 * 255 sigma)."""
    return math.ceil(6 * 255 * Fraction(sigma))


@cache
def exact_thresholds(sigma: float) -> list[mpmath.mpf]:
    """2^62 Phi((i + 1/2) / (255 sigma)) for i = -M..M-1, M = 255 + B, to 60 digits."""
    reach = 255 + clip_of(sigma)
    with mpmath.workdps(_DIGITS):
        scale = 255 * mpmath.mpf(sigma) * mpmath.sqrt(2)
        return [2**61 * mpmath.erfc(-(i + mpmath.mpf("0.5")) / scale) for i in range(-reach, reach)]


@cache
def thresholds(sigma: float) -> list[int]:
    """The same, rounded to the nearest integers."""
    with mpmath.workdps(_DIGITS):
        return [int(mpmath.floor(value + mpmath.mpf("0.5"))) for value in exact_thresholds(sigma)]


def noisy_grey(grey: int, uniform: int, table: list[int], clip: int) -> int:
    """A pixel plus the noise that belongs to a uniform, clipped; ``table`` holds the thresholds."""
    return min(max(grey + (bisect_right(table, uniform) - len(table) // 2), -clip), 255 + clip)
