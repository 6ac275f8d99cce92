"""Certificates from both sides of Theorem 1: oracles in closed form, and how often they are false.

A run is false if it certifies a radius above sigma / 2 (Phi^-1(p_A) - Phi^-1(p_B)), p_B the largest
probability of another class. Every check on random outcomes rejects a correct procedure with
probability at most 1e-6 (``FALSE_ALARM``), and is shown to reject a wrong one.
"""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from smoothadv.core import Smooth
from smoothadv.noise import GaussianNoise
from smoothadv.statistics import Smoothing
from smoothadv.statistics.bounds import (
    _quantile_below,
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
from support.statistical_checks import too_many
from support.votes import ListedVotes, certify

ALPHA, SHARE = 1e-3, 0.9
many = settings(deadline=None, derandomize=True, max_examples=200)
HARD = {
    "a hair above the rival": [0.4, 0.4, 0.2],
    "a hair, more mass on both": [0.45, 0.45, 0.1],
    "three equal": [1 / 3] * 3,
    "two equal classes": [0.5, 0.5],
    "all mass on one rival": [0.6, 0.4],
    "two classes, nearly certain": [0.999, 0.001],
    "ten equal": [0.1] * 10,
    "nearly certain, ten classes": [0.999] + [0.001 / 9] * 9,
    "below one half": [0.3] + [0.1] * 7,
    "below one half, one rival": [0.45, 0.3] + [0.25 / 8] * 8,
    "certain": [0.99999, 0.00001],
}


def false_claims(p: list[float], n: int, runs: int, rule=None, alpha: float = ALPHA) -> int:
    """Runs in which class 0 gets a radius (sigma = 1) that is too large."""
    votes = np.random.default_rng(len(p)).multinomial(n, p, runs)
    truth = (special.ndtri(p[0]) - special.ndtri(max(p[1:]))) / 2
    return int(((rule or both_bounds)(votes, n, alpha) > truth).sum())


def both_bounds(votes: np.ndarray, n: int, alpha: float) -> np.ndarray:
    """``two_sided_radius`` of many counts; -inf for an abstention."""
    lower = quantiles(votes[:, 0], n, SHARE * alpha)
    rival = quantiles(n - votes[:, 1:].max(axis=1), n, (1 - SHARE) * alpha)
    radii = (lower + np.maximum(lower, rival)) / 2
    return np.where(radii >= 0, radii, -np.inf)


def quantiles(successes: np.ndarray, n: int, level: float) -> np.ndarray:
    found, places = np.unique(successes, return_inverse=True)
    return np.array([_quantile_below(int(k), n, level, 0.0) for k in found])[places]


def test_the_simulated_rule_is_the_procedure():
    for p in HARD.values():
        for votes in np.random.default_rng(0).multinomial(1000, p, 30):
            radius = two_sided_radius(int(votes[0]), int(votes[1:].max()), 1000, 1.0, ALPHA, SHARE)
            (simulated,) = both_bounds(votes[None], 1000, ALPHA)
            assert simulated == pytest.approx(-np.inf if radius is None else radius, abs=1e-12)


@pytest.mark.parametrize("n", [100, 10_000])
@pytest.mark.parametrize("name", HARD)
def test_false_claims_are_no_more_frequent_than_alpha(name, n):
    assert not too_many(false_claims(HARD[name], n, 200_000), 200_000, ALPHA)


def test_the_check_rejects_wrong_rules():
    def swapped(votes, n, alpha):
        """The upper bound on p_A, and the lower ones on the rivals."""
        upper = -quantiles(n - votes[:, 0], n, SHARE * alpha)
        return (upper - quantiles(votes[:, 1:].max(axis=1), n, (1 - SHARE) * alpha)) / 2

    def one_rival(votes, n, alpha):
        """The bound of a rival that an earlier look found the strongest, of others as strong."""
        return both_bounds(votes[:, :2], n, alpha)

    def best_class(votes, n, alpha):
        """The class is the winner of the votes that then prove it; as all are equal, each claim is
        false.
        """
        return both_bounds(-np.sort(-votes, axis=1), n, alpha)

    def one_sided_in_two_parts(votes, n, alpha):
        """The better one of two looks, each at level alpha."""
        return np.maximum(quantiles(votes[:, 0], n, alpha), quantiles(votes[::-1, 0], n, alpha))

    runs = 200_000
    assert too_many(false_claims(HARD["three equal"], 10_000, runs, swapped), runs, ALPHA)
    assert too_many(false_claims([0.3, 0.02] + [0.085] * 8, 10_000, runs, one_rival), runs, ALPHA)
    assert too_many(false_claims([0.5, 0.5], 10_000, runs, best_class), runs, ALPHA)
    assert too_many(false_claims([0.9, 0.1], 10_000, runs, one_sided_in_two_parts), runs, ALPHA)


@settings(many, max_examples=60)
@given(st.integers(1, 3000), st.data(), st.floats(1e-6, 0.3), st.floats(0.05, 0.95))
def test_radius_is_that_of_exact_bounds_and_not_above_it(trials, data, alpha, share):
    successes = data.draw(st.integers(0, trials))
    rival = data.draw(st.integers(0, trials - successes))
    radius = two_sided_radius(successes, rival, trials, 1.0, alpha, share)
    with mpmath.workdps(DIGITS):
        if radius is None:
            return
        # At this radius and a hair beyond: does a pair of probabilities on the edge contradict both
        # levels?
        lower = mpmath.mpf(stats.beta.ppf(share * alpha, successes, trials - successes + 1))
        upper = (
            mpmath.mpf(stats.beta.isf((1 - share) * alpha, rival + 1, trials - rival))
            if rival < trials
            else 1
        )
        for _ in range(3):  # Newton steps from float64's bounds to exact ones
            lower -= (
                probability_of_at_most(trials - successes, trials, 1 - lower) - share * alpha
            ) / (slope(trials - successes, trials, 1 - lower))
            upper += (probability_of_at_most(rival, trials, upper) - (1 - share) * alpha) / slope(
                rival, trials, upper
            )
        exact = (normal_quantile(lower) - normal_quantile(min(upper, 1 - lower))) / 2
        assert radius <= exact and radius == pytest.approx(float(exact), abs=1e-7)


@many
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


def slope(failures: int, trials: int, q: mpmath.mpf) -> mpmath.mpf:
    """-d/dq P[Binomial(trials, q) <= failures]."""
    log_choose = (
        mpmath.loggamma(trials + 1)
        - mpmath.loggamma(failures + 1)
        - mpmath.loggamma(trials - failures)
    )
    return mpmath.exp(
        log_choose + failures * mpmath.log(q) + (trials - failures - 1) * mpmath.log1p(-q)
    )


@many
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


@many
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

    The same by real votes, and by 100,000 drawn counts: never above the true radius in 99.9 %, and
    the median near it.
    """
    sigma, n = 0.5, 100_000
    thresholds = np.linspace(low, high, 60)
    p = np.diff(special.ndtr(np.concatenate([[-np.inf], thresholds, [np.inf]])))
    truth = (low + high) / 2
    votes = np.random.default_rng(1).multinomial(n, np.delete(p, -1).tolist() + [p[-1]], 100_000)
    radii = both_bounds(votes, n, ALPHA)
    assert not too_many(int((radii > truth).sum()), len(radii), ALPHA)
    assert abs(np.median(radii) / truth - 1) < 0.05
    classifier = IntervalClassifier(*(sigma * thresholds).tolist())
    stream = GaussianNoise(sigma, 1).stream(0, torch.device("cpu"))
    found = Smooth(classifier, 61, sigma).certificate(
        torch.zeros(1, 1, 1), 100, n, ALPHA, 10_000, stream=stream, method="two-sided"
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
