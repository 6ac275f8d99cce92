"""The benchmark of stopping rules: its bounds against closed forms, its programme against a search
of all histories.
"""

import importlib
import math
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from support.commands import CODE
from support.crossing import crossing_probability


@pytest.fixture
def limit(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CODE.parent / "benchmarks"))
    return importlib.import_module("stopping_limit")


def test_walds_bound_is_that_of_the_highest_radius_within_reach(limit):
    p = stats.norm.cdf(np.array([-0.1, 0.01, 0.3, 0.6, 9.0]))
    bound, row = limit.wald_bound(p, sigma=1.0)
    assert row.tolist() == [-1, -1, 1, 2, 9]
    t = stats.norm.cdf([0.25, 0.5, 2.25])
    divergence = p[2:] * np.log(p[2:] / t) + (1 - p[2:]) * np.log(
        np.maximum(1 - p[2:], 1e-300) / (1 - t)
    )
    assert bound == pytest.approx([0, 0, *(math.log(1000) / divergence)], rel=1e-9)


@pytest.mark.parametrize("rules", ["plan_tables", "mixture_tables"])
def test_boundaries_keep_the_level(limit, rules):
    tables = getattr(limit, rules)(np.array([0.5, 0.9]))
    levels = [
        crossing_probability(t, tables.looks, row) for t, row in zip(tables.nulls, tables.efficacy)
    ]
    assert 1e-4 < min(levels) <= max(levels) <= 1e-3


@pytest.mark.parametrize("free", [False, True])
def test_programme_finds_what_a_search_over_histories_finds(limit, free):
    looks, nulls, price = np.array([4, 9, 13]), np.array([0.3, 0.5]), np.array([60.0, 90.0])
    prior = limit.Prior(
        np.array([0.2, 0.55, 0.95]), np.array([0.3, 0.3, 0.4]), np.array([0.5, 0.9, 1.0])
    )
    efficacy, penalty = np.array([[5, 8, 10], [5, 9, 12]]), np.array([40.0, 3000.0])
    critical = stats.binom.isf(1e-3, looks, nulls[:, None]) + 1

    def best(history: tuple[int, ...], level: int) -> float:
        """The least cost from here on, times the probability of these successes between looks."""
        drawn = np.diff(looks[: len(history)], prepend=0)
        chance, at_nulls = (
            stats.binom.pmf(history, drawn, p[:, None]).prod(1) for p in (prior.p, nulls)
        )
        k, successes = len(history) - 1, sum(history)
        going_on = 0.0
        if k < len(looks) - 1:
            more = int(looks[k + 1] - looks[k])
            going_on = min(
                0.0,
                more * float(chance @ prior.weight)
                + sum(best((*history, s), level) for s in range(more + 1)),
            )
        if level == len(nulls):
            return 0.0
        paid = (penalty * at_nulls)[level] if free else 0.0
        higher = paid - price[level] * float(chance @ (prior.weight * prior.right))
        if successes < (critical if free else efficacy)[level, k]:
            return going_on
        higher += best(history, level + 1)
        return min(going_on, higher) if free else higher

    programme = limit.Programme(nulls, looks, prior, price, None if free else efficacy, penalty)
    expected = float(looks[0]) + sum(best((s,), 0) for s in range(looks[0] + 1))
    assert expected < -5
    assert programme.value == pytest.approx(expected, abs=0.02)
