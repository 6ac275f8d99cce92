"""Certificates from both sides of Theorem 1: exact bounds, special cases, and an oracle in closed
form.
"""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from smoothadv.core import Smooth
from smoothadv.noise import GaussianNoise
from smoothadv.statistics import Smoothing
from smoothadv.statistics.bounds import (
    certified_radius,
    quantile_loss,
    radius_between,
    two_sided_radius,
)
from smoothadv.statistics.sequential import Sequential
from smoothadv.statistics.top_k import TopK
from smoothadv.statistics.two_sided import TwoSided
from support.exact_tails import DIGITS, normal_quantile, probability_of_at_most
from support.models import IntervalClassifier
from support.votes import ListedVotes, certify

ALPHA, SHARE = 1e-3, 0.9


def exact_bound(failures: int, trials: int, level: float) -> mpmath.mpf:
    """The q with P[Binomial(trials, q) <= failures] = level, by secants from float64's."""
    near = mpmath.mpf(stats.beta.isf(level, failures + 1, trials - failures))
    return mpmath.findroot(
        lambda q: probability_of_at_most(failures, trials, q) - level,
        (near, near * (1 - mpmath.mpf(1e-9))),
        tol=1e-25,
        verify=False,
    )


@settings(max_examples=60)
@given(st.integers(1, 3000), st.data(), st.floats(1e-6, 0.3), st.floats(0.05, 0.95))
def test_radius_is_that_of_exact_bounds_and_not_above_it(trials, data, alpha, share):
    successes = data.draw(st.integers(0, trials))
    rival = data.draw(st.integers(0, trials - successes))
    radius = two_sided_radius(successes, rival, trials, 1.0, alpha, share)
    with mpmath.workdps(DIGITS):
        if radius is None:
            return
        lower = 1 - exact_bound(trials - successes, trials, share * alpha)
        upper = exact_bound(rival, trials, (1 - share) * alpha)
        exact = (normal_quantile(lower) - normal_quantile(min(upper, 1 - lower))) / 2
        assert radius <= exact and radius == pytest.approx(float(exact), abs=1e-7)


@given(st.floats(-8, 8), st.floats(-8, 8), st.floats(0.05, 4))
def test_radius_between_quantiles_that_are_rounded_up_is_below_the_exact_one(
    z_lower, z_rival, sigma
):
    """Each may be off by 1e-15 of its size: a few units in the last place, more than SciPy's
    inverse is.

    Below 1e-300, where float64 has fewer digits, nothing is asked.
    """
    exact, size = (
        (Fraction(z_lower) + Fraction(z_rival)) / 2,
        (abs(Fraction(z_lower)) + abs(Fraction(z_rival))) / 2,
    )
    found = Fraction(radius_between(z_lower, z_rival, sigma, 0.0)) / Fraction(sigma)
    tiny = Fraction(1e-300)
    assert exact - size / 10**14 - tiny <= found <= exact - size / 10**15 + tiny


@given(
    st.integers(0, 500),
    st.integers(0, 500),
    st.floats(1e-6, 0.3),
    st.sampled_from([0.0, 1e-6, 0.01]),
)
def test_a_share_of_one_and_two_classes_are_the_one_sided_certificate(
    successes, others, alpha, distance
):
    trials = successes + others + 1
    alone = certified_radius(successes, trials, 0.5, alpha, distance)
    assert two_sided_radius(successes, others // 2, trials, 0.5, alpha, 1.0, distance) == alone
    of_two = two_sided_radius(successes, others + 1, trials, 0.5, alpha, SHARE, distance)
    assert of_two == certified_radius(successes, trials, 0.5, SHARE * alpha, distance)


@given(st.floats(-4, 4), st.floats(-4, 4), st.floats(1e-12, 0.02))
def test_a_noise_distance_leaves_a_difference_of_twice_itself(z_lower, z_rival, distance):
    loss = quantile_loss(z_lower, z_rival, distance)
    if loss < np.inf:
        middle = mpmath.mpf(z_lower - z_rival) / 2
        with mpmath.workdps(DIGITS):
            assert mpmath.ncdf(middle + loss) - mpmath.ncdf(middle - loss) >= 2 * mpmath.mpf(
                distance
            )
    assert two_sided_radius(700, 100, 1000, 1.0, ALPHA, SHARE, distance) < two_sided_radius(
        700, 100, 1000, 1.0, ALPHA, SHARE
    )


@pytest.mark.parametrize(
    ("kind", "setting", "alpha"),
    [
        *((TwoSided, {"alpha_share": share}, ALPHA) for share in (0.0, 1.0)),
        *((Sequential, {"alpha_share": share}, ALPHA) for share in (0.0, 1.0, 5e-324)),
        (TopK, {"top_k": 4}, 1e-322),  # a fourth of the rest of alpha is 0 in float64
    ],
)
def test_shares_of_alpha_that_leave_nothing_are_refused(kind, setting, alpha):
    with pytest.raises(ValueError, match="alpha_share"):
        kind(Smoothing(1.0, 1, 1, alpha), **setting)


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.4), (0.3, 1.6), (-0.2, 1.3), (1.4, 2.6)])
def test_slabs_whose_radius_theorem_1_gives_exactly(low, high):
    """Class 0 below ``low`` sigma, the rival above ``high``, thin classes between: the two are
    equal at the mean.
    """
    sigma, truth = 0.5, (low + high) / 2
    classifier = IntervalClassifier(*(sigma * np.linspace(low, high, 60)).tolist())
    stream = GaussianNoise(sigma, 1).stream(0, torch.device("cpu"))
    found = Smooth(classifier, 61, sigma).certificate(
        torch.zeros(1, 1, 1), 100, 100_000, ALPHA, 10_000, stream=stream, method="two-sided"
    )
    assert found.prediction == 0 and 0.9 * truth < found.radius / sigma < truth


@pytest.mark.parametrize(
    "make", [TwoSided, lambda smoothing: TopK(smoothing, top_k=2)], ids=["two-sided", "top-2"]
)
def test_distance_of_the_drawn_noise_from_a_gaussian_is_paid_for(make):
    votes = np.tile([2] * 8 + [1, 0], 101)
    found = [
        certify(make(Smoothing(0.5, 10, 1000, ALPHA, d)), ListedVotes(votes))
        for d in (0.0, 1e-3, 0.01)
    ]
    assert [one.prediction for one in found] == [2] * 3 and found[0].radius > found[
        1
    ].radius > found[2].radius > 0
