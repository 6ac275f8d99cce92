"""The mathematics of conformal sets under attack. No torch.

RCP1 (Zargarbashi, Akhondzadeh and Bojchevski, "One Sample is Enough to Make Conformal Prediction
Robust", NeurIPS 2025): a score is larger the better a class fits a noisy copy of an image. BinCP
(Zargarbashi and Bojchevski, "Robust Conformal Prediction with a Single Binary Certificate", ICLR
2025): the score is the number of noisy copies of an image that a class fits. A set holds the
classes whose score is at least a threshold, which calibration images decide. docs/guarantee.md has
the proofs.
"""

import hashlib
import math
from bisect import bisect_left
from fractions import Fraction

import numpy as np
from scipy import special

from smoothadv.statistics.bounds import failure_upper_bound
from smoothadv.statistics.ranges import within_ranges

COUNTING = Fraction(1, 20)
"""The share of alpha for each of BinCP's two bounds on the probability that a class fits."""


def calibrates(index: int, share: float, seed: int) -> bool:
    """Whether the image with this index calibrates, as this share of all images does, chosen at
    random; if not, it is tested.
    """
    digest = hashlib.sha256(f"smoothadv calibration {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


@within_ranges
def least_probability(chance: float, radius: float, sigma: float) -> float:
    """Phi(Phi^-1(chance) - radius / sigma), rounded down: the least probability, over noise on an
    image within ``radius`` of another, of what has probability ``chance`` there (Cohen et al.,
    2019, lemma 4).

    ValueError unless 0 <= chance <= 1, sigma > 0 and radius is finite.
    """
    z, shift = float(special.ndtri(math.nextafter(chance, 0.0))), radius / sigma
    z -= shift + (1 + abs(z) + shift) * 4e-15  # more than what ndtri and these sums round
    return float(special.ndtr(z)) * (1 - 1e-13)


def share_to_miss(alpha: Fraction, radius: float, sigma: float) -> Fraction:
    """RCP1: if the sets of images without an attack lack the label with at most this probability,
    those of images that were attacked within ``radius`` lack it with at most ``alpha``.

    That is 1 - beta, where Phi(Phi^-1(beta) - radius / sigma) = 1 - alpha. Errors as those of
    ``least_probability``.
    """
    if radius <= 0:
        return alpha
    return min(Fraction(least_probability(float(alpha), radius, sigma)), alpha)


def draws_under_attack(least: int, trials: int, radius: float, sigma: float, alpha: float) -> int:
    """BinCP: the fewest of ``trials`` draws on an image attacked within ``radius`` at which the
    label may still have ``least`` on the image itself.

    Each of two Clopper-Pearson bounds is false with probability at most ``alpha``: a lower one on
    the probability of what ``least`` draws had, an upper one on that of what fewer have.
    """
    chance = least_probability(1 - failure_upper_bound(least, trials, alpha), radius, sigma)
    return bisect_left(
        range(least), chance, key=lambda draws: failure_upper_bound(trials - draws, trials, alpha)
    )


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
