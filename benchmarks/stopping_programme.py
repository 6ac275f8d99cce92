"""Backward induction: the least mean cost of a rule that looks at successes at given draws, and its
futility.

``stopping_limit.py`` uses it for the rules and the limits that its docstring lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from adaptive_savings import ALPHA, Population
from scipy import signal, special, stats

ATOM, REACH = 0.003, 5.0
FEW_DRAWS = 2000
"""Beyond these, states with a row crossed that is two above p are left out."""
NEGLIGIBLE = 1e-2
"""Draws: a rejection whose priced error is below this is not put off, which may raise a limit by as
much per radius.
"""


@dataclass(frozen=True)
class Prior:
    """Atoms of p_A [A], their probabilities [A], and the share of each whose class is right [A]."""

    p: np.ndarray
    weight: np.ndarray
    right: np.ndarray


def prior_of(populations: list[Population], spacing: float = ATOM) -> Prior:
    """The distribution of p_A over the inputs, in bins of equal width of arcsin(sqrt(p)); an atom
    is a bin's mean.
    """
    p = np.concatenate([population.p for population in populations])
    right = np.concatenate([population.right for population in populations])
    bins = np.floor((math.pi / 2 - np.arcsin(np.sqrt(p))) / spacing).astype(int)
    _, inside, number = np.unique(bins, return_inverse=True, return_counts=True)
    return Prior(
        np.bincount(inside, p) / number, number / len(p), np.bincount(inside, right) / number
    )


class Programme:
    """Backward induction over the states (draws, successes, highest row crossed) at ``looks``.

    ``price`` [J] draws are paid for each right input whose row j is not crossed. Rows are crossed
    at the boundaries ``efficacy`` [J, K]; without these, whenever it pays, at ``penalty`` [J] draws
    times the probability under null j. ``value`` is the smallest mean of the draws less the price
    of what is certified; ``futility`` [J, K] are the largest counts that stop. Counts further than
    ``REACH`` standard deviations from all atoms are left out.
    """

    def __init__(
        self,
        nulls: np.ndarray,
        looks: np.ndarray,
        prior: Prior,
        price: np.ndarray,
        efficacy: np.ndarray | None = None,
        penalty: np.ndarray | None = None,
    ) -> None:
        self.nulls, self.looks, self.prior, self.price = nulls, looks, prior, price
        self.efficacy, self.penalty = efficacy, np.zeros(len(nulls)) if penalty is None else penalty
        self.rows = (
            int((nulls < 1 - 1e-9).sum())
            if efficacy is None
            else int((efficacy[:, -1] <= looks[-1]).sum())
        )
        self.futility = np.full((len(nulls), len(looks)), -1, dtype=np.int64)
        self.futility[:, -1] = looks[-1]
        after = None
        for k in reversed(range(len(looks))):
            after = self._values(k, after)
        self.value = float(
            sum(
                w * (looks[0] + binomial(int(looks[0]), p, np.arange(looks[0] + 1)) @ after[0])
                for p, w in zip(prior.p, prior.weight)
            )
        )

    def _values(self, k: int, after: np.ndarray | None) -> np.ndarray:
        """The smallest mean cost [rows + 1, n + 1] from look ``k`` on, before its crossings, by
        rows crossed so far.
        """
        n = int(self.looks[k])
        windows = [reach_of(n, p) for p in self.prior.p]
        density = [
            w * binomial(n, p, s) for p, w, s in zip(self.prior.p, self.prior.weight, windows)
        ]
        mass, right = np.zeros(n + 1), np.zeros(n + 1)
        for s, f, share in zip(windows, density, self.prior.right):
            mass[s] += f
            right[s] += f * share
        right /= np.maximum(mass, 1e-300)
        error, sure = self._errors(n, k, mass)
        go_on = np.zeros((self.rows + 1, n + 1))
        if after is not None:
            go_on[: self.rows] = self._go_on(k, after, windows, density, sure)
        values = np.minimum(go_on, 0.0)
        for row in reversed(range(self.rows)):
            rejected = values[row + 1] - self.price[row] * right + error[row]
            must = sure > row
            values[row] = np.where(must, rejected, np.minimum(values[row], rejected))
            stops = np.flatnonzero((go_on[row] >= 0) & (mass > 0) & ~must)
            if after is not None and len(stops):
                self.futility[row, k] = stops[-1]
        return values

    def _errors(self, n: int, k: int, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The priced error [rows, n + 1] of a rejection, infinite where it is not allowed; how many
        rows are sure to be rejected [n + 1]."""
        counts = np.arange(n + 1)
        if self.efficacy is not None:
            allowed = counts >= self.efficacy[: self.rows, k, None]
            return np.where(allowed, 0.0, np.inf), allowed.sum(axis=0)
        ratio = [binomial(n, t, counts) / np.maximum(mass, 1e-300) for t in self.nulls[: self.rows]]
        error = np.where(mass > 0, self.penalty[: self.rows, None] * np.array(ratio), np.inf)
        above = counts > stats.binom.isf(ALPHA, n, self.nulls[: self.rows])[:, None]
        error = np.where(above, error, np.inf)
        return error, np.logical_and.accumulate(above & (error < NEGLIGIBLE), axis=0).sum(axis=0)

    def _go_on(
        self,
        k: int,
        after: np.ndarray,
        windows: list[slice],
        density: list[np.ndarray],
        sure: np.ndarray,
    ) -> np.ndarray:
        """The mean cost [rows, n + 1] of drawing up to the next look."""
        n, more = int(self.looks[k]), int(self.looks[k + 1] - self.looks[k])
        cost, mass = np.zeros((self.rows, n + 1)), np.zeros((self.rows, n + 1))
        for p, s, f in zip(self.prior.p, windows, density):
            first = min(int(sure[s].min()), self.rows - 1)
            # Where the counts tell p well, hardly anybody gets two rows too far.
            highest = int(np.searchsorted(self.nulls, p)) + 1 if n > FEW_DRAWS else self.rows
            last = max(first, min(highest, self.rows - 1))
            added = reach_of(more, p)
            ahead = after[first : last + 1, s.start + added.start : s.stop + added.stop - 1]
            mean = correlate(ahead, binomial(more, p, added))
            cost[first : last + 1, s] += f * (more + mean)
            mass[first : last + 1, s] += f
        return np.where(mass > 0, cost / np.maximum(mass, 1e-300), 0.0)


def reach_of(n: int, p: float) -> slice:
    """The counts of ``n`` draws that are probable under ``p``."""
    middle, width = n * p, REACH * math.sqrt(n * p * (1 - p)) + 10
    return slice(max(0, math.floor(middle - width)), min(n, math.ceil(middle + width)) + 1)


def binomial(n: int, p: float, counts: slice | np.ndarray) -> np.ndarray:
    """Binomial probabilities."""
    s = np.arange(counts.start, counts.stop) if isinstance(counts, slice) else counts
    ways = special.gammaln(n + 1) - special.gammaln(s + 1) - special.gammaln(n - s + 1)
    return np.exp(ways + special.xlogy(s, p) + special.xlog1py(n - s, -p))


def correlate(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sums over d of weights[d] values[:, s + d], for each s that has all of them."""
    if len(weights) < 40:
        return np.array([np.correlate(row, weights, "valid") for row in values])
    return signal.oaconvolve(values, weights[None, ::-1], mode="valid", axes=1)
