"""Exact error-spending tables: how many successes reject "p <= t" at each of several looks, at level alpha in all.

Group-sequential testing with the error-spending function of Lan and DeMets (1983), computed for the binomial
distribution itself instead of its normal limit (compare Jennison and Turnbull, 2000, chapter 12). A row belongs to
one null hypothesis p <= t; it is crossed if at some look the successes so far reach the row's boundary there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

FIRST_LOOK, GROWTH, STEP, PUBLISHED_N = 100, 1.25, 50, 100_000
_TAIL, _SLACK = 1e-17, 1e-12
"""Tails below _TAIL are cut off; each look spends _SLACK beyond its computed probability, for those and rounding."""
_NEAR_ONE = 1e-9


@dataclass(frozen=True)
class Tables:
    """The boundaries that decide at run time, as integers; rows are null hypotheses p <= nulls[j].

    ``nulls`` float64 [J] ascending; ``looks`` int64 [K] ascending, the last one n_max; ``efficacy`` int64 [J, K]: at
    look k, row j is rejected by at least efficacy[j, k] successes of looks[k] draws; ``futility`` int64 [J, K]: with
    at most futility[j, k] successes a rejection of row j by the end is too unlikely to wait for (-1: never).
    """

    nulls: np.ndarray
    looks: np.ndarray
    efficacy: np.ndarray
    futility: np.ndarray


def spending(n: int, n_max: int, alpha: float, early: float) -> float:
    """The error that may be spent up to n draws: alpha (1 - w) ln(1 + n/100) / ln(1 + n_max/100), alpha at n_max.

    ``early`` is 1 - w, the share of alpha that is not kept for the last look.
    """
    if n >= n_max:
        return alpha
    return alpha * early * math.log1p(n / FIRST_LOOK) / math.log1p(n_max / FIRST_LOOK)


def look_schedule(
    nulls: Sequence[float], n_max: int, alpha: float, early: float, growth: float = GROWTH, step: int = STEP
) -> np.ndarray:
    """The numbers of draws at which to look: int64, ascending, ending with ``n_max``.

    A geometric sequence with the ratio ``growth`` > 1, rounded to multiples of ``step``; n = 100,000, where a
    fixed-sample procedure would decide; and, for each null t, the first multiple of ``step`` at which n successes out
    of n reject it: t^n <= spending(n).
    """
    special_looks = {
        first for t in nulls if (first := _first_all_success_look(t, n_max, alpha, early, step)) is not None
    } | ({PUBLISHED_N} if n_max > PUBLISHED_N else set())
    geometric = []
    n = float(FIRST_LOOK)
    while n < n_max / math.sqrt(growth):
        geometric.append(step * max(1, round(n / step)))
        n *= growth
    apart = 0.16 * (growth - 1)
    kept = {n for n in geometric if all(abs(n - other) > apart * other for other in special_looks)}
    return np.array(sorted(kept | special_looks | {n_max}), dtype=np.int64)


def _first_all_success_look(t: float, n_max: int, alpha: float, early: float, step: int) -> int | None:
    if t > 1 - _NEAR_ONE:
        return None
    # n ln t - ln spending(n) falls as n grows, so that bisection finds where it reaches 0.
    low, high = 1, math.ceil(n_max / step)
    while low < high:
        middle = (low + high) // 2
        if middle * step * math.log(t) <= math.log(spending(middle * step, n_max, alpha, early)):
            high = middle
        else:
            low = middle + 1
    return low * step if low * step < n_max else None


def efficacy_row(null: float, looks: np.ndarray, allowance: Sequence[float]) -> np.ndarray:
    """The smallest boundaries [K] that p = ``null`` crosses with probability at most ``allowance[k]`` by look k.

    The computation carries the distribution of the successes, on the paths that have crossed no boundary, from look to
    look. A boundary of looks[k] + 1 cannot be crossed.

    Formal guarantee: for every p <= ``null``, P[the boundaries are crossed] <= allowance[-1], since crossing is an
    increasing event.
    """
    row = np.empty(len(looks), dtype=np.int64)
    if null > 1 - _NEAR_ONE:
        return looks + 1
    alive, start, spent, before = np.ones(1), 0, 0.0, 0
    for k, n in enumerate(looks):
        alive, start = _add_draws(alive, start, int(n - before), null)
        tails = np.append(np.cumsum(alive[::-1])[::-1], 0.0)
        first = int(np.argmax(tails <= allowance[k] - spent - _SLACK))
        if tails[first] > allowance[k] - spent - _SLACK:  # too little error is left for any boundary
            row[k] = n + 1
        else:
            row[k] = min(start + first, n + 1)
            spent += tails[first] + _SLACK
        alive = alive[: row[k] - start]
        before = n
        if not len(alive):
            row[k + 1 :] = row[k] + (looks[k + 1 :] - n)
            break
    return row


def _add_draws(alive: np.ndarray, start: int, draws: int, p: float) -> tuple[np.ndarray, int]:
    """The distribution of a count after ``draws`` more draws with success probability ``p``, and where it starts."""
    from scipy import signal, stats  # take a second to load

    low = int(stats.binom.ppf(_TAIL, draws, p))
    high = int(stats.binom.isf(_TAIL, draws, p))
    more = stats.binom.pmf(np.arange(low, high + 1), draws, p)
    return np.maximum(signal.convolve(alive, more), 0.0), start + low


def futility_row(last_boundary: int, looks: np.ndarray, gamma: float) -> np.ndarray:
    """For each look, the most successes with which the last boundary is out of reach even if p is its upper bound.

    The largest s with s + (n_max - n) U(s, n) < last_boundary, U the Clopper-Pearson upper bound at level ``gamma``;
    -1 where there is none. This spends no error: giving up early only loses certificates.
    """
    row = np.empty(len(looks), dtype=np.int64)
    for k, n in enumerate(looks):
        low, high = -1, int(n)
        while low < high:
            middle = (low + high + 1) // 2
            if middle + (looks[-1] - n) * success_upper_bound(middle, int(n), gamma) < last_boundary:
                low = middle
            else:
                high = middle - 1
        row[k] = low
    return row


def worthless_row(
    last_boundary: int, looks: np.ndarray, null: float, patience: float, power: float = 1.0, tilt: float = 0.0
) -> np.ndarray:
    """For each look, the most successes with which the last boundary is too improbable to be worth the draws.

    The largest s whose ``reach_probability`` is below (v / ``patience``)^``power`` (4 t (1 - t))^``tilt``, at most
    0.9, where v = n (1 - n / n_max) and t = ``null``; -1 where there is none. ``patience`` is a number of draws: with
    n of them behind, a decision that is still open takes about as many again, and at most the n_max - n that are left.
    Like ``futility_row``, this spends no error.
    """
    n_max = int(looks[-1])
    threshold = (looks * (1 - looks / n_max) / patience) ** power * (4 * null * (1 - null)) ** tilt
    low, high = np.full(len(looks), -1), np.minimum(looks, last_boundary - 1)
    while (low < high).any():
        middle = (low + high + 1) // 2
        worthless = reach_probability(middle, looks, n_max, last_boundary) < np.minimum(threshold, 0.9)
        low, high = np.where(worthless, middle, low), np.where(worthless, high, middle - 1)
    return np.append(low[:-1], min(n_max, last_boundary - 1))


def reach_probability(successes: np.ndarray, n: np.ndarray, n_max: int, boundary: int) -> np.ndarray:
    """About the probability that ``boundary`` successes of ``n_max`` are reached, after ``successes`` of ``n`` draws.

    float64 of the arguments' shape. It is the probability that p exceeds the share of successes which the other draws
    need (with half a success less, for continuity), where p has a beta distribution with the counts ``successes`` + 1
    and n - ``successes``, both reduced by the factor 1 - n / n_max: this widens it by the chance of those draws.
    """
    left = 1 - n / n_max
    needed = np.clip((boundary - successes - 0.5) / np.maximum(n_max - n, 1), 0.0, 1.0)
    misses = np.maximum(left * (n - successes), 1e-9)
    return np.where(successes >= boundary, 1.0, special.betaincc(left * successes + 1, misses, needed))


def success_upper_bound(successes: int, trials: int, gamma: float) -> float:
    """One-sided Clopper-Pearson upper bound on a binomial probability, at level ``gamma``."""
    return 1.0 if successes == trials else float(special.betainccinv(successes + 1, trials - successes, gamma))


def build_tables(
    nulls: Sequence[float], looks: np.ndarray, alpha: float, early: float = 0.5, gamma: float = 0.01
) -> Tables:
    """The tables of ascending ``nulls`` at ``looks``; n_max is the last look.

    A boundary is raised to those of the smaller nulls, so that rejections are nested: rejecting p <= t rejects every
    smaller t. Raising boundaries can only lower a row's level.
    """
    n_max = int(looks[-1])
    allowance = [spending(int(n), n_max, alpha, early) for n in looks]
    rows = [efficacy_row(t, looks, allowance) for t in nulls]
    efficacy = np.maximum.accumulate(np.array(rows, dtype=np.int64).reshape(len(rows), len(looks)), axis=0)
    futility = [futility_row(int(row[-1]), looks, gamma) for row in efficacy]
    return Tables(np.array(nulls, dtype=np.float64), looks, efficacy, np.array(futility, dtype=np.int64))
