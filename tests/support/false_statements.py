"""How often certificates are false: exactly, by sums over all counts of three classes."""

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import pytest
from scipy import signal, special, stats

from smoothadv.statistics.on_grid import GridProcedure
from smoothadv.statistics.two_sided import TwoSided


def quantile(p: float) -> float:
    return float(special.ndtri(p))


def two_sided_edges(radius: float, sigma: float) -> list[list[float]]:
    """Probabilities of three classes that allow just this radius for the first one."""
    p = float(special.ndtr(radius / sigma))
    other = float(special.ndtr(quantile(0.45) - 2 * radius / sigma))
    return [[p, 1 - p, 0.0], [0.45, other, 0.55 - other]]


def claims(
    looks: Iterable[int], certified: Callable[[np.ndarray, int], float]
) -> list[tuple[int, np.ndarray]]:
    """For each number of draws at which a bound looks, the radii that all counts of three classes
    certify for the first one, whichever of the others has more: ``certified`` gives that of votes
    [3] at the look of this number.
    """
    found = []
    for look, n in enumerate(looks):
        radii = np.full((n + 1, n + 1), -1.0)
        for own in range(n + 1):
            for rival in range((n - own) // 2 + 1):
                votes = [own, rival, n - own - rival]
                radii[own, votes[1:]] = certified(np.array(votes), look)
        found.append((n, radii))
    return found


def claims_of(bound: TwoSided | GridProcedure, weakest: bool = False) -> list:
    """``claims`` of a bound of a certificate, by the strongest rival, or by the ``weakest``."""
    if isinstance(bound, GridProcedure):
        return claims(
            bound.looks.tolist(),
            lambda votes, look: bound.certified(*bound.counted(votes, 0), look),
        )
    n, rival, certified_by = bound.smoothing.n, min if weakest else max, cache(bound.certified_by)
    return claims([n], lambda votes, look: certified_by(int(votes[0]), int(rival(votes[1:])), n))


def exactly_false(
    claims: list[tuple[int, np.ndarray]], p: list[float], theorem_says: float
) -> float:
    """The probability that a radius is certified, at some look, that is above the theorem's: all
    counts are followed from look to look.
    """
    alive, before, wrong = np.ones((1, 1)), 0, 0.0
    for n, radii in claims:
        own, rival = np.meshgrid(*[np.arange(n - before + 1)] * 2, indexing="ij")
        counts = np.stack([own, rival, n - before - own - rival], axis=-1)
        more = np.where(
            counts[..., 2] >= 0, stats.multinomial.pmf(np.maximum(counts, 0), n - before, p), 0.0
        )
        alive, before = signal.convolve2d(alive, more), n
        false = (radii >= 0) & (radii > theorem_says + 1e-12)
        wrong += float(alive[false].sum())
        alive = np.where(false, 0.0, alive)
    assert wrong + alive.sum() == pytest.approx(1, abs=1e-9)
    return wrong
