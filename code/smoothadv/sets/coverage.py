"""The mathematics of conformal sets under attack (RCP1: Zargarbashi, Akhondzadeh and Bojchevski,
"One Sample is Enough to Make Conformal Prediction Robust", NeurIPS 2025). No torch.

A score is larger the better a class fits a noisy copy of an image. A set holds the classes whose
score is at least a threshold, which calibration images decide. docs/guarantee.md has the proof.
"""

import hashlib
import math
from fractions import Fraction

import numpy as np
from scipy import special

from smoothadv.statistics.ranges import within_ranges


def calibrates(index: int, share: float, seed: int) -> bool:
    """Whether the image with this index calibrates, as this share of all images does, chosen at
    random; if not, it is tested.
    """
    digest = hashlib.sha256(f"smoothadv calibration {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


@within_ranges
def share_to_miss(alpha: float, radius: float, sigma: float) -> Fraction:
    """Phi(Phi^-1(alpha) - radius / sigma), rounded down: if the sets of images without an attack
    lack the label with at most this probability, those of images that were attacked within
    ``radius`` lack it with at most ``alpha``.

    That is 1 - beta, where Phi(Phi^-1(beta) - radius / sigma) = 1 - alpha. ValueError unless 0 <
    alpha < 1, sigma > 0 and radius is finite.
    """
    if radius <= 0:
        return Fraction(str(alpha))  # the decimals as they were written
    z, shift = float(special.ndtri(math.nextafter(alpha, 0.0))), radius / sigma
    z -= shift + (1 + abs(z) + shift) * 4e-15  # more than what ndtri and these sums round
    return min(Fraction(float(special.ndtr(z)) * (1 - 1e-13)), Fraction(str(alpha)))


def threshold(scores: np.ndarray, share: Fraction) -> float:
    """The m-th smallest of the ``scores`` [n] of labels, m the largest with m / (n + 1) <= share;
    -inf, a threshold that all classes reach, where ``images_needed`` are more than n.

    Formal guarantee: the label's score of one more image, exchangeable with these, is below it with
    probability at most ``share``, also where scores are equal.
    """
    rank = math.floor((len(scores) + 1) * share)
    return float(np.sort(scores)[rank - 1]) if rank else -math.inf


def images_needed(share: Fraction) -> float:
    """The fewest images that must calibrate for a threshold above -inf; inf if any are too few."""
    return math.ceil(1 / share) - 1 if share else math.inf
