"""Error-spending tables: against whole-number path counts, plain convolutions, the union bound and
published values.

The oracles here know nothing of the package: a path count is a whole number, a level an exact
fraction, and where the numbers are too large for that, a sum of float64 products.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from smoothadv.statistics.bounds import radius_probability
from smoothadv.statistics.error_spending import (
    efficacy_row,
    efficacy_table,
    futility_probability,
    futility_table,
    look_schedule,
    predictive_quantile,
    spending,
    success_upper_bound,
)
from support.crossing import crossing_probability

RADII = [0.25 * step for step in range(10)]
SIGMAS = [0.12, 0.25, 0.5, 1.0]
N_MAX = 125_000
SLACK = Fraction(1, 10**12)  # what the tables may leave unspent at each look


class Tables(NamedTuple):
    nulls: np.ndarray
    looks: np.ndarray
    efficacy: np.ndarray


def build_tables(
    nulls: list[float], looks: np.ndarray, alpha: float = 1e-3, early: float = 0.5
) -> Tables:
    return Tables(np.array(nulls), looks, efficacy_table(nulls, looks, alpha, early))


def paper_tables(sigma: float, alpha: float = 1e-3, between: int = 0) -> Tables:
    """The tables for the paper's radii, with ``between`` additional rows between neighbours that
    decide nothing.
    """
    decisions = [radius_probability(radius, sigma) for radius in RADII]
    steps = (len(RADII) - 1) * (between + 1)
    rows = [radius_probability(RADII[-1] * step / steps, sigma) for step in range(steps + 1)]
    return build_tables(rows, look_schedule(decisions, N_MAX, alpha, 0.5), alpha)


@pytest.fixture(scope="module")
def tables() -> dict[float, Tables]:
    return {sigma: paper_tables(sigma) for sigma in SIGMAS}


def exact_spending(t: Fraction, looks: Sequence[int], row: Sequence[int]) -> list[Fraction]:
    """P[the row is crossed by look k] for each k, from the number of ways to reach each count
    uncrossed.
    """
    ways, spent, crossed, before = [1], [], Fraction(0), 0
    for n, boundary in zip(looks, row):
        draws = n - before
        added = [0] * (n + 1)
        for successes, paths in enumerate(ways):
            for more in range(draws + 1):
                added[successes + more] += paths * math.comb(draws, more)
        crossed += sum(added[s] * t**s * (1 - t) ** (n - s) for s in range(max(0, boundary), n + 1))
        spent.append(crossed)
        ways = [0 if s >= boundary else paths for s, paths in enumerate(added)]
        before = n
    return spent


def worst_level(table: Tables) -> float:
    return max(
        crossing_probability(t, table.looks, row) for t, row in zip(table.nulls, table.efficacy)
    )


def test_vector_of_three_looks_in_fractions_and_with_one_boundary_lowered():
    looks, allowance = np.array([10, 20, 40]), [3e-4, 6e-4, 1e-3]
    row = efficacy_row(0.5, looks, allowance)
    assert row.tolist() == [11, 18, 31]
    assert exact_spending(Fraction(1, 2), looks.tolist(), row.tolist())[-1] == Fraction(
        281454015, 549755813888
    )
    assert crossing_probability(0.5, looks, row) == pytest.approx(
        281454015 / 549755813888, rel=1e-13
    )
    assert float(exact_spending(Fraction(1, 2), [10, 20, 40], [11, 18, 30])[-1]) == pytest.approx(
        1.258e-3, abs=5e-7
    )


def test_tables_at_sigma_one_half_have_their_published_entries_and_level(tables):
    looks, (row_0, row_175) = tables[0.5].looks, tables[0.5].efficacy[[0, 7]]
    assert len(looks) == 34 and {6050, 33550} <= set(looks.tolist()) and looks[-1] == N_MAX
    assert (
        row_175[looks == 33550] == 33550 and (row_175[looks < 33550] > looks[looks < 33550]).all()
    )
    assert (row_175[-1], row_0[-1], futility_table(row_0[-1:], looks, 0.01)[0, -1]) == (
        124988,
        63077,
        63076,
    )
    assert worst_level(tables[0.5]) == pytest.approx(0.00099871692618, abs=1e-12)


@pytest.mark.parametrize(
    ("sigma", "alpha", "between"),
    [
        *((sigma, 1e-3, 0) for sigma in SIGMAS),
        (0.5, 1e-6, 0),
        pytest.param(0.5, 1e-3, 9, marks=pytest.mark.slow),
        pytest.param(1.0, 1e-6, 9, marks=pytest.mark.slow),
    ],
)
def test_every_row_keeps_the_level_by_direct_convolution(sigma, alpha, between):
    level = worst_level(paper_tables(sigma, alpha, between))
    assert level <= alpha and (between or level > {1e-3: 0.99, 1e-6: 0.9}[alpha] * alpha)


@st.composite
def designs(draw) -> tuple[np.ndarray, list[float]]:
    """Looks up to 60 draws and an allowance at each, ascending."""
    looks = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True).map(sorted))
    levels = st.floats(1e-6, 0.9) if draw(st.booleans()) else st.floats(1e-9, 1e-2)
    allowance = draw(st.lists(levels, min_size=len(looks), max_size=len(looks)).map(sorted))
    return np.array(looks), allowance


nulls = st.floats(0.01, 0.999) | st.floats(0.5, 0.7)


@given(designs(), nulls)
def test_rounding_cannot_overspend_an_allowance_that_a_row_exceeds_by_less(design, t):
    """Each allowance is the float below what is spent by then, or more by the reserve of one look
    and a half.
    """
    looks, allowance = design
    spent = exact_spending(Fraction(t), looks.tolist(), efficacy_row(t, looks, allowance).tolist())
    for more in (0, SLACK * 3 / 2):
        tight = [math.nextafter(float(s + more), 0) for s in spent]
        row = efficacy_row(t, looks, tight)
        reserved = [int(reachable) * SLACK * 999 / 1000 for reachable in np.cumsum(row <= looks)]
        found = exact_spending(Fraction(t), looks.tolist(), row.tolist())
        assert all(s <= Fraction(a) - reserve for s, a, reserve in zip(found, tight, reserved))


@given(designs(), nulls)
def test_every_boundary_is_the_smallest_that_keeps_the_allowance(design, t):
    looks, allowance = design
    row = efficacy_row(t, looks, allowance).tolist()
    kept = exact_spending(Fraction(t), looks.tolist(), row)
    assert all(s <= Fraction(a) for s, a in zip(kept, allowance))
    assert crossing_probability(t, looks, row) == pytest.approx(
        float(kept[-1]), rel=1e-9, abs=1e-14
    )
    for k in range(len(looks)):
        spent = exact_spending(Fraction(t), looks[: k + 1].tolist(), [*row[:k], row[k] - 1])[-1]
        assert spent > Fraction(allowance[k]) - (k + 2) * SLACK


@settings(max_examples=40)
@given(
    designs(),
    st.lists(nulls, min_size=1, max_size=5).map(sorted),
    st.floats(1e-6, 0.5),
    st.floats(0.1, 0.9),
)
def test_rejections_are_nested_and_raising_boundaries_keeps_the_level(
    design, ascending, alpha, early
):
    looks = design[0]
    tables = build_tables(ascending, looks, alpha, early)
    allowance = [spending(n, looks[-1], alpha, early) for n in looks.tolist()]
    assert tables.efficacy.shape == (len(ascending), len(looks))
    futility = futility_table(tables.efficacy[:, -1], looks, 0.01)
    assert (np.diff(tables.efficacy, axis=0) >= 0).all() and (np.diff(futility, axis=0) >= 0).all()
    for t, raised in zip(ascending, tables.efficacy):
        assert (raised >= efficacy_row(t, looks, allowance)).all()
        assert exact_spending(Fraction(t), looks.tolist(), raised.tolist())[-1] <= Fraction(alpha)


def test_a_row_that_spends_later_than_that_of_a_smaller_null_is_raised():
    looks, alpha, early, nulls = np.array([29, 42]), 1.0555e-4, 0.60554, [0.70741, 0.71103]
    allowance = [spending(n, 42, alpha, early) for n in looks.tolist()]
    assert [efficacy_row(t, looks, allowance).tolist() for t in nulls] == [[29, 41], [30, 40]]
    assert build_tables(nulls, looks, alpha, early).efficacy.tolist() == [[29, 41], [30, 41]]


@pytest.mark.parametrize("t", [1.0, 1 - 1e-10, math.nextafter(1, 0)])
def test_a_null_next_to_one_is_never_rejected(t):
    looks = np.array([100, 10**6, 10**11])
    assert (efficacy_row(t, looks, [0.1, 0.2, 0.3]) == looks + 1).all()
    tables = build_tables([0.5, t], look_schedule([0.5, t], 1000, 1e-3, 0.5), 1e-3)
    assert (tables.efficacy[1] > tables.looks).all() and (tables.efficacy[0] <= tables.looks).any()


def beta_upper_bound(successes: int, trials: int, gamma: float) -> float:
    return (
        1.0 if successes == trials else stats.beta.ppf(1 - gamma, successes + 1, trials - successes)
    )


@settings(max_examples=40)
@given(designs(), st.integers(0, 61), st.floats(1e-3, 0.3))
def test_futility_is_the_largest_count_that_cannot_catch_up(design, last_boundary, gamma):
    looks = design[0]
    for n, bound in zip(
        looks.tolist(), futility_table(np.array([last_boundary]), looks, gamma)[0].tolist()
    ):
        reach = [s + (looks[-1] - n) * beta_upper_bound(s, n, gamma) for s in range(n + 1)]
        hopeless = [s for s, end in enumerate(reach) if end < last_boundary]
        ambiguous = any(abs(end - last_boundary) < 1e-7 for end in reach) and n < looks[-1]
        assert ambiguous or bound == max(hopeless, default=-1)


@given(st.integers(1, 200), st.integers(0, 200), st.floats(1e-6, 0.5))
def test_success_bound_covers_with_its_level(trials, successes, gamma):
    successes = min(successes, trials)
    upper = success_upper_bound(successes, trials, gamma)
    assert successes / trials < upper <= 1 or successes == trials
    assert stats.binom.cdf(successes, trials, upper) == pytest.approx(
        1.0 if upper == 1 else gamma, rel=1e-6
    )


@given(
    st.integers(1, 10**6),
    st.floats(1e-9, 0.5),
    st.floats(0.01, 0.99),
    st.lists(st.integers(1, 10**6), min_size=2),
)
def test_spending_grows_and_ends_at_alpha(n_max, alpha, early, numbers):
    spent = [spending(n, n_max, alpha, early) for n in sorted({*numbers, n_max})]
    assert all(0 < a <= alpha for a in spent)
    assert all(a < b or a == b == alpha for a, b in zip(spent, spent[1:]))
    assert spending(n_max, n_max, alpha, early) == alpha
    assert n_max == 1 or spending(n_max - 1, n_max, alpha, early) <= alpha * early


def test_spending_is_the_documented_logarithm():
    assert spending(6050, N_MAX, 1e-3, 0.5) == pytest.approx(
        5e-4 * math.log(61.5) / math.log(1251), rel=1e-14
    )


@given(
    st.lists(st.floats(0.5, 1), max_size=6),
    st.integers(1, 300_000),
    st.floats(1e-9, 0.4),
    st.floats(0.1, 0.9),
    st.sampled_from([(1.25, 50), (1.05, 10)]),
)
@example([], 159, 0.25, 0.5, (1.05, 10))  # 155, rounded to tens, is beyond it
def test_looks_ascend_and_end_with_the_last_draw(nulls, n_max, alpha, early, fineness):
    growth, step = fineness
    looks = look_schedule(nulls, n_max, alpha, early, growth, step)
    assert (
        looks.dtype == np.int64
        and looks[0] >= 1
        and looks[-1] == n_max
        and (np.diff(looks) > 0).all()
    )
    assert (looks[:-1] % step == 0).all() and (
        looks[1:] - looks[:-1] <= looks[:-1] * (growth**2 - 1) + 100
    ).all()
    assert n_max <= 100_000 or 100_000 in looks


@settings(max_examples=20)
@given(st.floats(0.5, 0.99999), st.floats(1e-9, 0.4))
def test_first_look_that_an_unbroken_run_can_pass_is_among_them(t, alpha):
    looks = look_schedule([t], N_MAX, alpha, 0.5)
    passing = [
        n
        for n in range(50, N_MAX, 50)
        if n * math.log(t) <= math.log(spending(n, N_MAX, alpha, 0.5))
    ]
    assert not passing or passing[0] in looks


@pytest.mark.parametrize("n_max", [1, 2, 49, 50, 51, 99, 100, 101, 112, 150, 1000])
def test_small_numbers_of_draws_work(n_max):
    tables = build_tables([0.5, 0.8], look_schedule([0.5, 0.8], n_max, 1e-3, 0.5), 1e-3)
    assert tables.looks[-1] == n_max and worst_level(tables) <= 1e-3
    # A tail of probability alpha or less exists from 10 draws on.
    assert bool((tables.efficacy[0] <= tables.looks).any()) == (n_max >= 10)


def test_predictive_quantile_is_near_the_beta_binomial_quantile():
    n_max = 20_000
    for n, share in ((500, 0.51), (5000, 0.85), (15_000, 0.95), (19_000, 0.995)):
        for probability in (0.001, 0.1, 0.5, 0.9):
            successes = round(share * n)
            left = stats.betabinom(n_max - n, successes + 0.5, n - successes + 0.5)
            reached = predictive_quantile(successes, n, n_max, probability) - successes
            assert left.sf(reached) == pytest.approx(probability, abs=0.06)
    assert (
        predictive_quantile(10, 10, 10, 0.5) == 10.5
        and predictive_quantile(100, 100, 200, 0.01) > 199
    )


def test_draws_are_worth_more_the_more_of_them_a_decision_may_cost():
    prices = [
        futility_probability(n, 1000, 0.5, 400, 1.25, 0.2)
        for n in (10, 100, 300, 500, 700, 990, 1000)
    ]
    assert prices == sorted(prices[:4]) + sorted(prices[4:], reverse=True) and prices[-1] == 0
    assert prices[3] == pytest.approx((250 / 400) ** 1.25)
    assert futility_probability(500, 1000, 0.999, 400, 1.25, 0.2) < prices[3]
    assert futility_probability(500, 1000, 0.5, 1, 1.25, 0.2) == 0.9
