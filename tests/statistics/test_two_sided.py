"""Certificates from both sides of Theorem 1, and of a class among the k most probable ones: exact
bounds, special cases, an independent computation, and oracles in closed form.
"""

from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from smoothadv.core import Smooth
from smoothadv.noise import GaussianNoise
from smoothadv.statistics import Smoothing
from smoothadv.statistics.bounds import (
    certified_radius,
    failure_upper_bound,
    quantile_loss,
    radius_between,
    top_k_radius,
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


# The class among the k most probable ones


@settings(max_examples=60)
@given(
    st.integers(1, 400),
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e-6, 0.01]),
    st.booleans(),
)
@example(53, [871, 0, 0], 0.0, True)
@example(22, [1931, *[0] * 9], 0.0, True)
def test_the_radius_is_that_of_the_theorem_in_sixty_digits_and_not_above_it(
    successes, rivals, distance, is_least
):
    """Also at the least level that certifies anything, where a radius of rounding errors would be
    false.
    """
    trials = successes + sum(rivals) + 20

    def found(level: float) -> float | None:
        return top_k_radius(successes, rivals, trials, 1.0, level, SHARE, distance)

    radius = found(alpha := least_level(found) if is_least else ALPHA)
    with mpmath.workdps(60):
        z = normal_quantile(
            1 - mpmath.mpf(failure_upper_bound(successes, trials, SHARE * alpha)) - distance
        )
        level = (1 - SHARE) * alpha / len(rivals)
        u = sorted(
            mpmath.mpf(failure_upper_bound(trials - count, trials, level)) for count in rivals
        )

        def lead(r: mpmath.mpf) -> mpmath.mpf:
            """How far c's probability is above what the theorem leaves to the least probable of k
            classes.
            """
            best = mpmath.mpf(0)
            for t in range(1, len(u) + 1):
                most = sum(u[:t]) if t < len(u) else min(sum(u), mpmath.ncdf(-z) - distance)
                if most + distance < 1:
                    rivals_there = mpmath.ncdf(normal_quantile(most + distance) + r) + distance
                    best = max(best, t * (mpmath.ncdf(z - r) - distance) - rivals_there)
            return best

        if radius is None:
            assert lead(mpmath.mpf(1e-9)) <= 0
        else:
            assert lead(mpmath.mpf(radius)) > 0 >= lead(mpmath.mpf(radius) + mpmath.mpf(1e-9))


def least_level(radius: Callable[[float], float | None]) -> float:
    """The least level in 1e-9..0.9 at which there is a radius; 0.9 if there is none."""
    low, high = 1e-9, 0.9
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if radius(middle) is None else (low, middle)
    return high


def of_the_stronger(successes: int, rivals: list[int], *more: float) -> float | None:
    return two_sided_radius(successes, max(rivals), *more)


@pytest.mark.parametrize("rule", [of_the_stronger, top_k_radius])
@pytest.mark.parametrize("distance", [0.0, 1e-6, 0.02])
def test_more_successes_or_fewer_votes_for_rivals_never_take_a_radius_away(rule, distance):
    def radius(successes: int, first: int, second: int) -> float:
        found = rule(successes, [first, second], 60, 1.0, 0.3, SHARE, distance)
        return -1.0 if found is None else found

    found = 0
    for successes in range(0, 59, 4):
        for first in range(0, 59 - successes, 4):
            for second in range(0, min(first, 58 - successes - first) + 1, 4):
                here = radius(successes, first, second)
                weaker = radius(successes, first + 1, second), radius(successes, first, second + 1)
                assert radius(successes + 1, first, second) >= here - 1e-11 >= max(weaker) - 2e-11
                found += here >= 0
    assert found > 50


@pytest.mark.parametrize(("place", "spread"), [(0.2, 0.4), (-0.4, 1.2), (1.0, 1.3)])
def test_stripes_along_one_direction(place, spread):
    """Class 0 up to ``place`` sigma; beyond ``spread`` sigma two rivals in fine stripes; rare
    classes between.

    Only a shift towards the rivals changes who is among the two most probable classes: so the true
    radius is where class 0 is as probable as the rarer one of both rivals. The theorem's worst case
    is two equal rivals: median near.
    """
    edges = spread + 0.02 * np.arange(400)

    def probabilities(shift: float) -> np.ndarray:
        stripes = np.diff(special.ndtr(np.append(edges, np.inf) - shift))
        middle = np.diff(special.ndtr(np.linspace(place, spread, 60) - shift))
        return np.concatenate(
            [[special.ndtr(place - shift), stripes[::2].sum(), stripes[1::2].sum()], middle]
        )

    truth = optimize.brentq(
        lambda shift: probabilities(shift)[0] - probabilities(shift)[1:3].min(), 0, 10
    )
    p, n = probabilities(0.0), 100_000
    votes = np.random.default_rng(2).multinomial(n, p / p.sum(), 501)
    radii = [top_k_radius(int(v[0]), v[1:3].tolist(), n, 1.0, ALPHA, SHARE) for v in votes]
    assert max(radii) < truth and abs(np.median(radii) / truth - 1) < 0.05
    both = [two_sided_radius(int(v[0]), int(v[1:].max()), n, 1.0, ALPHA, SHARE) for v in votes]
    assert np.median([radius or 0 for radius in both]) < 0.9 * truth


def test_the_statement_is_about_the_label_among_the_k_or_about_the_leader():
    selection = np.array([2, 2, 2, 1, 1, 3])
    votes = ListedVotes(np.concatenate([selection, np.repeat([1, 2, 0, 3], [400, 500, 90, 10])]))
    procedure = TopK(Smoothing(0.5, 6, 1000, ALPHA), top_k=2)
    found = {}
    for label in range(4):
        votes.used = 0
        found[label] = certify(procedure, votes, label)
    assert [found[label].prediction for label in range(4)] == [2, 1, 2, 2]
    assert found[1].details == {"rival_1": 500, "rival_2": 90} and found[1].successes == 400
    assert found[1].radius == top_k_radius(400, [500, 90], 1000, 0.5, ALPHA, SHARE) > 0
    votes.used = 0
    assert certify(procedure, votes, -2).prediction == 2


@pytest.mark.parametrize("top_k", [0, True, 100_001])
@pytest.mark.parametrize(
    "use",
    [lambda k: TopK(Smoothing(1.0, 1, 1, ALPHA), top_k=k), lambda k: TopK.counts({"top_k": k})],
)
def test_numbers_of_classes_that_mean_nothing_are_refused(use, top_k):
    with pytest.raises(ValueError, match="top_k"):
        use(top_k)
