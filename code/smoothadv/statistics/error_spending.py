"""Exact error-spending tables: how many successes reject "p <= t" at each of several looks, at
level alpha in all.

Group-sequential testing with the error-spending function of Lan and DeMets (1983), computed for the
binomial distribution itself instead of its normal limit (compare Jennison and Turnbull, 2000,
chapter 12). A row belongs to one null hypothesis p <= t; it is crossed if at some look the
successes so far reach the row's boundary there.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from smoothadv.base.settings import SettingError
from smoothadv.statistics.ranges import trusting, within_ranges

FIRST_LOOK, GROWTH, STEP, PUBLISHED_N = 100, 1.25, 50, 100_000
_TAIL, _SLACK = 1e-17, 1e-12
"""Tails below _TAIL are cut off; each look spends _SLACK beyond its computed probability, for those
and rounding.
"""
_NEAR_ONE = 1e-9
_VERSION = 4
Row = Callable[[float], np.ndarray]


def _rows(key: str, row: Row, nulls: Sequence[float]) -> list[np.ndarray]:
    return [row(null) for null in nulls]


rows_of: ContextVar[Callable[[str, Row, Sequence[float]], list[np.ndarray]]] = ContextVar(
    "rows_of", default=_rows
)
"""What computes the rows of tables, by a text that says all that decides them. A program may set
it to a function that keeps them: ``base.files.kept_rows``.
"""


@within_ranges
def spending(n: int, n_max: int, alpha: float, early: float) -> float:
    """The error that may be spent up to n draws: alpha (1 - w) ln(1 + n/100) / ln(1 + n_max/100),
    alpha at n_max.

    ``early`` is 1 - w, the share of alpha that is not kept for the last look.
    """
    if n >= n_max:
        return alpha
    return alpha * early * math.log1p(n / FIRST_LOOK) / math.log1p(n_max / FIRST_LOOK)


@within_ranges
def look_schedule(
    nulls: Sequence[float],
    n_max: int,
    alpha: float,
    early: float,
    growth: float = GROWTH,
    step: int = STEP,
) -> np.ndarray:
    """The numbers of draws at which to look: int64, ascending, ending with ``n_max``.

    A geometric sequence with the ratio ``growth`` > 1, rounded to multiples of ``step``; n =
    100,000, where a fixed-sample procedure would decide; and, for each null t, the first multiple
    of ``step`` at which n successes out of n reject it: t^n <= spending(n).
    """
    special_looks = {
        first
        for t in nulls
        if (first := _first_all_success_look(t, n_max, alpha, early, step)) is not None
    } | ({PUBLISHED_N} if n_max > PUBLISHED_N else set())
    geometric = []
    n = float(FIRST_LOOK)
    while n < n_max / math.sqrt(growth):
        geometric.append(min(n_max, step * max(1, round(n / step))))
        n *= growth
    apart = 0.16 * (growth - 1)
    kept = {n for n in geometric if all(abs(n - other) > apart * other for other in special_looks)}
    return np.array(sorted(kept | special_looks | {n_max}), dtype=np.int64)


def _first_all_success_look(
    t: float, n_max: int, alpha: float, early: float, step: int
) -> int | None:
    if t > 1 - _NEAR_ONE:
        return None

    def is_rejected(steps: int) -> bool:
        return steps * step * math.log(t) <= math.log(spending(steps * step, n_max, alpha, early))

    # n ln t - ln spending(n) falls as n grows, so that bisection finds where it reaches 0.
    n = step * (1 + bisect_left(range(1, math.ceil(n_max / step)), True, key=is_rejected))
    return n if n < n_max else None


@within_ranges
def efficacy_row(null: float, looks: np.ndarray, allowance: Sequence[float]) -> np.ndarray:
    """The smallest boundaries [K] that p = ``null`` crosses with probability at most
    ``allowance[k]`` by look k.

    The computation carries the distribution of the successes, on the paths that have crossed no
    boundary, from look to look. A boundary of looks[k] + 1 cannot be crossed.

    Formal guarantee: for every p <= ``null``, P[the boundaries are crossed] <= allowance[-1], since
    crossing is an increasing event.
    """
    from scipy import signal  # takes a second to load

    row = np.empty(len(looks), dtype=np.int64)
    if null > 1 - _NEAR_ONE:
        return looks + 1
    alive, start, spent = np.ones(1), 0, 0.0
    for k, (n, (low, more)) in enumerate(zip(looks, _increments(looks, null))):
        alive, start = np.maximum(signal.convolve(alive, more), 0.0), start + low
        tails = np.append(np.cumsum(alive[::-1])[::-1], 0.0)
        first = int(np.argmax(tails <= allowance[k] - spent - _SLACK))
        if (
            tails[first] > allowance[k] - spent - _SLACK
        ):  # too little error is left for any boundary
            row[k] = n + 1
        else:
            row[k] = min(start + first, n + 1)
            spent += tails[first] + _SLACK
        alive = alive[: row[k] - start]
        if not len(alive):
            row[k + 1 :] = row[k] + (looks[k + 1 :] - n)
            break
    return row


def _increments(looks: np.ndarray, p: float) -> list[tuple[int, np.ndarray]]:
    """For each look, the distribution of the successes among the draws since the one before, and
    where it starts.
    """
    from scipy import stats

    # Three calls for all looks: each takes longer than the numbers that it computes for one of
    # them.
    draws = np.diff(looks, prepend=0)
    low, high = (
        limit(_TAIL, draws, p).astype(np.int64) for limit in (stats.binom.ppf, stats.binom.isf)
    )
    counts = [np.arange(first, last + 1) for first, last in zip(low, high)]
    sizes = [len(each) for each in counts]
    pmf = stats.binom.pmf(np.concatenate(counts), np.repeat(draws, sizes), p)
    return list(zip(low.tolist(), np.split(pmf, np.cumsum(sizes)[:-1])))


@within_ranges
def futility_table(last_boundaries: np.ndarray, looks: np.ndarray, gamma: float) -> np.ndarray:
    """For rows with these last boundaries [J] and each look, the most successes with which the last
    one is out of reach even if p is its upper bound: int64 [J, K].

    The largest s with s + (n_max - n) U(s, n) < last boundary, U the Clopper-Pearson upper bound at
    level ``gamma``; -1 where there is none. This spends no error: giving up early only loses
    certificates.
    """
    hopeless = np.full((len(last_boundaries), len(looks)), -1)
    reaching = np.tile(looks + 1, (len(last_boundaries), 1))
    while (reaching - hopeless > 1).any():
        middle = (hopeless + reaching) // 2
        upper = trusting(success_upper_bound)(middle, looks, gamma)  # also of -1 successes
        at_best = middle + (looks[-1] - looks) * upper
        reaches = at_best >= last_boundaries[:, None]
        hopeless = np.where(reaches, hopeless, middle)
        reaching = np.where(reaches, middle, reaching)
    return hopeless


@within_ranges
def futility_probability(
    n: int, n_max: int, null: float, patience: float, power: float, tilt: float
) -> float:
    """The probability of a rejection below which drawing on is futile: (v / patience)^power (4 t (1
    - t))^tilt.

    At most 0.9; v = n (1 - n / n_max) and t = ``null``. ``patience`` is a number of draws: with n
    of them behind, a decision that is still open takes about as many again, and at most the n_max -
    n that are left.
    """
    _check_draws(n, n_max)
    return float(
        min(0.9, (n * (1 - n / n_max) / patience) ** power * (4 * null * (1 - null)) ** tilt)
    )


@within_ranges
def predictive_quantile(successes: int, n: int, n_max: int, chance: float) -> float:
    """About the count after ``n_max`` draws that is exceeded with the predictive probability
    ``chance``, after some of ``n``.

    The share of successes among the other draws is a quantile of a beta distribution with the
    counts ``successes`` + 1 and n - ``successes``, both reduced by the factor 1 - n / n_max: this
    widens it by the chance of those draws. Half a success is added for continuity. Like
    ``futility_table``, this spends no error.
    """
    _check_draws(n, n_max, successes)
    left = 1 - n / n_max
    misses = max(left * (n - successes), 1e-9)
    return (
        successes
        + 0.5
        + (n_max - n) * float(special.betainccinv(left * successes + 1, misses, chance))
    )


def _check_draws(n: int, n_max: int, successes: int = 0) -> None:
    if not successes <= n <= n_max:
        raise SettingError(f"n: found {n}, expected from {successes} successes to n_max, {n_max}")


@within_ranges
def success_upper_bound(successes: ArrayLike, trials: ArrayLike, gamma: float) -> np.ndarray:
    """One-sided Clopper-Pearson upper bounds on binomial probabilities, at level ``gamma``:
    float64.
    """
    if np.any(np.greater(successes, trials)):
        raise SettingError(f"successes: found {successes!r} of {trials!r}, expected 0 to all")
    misses = np.subtract(trials, successes)
    return np.where(misses == 0, 1.0, special.betainccinv(np.add(successes, 1), misses, gamma))


@within_ranges
def efficacy_table(
    nulls: Sequence[float], looks: np.ndarray, alpha: float, early: float
) -> np.ndarray:
    """The ``efficacy_row`` of each of ascending ``nulls``, int64 [J, K], at level ``alpha``; the
    last look is n_max.

    A boundary is raised to those of the smaller nulls, so that rejections are nested: rejecting p
    <= t rejects every smaller t. Raising boundaries can only lower a row's level.
    """
    allowance = [spending(int(n), int(looks[-1]), alpha, early) for n in looks]
    key = json.dumps([_VERSION, [*nulls], looks.tolist(), allowance])
    rows = rows_of.get()(key, lambda null: efficacy_row(null, looks, allowance), nulls)
    return np.maximum.accumulate(
        np.array(rows, dtype=np.int64).reshape(len(nulls), len(looks)), axis=0
    )
