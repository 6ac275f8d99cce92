"""Tolerated false statements and intervals of a probability: against exact sums and 60-digit
arithmetic.
"""

import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from smoothadv.statistics.bounds import (
    binomial_interval,
    certified_accuracy_deduction,
    tolerated_false_statements,
)
from support.exact_tails import DIGITS, probability_of_at_most


def more_than(k: int, statements: int, probability: Fraction) -> Fraction:
    """P[Binomial(statements, probability) > k], exactly."""
    return sum(
        (
            math.comb(statements, i) * probability**i * (1 - probability) ** (statements - i)
            for i in range(k + 1, statements + 1)
        ),
        Fraction(0),
    )


@given(st.integers(0, 40), st.floats(0, 0.999), st.floats(1e-12, 1 - 1e-6))
@example(1, 0.002, 0.001)
@example(1, 0.001, 0.001)  # a tie, in floats
@example(40, 0.5, 0.5)
@example(3, 0.0, 1e-12)
@example(3, 5e-324, 1e-12)
@example(30, 0.999, 1e-12)
def test_tolerated_number_is_the_smallest_that_exact_tails_allow(
    statements, probability, false_alarm
):
    k = tolerated_false_statements(statements, probability, false_alarm)
    exact, level = Fraction(probability), Fraction(false_alarm)
    # Where a tail is within rounding of the level either neighbour will do.
    slack = 1 + Fraction(1, 10**9)
    assert more_than(k, statements, exact) <= level * slack
    assert k == 0 or more_than(k - 1, statements, exact) > level / slack
    assert 0 <= k <= statements


@settings(max_examples=40)
@given(st.integers(1000, 200_000), st.floats(1e-6, 0.05), st.floats(1e-9, 0.1))
@example(50_000, 0.002, 0.001)
@example(10_000, 0.002, 0.001)
@example(500, 0.002, 0.001)
def test_tolerated_number_of_many_statements_is_that_of_60_digits(
    statements, probability, false_alarm
):
    k = tolerated_false_statements(statements, probability, false_alarm)
    with mpmath.workdps(DIGITS):
        q = mpmath.mpf(probability)

        def tail(most: int) -> mpmath.mpf:
            return 1 - probability_of_at_most(most, statements, q)

        assert tail(k) <= false_alarm * (1 + 1e-9)
        assert k == 0 or tail(k - 1) > false_alarm * (1 - 1e-9)


@given(st.integers(1, 40), st.floats(1e-6, 0.5), st.floats(1e-9, 0.5))
def test_exact_deduction_is_the_smallest_share_that_exact_tails_allow(examples, alpha, rho):
    share = certified_accuracy_deduction(examples, alpha, rho, exact=True)
    false, slack = round(share * examples), 1 + Fraction(1, 10**9)
    assert (
        share == false / examples
        and more_than(false, examples, Fraction(alpha)) <= Fraction(rho) * slack
    )
    assert false == 0 or more_than(false - 1, examples, Fraction(alpha)) > Fraction(rho) / slack
    assert share <= certified_accuracy_deduction(examples, alpha, rho), (
        "Bernstein's inequality allows no less"
    )


@pytest.mark.parametrize("probability", [1.0, 1.4])
def test_statements_that_may_all_be_false_contradict_nothing(probability):
    assert [tolerated_false_statements(n, probability, 0.001) for n in (0, 1, 50)] == [0, 1, 50]


@st.composite
def counts(draw, largest: int = 5000) -> tuple[int, int]:
    trials = draw(st.integers(1, largest))
    return draw(st.integers(0, min(20, trials)) | st.integers(0, trials)), trials


@given(counts(10**6), st.floats(0.5, 0.9999))
def test_interval_is_that_of_scipy(count, confidence):
    expected = stats.binomtest(*count).proportion_ci(confidence, method="exact")
    assert binomial_interval(*count, confidence) == pytest.approx(
        (expected.low, expected.high), rel=1e-9, abs=1e-12
    )


def coverage(interval, trials: int, p: float) -> float:
    """P[p lies in the interval of X] over X ~ Binomial(trials, p), summed over all X."""
    masses = stats.binom.pmf(range(trials + 1), trials, p)
    inside = [low <= p <= high for low, high in (interval(k) for k in range(trials + 1))]
    return float(masses[inside].sum())


@pytest.mark.parametrize("trials", [1, 7, 40])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_interval_covers_every_probability_as_often_as_promised(trials, confidence):
    """No randomness: all outcomes are summed. Ends of intervals are where the coverage jumps."""
    intervals = [binomial_interval(k, trials, confidence) for k in range(trials + 1)]
    ends = [end for interval in intervals for end in interval]
    for p in [*(i / 97 for i in range(98)), *ends, *(math.nextafter(end, 0.5) for end in ends)]:
        assert coverage(intervals.__getitem__, trials, p) >= confidence - 1e-9, p


def test_usual_approximation_would_fail_the_test_of_coverage():
    """Negative control: the share plus or minus 1.96 standard errors."""

    def wald(k: int) -> tuple[float, float]:
        error = 1.96 * math.sqrt(k / 40 * (1 - k / 40) / 40)
        return k / 40 - error, k / 40 + error

    assert min(coverage(wald, 40, i / 97) for i in range(1, 97)) < 0.5
