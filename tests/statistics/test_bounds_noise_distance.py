"""Radii for noise that is nearly Gaussian, and the probability that a radius needs: against
60-digit arithmetic.
"""

import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smoothadv.statistics.bounds import (
    certified_radius,
    maximum_radius,
    radius_probability,
    squared_grey_radius,
)
from support.exact_tails import DIGITS, failure_probability, is_sound_and_tight

alphas = st.floats(1e-12, 0.4).filter(lambda alpha: math.frexp(alpha)[0] != 0.5)
# Of noise on whole grey levels it is 6e-13 on a CIFAR-10 image and 3e-11 on an ImageNet image.
distances = st.just(0.0) | st.floats(1e-16, 1e-6) | st.floats(1e-6, 0.05)


@st.composite
def counts(draw) -> tuple[int, int]:
    """Successes and trials, with few failures as often as not."""
    trials = draw(st.integers(1, 10**5))
    return trials - draw(st.integers(0, min(50, trials)) | st.integers(0, trials // 2)), trials


def lost_to_the_bend(distance: float) -> float:
    """What a radius may lose to the bound on Phi^-1(1/2 + distance), which adds 1 % for its
    curvature.
    """
    return 0.011 * math.sqrt(2 * math.pi) * distance


@given(counts(), alphas, distances)
def test_radius_with_a_noise_distance_is_sound_and_tight(count, alpha, distance):
    radius = certified_radius(*count, 1.0, alpha, distance)
    assume(radius)
    assert is_sound_and_tight(radius, *count, alpha, distance, 2e-8 + lost_to_the_bend(distance))


def test_soundness_check_rejects_a_distance_that_is_counted_once():
    # Phi^-1(p - d), without the loss at the other image.
    distance, p = 1e-3, 0.98898934
    once = math.sqrt(2) * float(mpmath.erfinv(2 * (p - distance) - 1))
    assert not is_sound_and_tight(once, 99_000, 100_000, 1e-3, distance, 1e-2)
    twice = certified_radius(99_000, 100_000, 1.0, 1e-3, distance)
    assert is_sound_and_tight(twice, 99_000, 100_000, 1e-3, distance, slack=1e-4)


@given(counts(), alphas, distances, distances, st.floats(0.05, 4))
def test_radius_falls_with_the_distance_and_is_proportional_to_sigma(
    count, alpha, one, other, sigma
):
    near, far = (
        certified_radius(*count, 1.0, alpha, distance) for distance in sorted([one, other])
    )
    assume(near is not None)
    assert far is None or far <= near <= certified_radius(*count, 1.0, alpha)
    assert certified_radius(*count, sigma, alpha, min(one, other)) == pytest.approx(
        sigma * near, rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("distance", [1e-4, 6e-6])
def test_nothing_is_certified_at_a_distance_that_leaves_no_radius(distance):
    """p_lower is 1/2 + 8.9e-6, from which the distance is taken twice."""
    assert certified_radius(50_490, 100_000, 1.0, 1e-3) > 0
    assert certified_radius(50_490, 100_000, 1.0, 1e-3, distance) is None


def is_above_and_tight(p: float, radius: float, sigma: float, distance: float) -> bool:
    """Whether p is at least Phi(radius / sigma + Phi^-1(1/2 + distance)) + distance, or 1, and not
    much larger.
    """
    with mpmath.workdps(DIGITS):
        exact = 1 - max(failure_probability(mpmath.mpf(radius) / mpmath.mpf(sigma), distance), 0)
        return (
            exact
            <= p
            <= exact
            + mpmath.mpf(3e-16)
            + (1 - exact) * mpmath.mpf(1e-12)
            + lost_to_the_bend(distance)
        )


@given(st.floats(0, 5) | st.floats(0, 1e-6), st.floats(0.05, 4), distances)
def test_probability_of_a_radius_is_never_below_the_exact_one(radius, sigma, distance):
    p = radius_probability(radius, sigma, distance)
    assert 0.5 <= p <= 1
    assert is_above_and_tight(p, radius, sigma, distance)


@pytest.mark.parametrize("radius", [0.0, 1e-300, 0.25, 2.25, 3.9, 4.0, 8.2, 8.3, 40.0, 1e6])
def test_probability_of_extreme_radii(radius):
    assert is_above_and_tight(radius_probability(radius, 1.0), radius, 1.0, 0.0)
    assert not is_above_and_tight(math.nextafter(0.5, 0), radius, 1.0, 0.0)


@given(counts(), alphas, st.floats(0.05, 4), distances)
def test_a_certified_radius_needs_no_more_probability_than_was_shown(count, alpha, sigma, distance):
    """The two directions of Cohen et al.'s Theorem 1 fit together."""
    radius = certified_radius(*count, sigma, alpha, distance)
    assume(radius)
    shown = certified_radius(*count, 1.0, alpha)
    with mpmath.workdps(DIGITS):
        p_lower = float(mpmath.ncdf(shown))
    # Each direction adds 1 % for the curvature of the quantile.
    assert radius_probability(radius, sigma, distance) <= p_lower + 1e-11


def test_squared_radius_in_grey_levels():
    assert squared_grey_radius(maximum_radius(100_000, 0.25, 1e-3)) == 59_039
    # 1 / 255 itself lies on the open ball's boundary, as does every whole number of grey levels.
    assert [squared_grey_radius(float(Fraction(k, 255))) for k in (1, 2, 100)] == [0, 3, 9_999]


@given(st.floats(1e-3, 8))
def test_images_at_the_squared_radius_lie_within_the_ball(radius):
    squared = squared_grey_radius(radius)
    exact = (255 * Fraction(radius)) ** 2
    assert squared < exact and squared + 1 > exact * (1 - Fraction(1, 10**11))
