"""Statistics of a log. Tables are pandas', as readers of logs make them; accuracies and rates are
fractions.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from smoothadv.statistics.bounds import binomial_interval
from smoothadv.statistics.on_grid import LABEL_AWARE
from smoothadv.statistics.ranges import check, within_ranges

DataFrame: TypeAlias = Any
"""Of pandas, which this package does not import."""


def certified_accuracies(table: DataFrame, radii: Iterable[float]) -> np.ndarray:
    """The share of examples classified correctly with a certified radius of at least r, for each r:
    float64.

    acc(r) = mean[predict = label and R >= r] (Cohen et al., section 4; SmoothAdv, section 4).
    """
    wanted = [*radii]
    check(radii=wanted)
    certified = np.sort(table["radius"].to_numpy()[table["correct"].to_numpy() == 1])
    at_least = len(certified) - np.searchsorted(
        certified, np.asarray(wanted, dtype=float), side="left"
    )
    return at_least / len(table)


def accuracy(table: DataFrame) -> float:
    """The share of examples classified correctly; an abstention is wrong. Without an attack it is
    the clean accuracy, which is the certified accuracy at radius 0."""
    return float(table["correct"].mean())


def average_certified_radius(table: DataFrame) -> float:
    """mean(R * [predict = label]) (Zhai et al., 2020): the area under the certified-accuracy curve.

    Of a log whose radii are on a grid, it is a lower bound and must be called so.
    """
    return float((table["radius"].to_numpy() * table["correct"].to_numpy()).mean())


def abstention_rate(table: DataFrame) -> float | None:
    """The share of abstentions (predict = -1); None of a label-aware log, which counts wrong
    selections as such.
    """
    return None if LABEL_AWARE in table else float((table["predict"].to_numpy() == -1).mean())


@within_ranges
def bootstrap_interval(
    accuracies: np.ndarray, examples: int, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap intervals over examples of shares measured on ``examples``: lower and
    upper ends.

    A resampled share is Binomial(examples, share) / examples exactly, so its quantiles need no
    resampling (Efron, 1979). The intervals cover the choice of test images, for one radius at a
    time; they do not include the error probability alpha of the certificates. Where none or all of
    the examples count, the interval has no width.
    """
    from scipy import stats  # takes a second to load

    tail = (1 - confidence) / 2
    lower, upper = (stats.binom.ppf(q, examples, accuracies) / examples for q in (tail, 1 - tail))
    return lower, upper


@within_ranges
def exact_interval(
    accuracies: np.ndarray, examples: int, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Intervals of Clopper and Pearson (1934) around shares measured on ``examples``: lower and
    upper ends.

    As ``bootstrap_interval``, for one radius at a time. Formal guarantee: if the images are drawn
    independently from a population, then the interval at a radius chosen in advance leaves out its
    accuracy with probability at most 1 - ``confidence``; also where none or all of the examples
    count.
    """
    ends = [
        binomial_interval(round(share * examples), examples, confidence)
        for share in accuracies.tolist()
    ]
    low, high = np.array(ends).T
    return low, high


@within_ranges
def dkw_band(
    accuracies: np.ndarray, examples: int, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of a band around shares measured on ``examples``, for all radii at once.

    The accuracies at all radii are the survival function of the images' radii, those of a wrong
    class or an abstention below 0. Formal guarantee: if the images are drawn independently from a
    population, then with probability at least ``confidence`` its accuracy lies within sqrt(ln(2 /
    (1 - confidence)) / (2 examples)) of the measured one at every radius (Dvoretzky, Kiefer and
    Wolfowitz, 1956, with the constant of Massart, 1990). As above, without alpha.
    """
    half = math.sqrt(math.log(2 / (1 - confidence)) / (2 * examples))
    return np.maximum(accuracies - half, 0.0), np.minimum(accuracies + half, 1.0)


@within_ranges
def clopper_pearson_band(
    accuracies: np.ndarray, examples: int, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """As ``dkw_band``, at all the given radii at once, which must not depend on the images.

    By the union bound: exact intervals, each missed with probability at most (1 - confidence) /
    their number.
    """
    return exact_interval(accuracies, examples, 1 - (1 - confidence) / len(accuracies))


BANDS = {
    "exact": exact_interval,
    "bootstrap": bootstrap_interval,
    "dkw": dkw_band,
    "clopper-pearson": clopper_pearson_band,
}


@within_ranges
def default_radii(tables: Iterable[DataFrame], most: int = 12) -> list[float]:
    """Multiples of 0.25 up to the largest certified radius; larger steps if there are more than
    ``most``.
    """
    largest = max((float(table.radius.max()) for table in tables), default=0.0)
    for step in (0.25, 0.5, 1.0, 2.5, 5.0, 10.0):
        count = max(1, int(largest / step))
        if count <= most:
            break
    return [round(step * (k + 1), 2) for k in range(min(count, most))]


def accuracy_curve(table: DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The certified-accuracy curve, as ``survival_curve``: acc(r) counts R >= r."""
    return survival_curve(table.radius[table.correct.eq(1)].to_numpy(), len(table))


@within_ranges
def survival_curve(values: np.ndarray, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """The share of ``examples`` of at least each of the ``values`` >= 0 that some of them have, as
    corners of steps.

    Corners ascend from 0; between two of them the share is that at the larger one.
    """
    corners, counts = np.unique(values, return_counts=True)
    # Examples with a value of at least corners[i]: those not among the smaller ones.
    at_least = len(values) - (np.cumsum(counts) - counts)
    end = corners[-1] if len(corners) else 0.0
    return (
        np.concatenate(([0.0], corners, [end])),
        np.concatenate(([len(values)], at_least, [0])) / examples,
    )
