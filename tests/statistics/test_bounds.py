"""Bounds, radii and tests of counts: against tabulated values, exact sums and 60-digit arithmetic;
with noise at a distance from a Gaussian, too; tolerated false statements and intervals.
"""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from smoothadv.statistics.bounds import (
    binomial_interval,
    certified_accuracy_deduction,
    certified_radius,
    failure_upper_bound,
    l2_radius_for,
    linf_radius,
    lower_confidence_bound,
    maximum_radius,
    radius_probability,
    squared_grey_radius,
    tolerated_false_statements,
    two_sided_radius,
    vote_is_significant,
)
from smoothadv.statistics.exact import Exact
from smoothadv.statistics.prediction import least_draws
from support.exact_tails import (
    DIGITS,
    failure_probability,
    is_sound_and_tight,
    probability_of_at_most,
)

# Without powers of two: with them p_lower can be exactly 1/2, and rounding may decide either way.
alphas = st.floats(1e-12, 0.5).filter(lambda alpha: math.frexp(alpha)[0] != 0.5)


@st.composite
def counts(draw, largest: int = 10**6) -> tuple[int, int]:
    """Successes and trials, with few failures as often as not."""
    trials = draw(st.integers(1, largest))
    return trials - draw(st.integers(0, min(50, trials)) | st.integers(0, trials)), trials


# successes, trials, alpha, exact p_lower, exact radius in units of sigma (None: below 1/2).
# 50-digit arithmetic.
TABLE = [
    (100_000, 100_000, 1e-3, 0.9999309248330094, 3.81145656339),
    (99_999, 100_000, 1e-3, 0.9999076696662654, 3.7391266685434),
    (50_489, 100_000, 1e-3, 0.4999989484886355, None),
    (50_490, 100_000, 1e-3, 0.5000089487744036, 2.2431250945137e-5),
    (100, 100, 1e-3, 0.933254300796991, 1.5004750241206),
    (1, 100_000, 1e-3, 1.000500328578529e-8, None),
    (99_000, 100_000, 1e-9, 0.9879865261881413, 2.2566980686122),
    (9_999_997, 10**7, 1e-3, 1 - 1.3062234207419e-6, 4.6991514406686),
    (10**9, 10**9, 1e-3, 1 - 6.9077552551236e-9, 5.6756597980373),
    (90_000, 100_000, 5e-4, 0.8968430710503467, 1.2637664738613),
]


@pytest.mark.parametrize("successes, trials, alpha, p_lower, radius", TABLE)
def test_bound_and_radius_match_the_high_precision_table(successes, trials, alpha, p_lower, radius):
    # SciPy before 1.16 is off by 3e-15 here; radii do not come through p but through q, which must
    # never fall short.
    assert lower_confidence_bound(successes, trials, alpha) == pytest.approx(
        p_lower, rel=1e-14, abs=0
    )
    if radius is None:
        assert certified_radius(successes, trials, 1.0, alpha) is None
    else:
        assert certified_radius(successes, trials, 1.0, alpha) == pytest.approx(
            radius, rel=0, abs=1e-8
        )


def test_without_a_success_the_bound_is_zero():
    assert lower_confidence_bound(0, 100_000, 1e-3) == 0.0
    assert failure_upper_bound(0, 100_000, 1e-3) == 1.0 >= failure_upper_bound(1, 1, 1e-20)
    assert certified_radius(0, 100_000, 1.0, 1e-3) is None


@pytest.mark.parametrize("successes, trials, alpha", [(3, 5, 1e-110), (9, 10, 1e-300)])
def test_where_scipy_may_have_no_quantile_nothing_is_certified(successes, trials, alpha):
    assert 1 - 1e-15 < failure_upper_bound(successes, trials, alpha) <= 1
    assert 0 <= lower_confidence_bound(successes, trials, alpha) < 1e-30
    assert certified_radius(successes, trials, 1.0, alpha) is None
    assert two_sided_radius(successes, 1, trials, 1.0, alpha, 0.9) is None


@pytest.mark.parametrize(
    "sigma, cap", [(0.12, 0.4574), (0.25, 0.9529), (0.5, 1.9057), (1.0, 3.8115)]
)
def test_a_constant_classifier_reaches_the_largest_radius(sigma, cap):
    assert maximum_radius(100_000, sigma, 1e-3) == pytest.approx(cap, abs=5e-5)
    assert maximum_radius(9, sigma, 1e-3) == 0.0 < maximum_radius(10, sigma, 1e-3)


@pytest.mark.parametrize(
    "trials, top",
    [
        (100, 67),
        (1_000, 553),
        (10_000, 5_166),
        (100_000, 50_521),
        (10**6, 501_646),
        (10**7, 5_005_204),
    ],
)
def test_smallest_count_that_predicts(trials, top):
    assert vote_is_significant(top, trials - top, 1e-3)
    assert not vote_is_significant(top - 1, trials - top + 1, 1e-3)
    with mpmath.workdps(DIGITS):
        p_value = float(2 * probability_of_at_most(trials - top, trials, mpmath.mpf(1) / 2))
    assert not vote_is_significant(top, trials - top, math.nextafter(p_value, 0)), (
        "rounding decides nothing"
    )
    assert vote_is_significant(top, trials - top, p_value * (1 + 1.1e-10))


def test_fewest_trials_at_the_level_of_the_paper():
    assert Exact.least_draws(1e-3) == 10
    assert least_draws(1e-3) == 11
    assert least_draws(2**-10) == 11, "the p-value of 11 equal votes is 2 * 2^-11, the level itself"


@given(alphas)
def test_fewest_trials_are_the_fewest(alpha):
    level = Fraction(alpha)
    n = Exact.least_draws(alpha)
    assert Fraction(1, 2**n) <= level and (n == 1 or Fraction(1, 2 ** (n - 1)) > level)
    n = least_draws(alpha)
    assert Fraction(2, 2**n) <= level < Fraction(2, 2 ** (n - 1))


def miscoverage(bounds: list[float], p: float) -> float:
    """P[bounds[K] > p] over K ~ Binomial(len(bounds) - 1, p): how often a lower bound on p is
    false.
    """
    masses = stats.binom.pmf(range(len(bounds)), len(bounds) - 1, p)
    return math.fsum(masses[np.array(bounds) > p])


def worst_miscoverage(bounds: list[float]) -> float:
    """The supremum over p, which is approached just below one of the values of the bound."""
    return max(miscoverage(bounds, bound * (1 - 1e-12)) for bound in bounds if 0 < bound < 1)


@pytest.mark.parametrize("alpha", [1e-3, 0.05, 0.3])
@pytest.mark.parametrize("trials", [1, 2, 5, 12, 30, 60])
def test_bound_covers_with_exactly_its_level(trials, alpha):
    bounds = [lower_confidence_bound(k, trials, alpha) for k in range(trials + 1)]
    assert worst_miscoverage(bounds) == pytest.approx(alpha, rel=1e-8)


def test_coverage_check_rejects_the_normal_approximation():
    trials, normal_quantile = 60, 1.6448536
    wald = [
        k / trials - normal_quantile * math.sqrt(k / trials * (1 - k / trials) / trials)
        for k in range(trials + 1)
    ]
    assert worst_miscoverage(wald) > 2 * 0.05


@given(counts(largest=10**5), alphas)
def test_failure_bound_is_never_below_the_exact_one(count, alpha):
    """Without its margins it would be, of every second count without failures, and of some
    others.
    """
    successes, trials = count
    assume(successes)
    with mpmath.workdps(DIGITS):
        q = mpmath.mpf(failure_upper_bound(successes, trials, alpha))
        assert q == 1 or probability_of_at_most(trials - successes, trials, q) <= alpha


@st.composite
def many_draws(draw) -> tuple[int, int]:
    """Successes and trials up to 1e9, with at most a million failures: their tails take a sum over
    them.
    """
    trials = round(10 ** draw(st.floats(5, 9)))
    return trials - min(trials // 2, round(10 ** draw(st.floats(0, 6))) - 1), trials


@settings(max_examples=140)
@given(counts(largest=10**5) | many_draws(), alphas)
def test_radius_is_never_above_the_exact_one_and_within_1e8_of_it(count, alpha):
    radius = certified_radius(*count, 1.0, alpha)
    assume(radius)
    assert is_sound_and_tight(radius, *count, alpha)


# Few failures among very many trials: there SciPy's inverse of the beta distribution is least
# accurate.
@pytest.mark.parametrize(
    "successes, trials, alpha",
    [row[:3] for row in TABLE if row[4] is not None]
    + [(10**6 - 38, 10**6, 1e-3), (99_995, 100_000, 1e-6)]
    + [
        (609_328_884, 609_328_894, 0.03930288282735106),
        (211_779_448, 211_779_449, 7.337983765435685e-11),
    ]
    # So many that the bound's margin is smaller than the rounding of the normal quantile.
    + [(606_408_645_028_971, 606_408_645_028_971, 0.006353062024035954)],
)
def test_radius_is_sound_at_extreme_counts(successes, trials, alpha):
    assert is_sound_and_tight(
        certified_radius(successes, trials, 1.0, alpha), successes, trials, alpha
    )


@pytest.mark.parametrize("shift", [1e-10, -2e-8])
def test_soundness_check_rejects_a_radius_that_is_too_large_or_too_small(shift):
    radius = certified_radius(99_000, 100_000, 1.0, 1e-3)
    assert not is_sound_and_tight(radius + shift, 99_000, 100_000, 1e-3)


def upper_half_tail(k: int, n: int) -> Fraction:
    """P[Binomial(n, 1/2) >= k], exactly."""
    return Fraction(sum(math.comb(n, i) for i in range(k, n + 1)), 2**n)


@given(counts(largest=300), alphas)
def test_abstains_exactly_where_one_half_cannot_be_excluded(count, alpha):
    certifies = certified_radius(*count, 0.5, alpha) is not None
    assert certifies == (upper_half_tail(*count) <= Fraction(alpha))


@given(st.integers(0, 200), st.integers(0, 200), alphas)
@example(9, 6, 0.1)  # where SciPy's p-value is too small
def test_vote_test_is_the_exact_two_sided_binomial_test(one, other, alpha):
    top, runner_up = max(one, other, 1), min(one, other)
    p_value = 1 if top == runner_up else 2 * upper_half_tail(top, top + runner_up)
    assert not vote_is_significant(top, runner_up, math.nextafter(float(p_value), 0)), (
        "rounding decides nothing"
    )
    assume(abs(p_value / Fraction(alpha) - 1) > 1e-9)  # nearer than that, the margin decides
    assert vote_is_significant(top, runner_up, alpha) == (p_value <= alpha)
    assert p_value == 1 or vote_is_significant(top, runner_up, float(p_value) * (1 + 1.1e-10)), (
        "nor does more"
    )


@given(st.floats(0, 8) | st.sampled_from([5e-324, 1e-300, 0.1, 1e300]), st.integers(1, 10**6))
def test_radii_are_the_nearest_floats_on_the_safe_side_of_the_root(radius, dimension):
    small, large = linf_radius(radius, dimension), l2_radius_for(radius, dimension)
    assert Fraction(small) ** 2 * dimension <= Fraction(radius) ** 2
    assert Fraction(math.nextafter(small, math.inf)) ** 2 * dimension > Fraction(radius) ** 2
    assert Fraction(large) ** 2 >= Fraction(radius) ** 2 * dimension
    assert (
        large == 0 or Fraction(math.nextafter(large, 0.0)) ** 2 < Fraction(radius) ** 2 * dimension
    )
    assert l2_radius_for(small, dimension) <= radius, "the l2 radius that it came from certifies it"


@pytest.mark.parametrize("examples, deduction", [(500, 0.010859), (10_000, 0.002405)])
def test_more_than_the_deduction_is_false_with_probability_at_most_rho(examples, deduction):
    found = certified_accuracy_deduction(examples, alpha=1e-3, rho=1e-3)
    assert found == pytest.approx(deduction, abs=5e-7)
    assert stats.binom.sf(math.floor(examples * found), examples, 1e-3) <= 1e-3


def test_the_deduction_without_the_factor_2_is_too_small():
    assert stats.binom.sf(math.floor(10_000 * 0.00206), 10_000, 1e-3) > 1.5e-3


# Of noise on whole grey levels it is 6e-13 on a CIFAR-10 image and 3e-11 on an ImageNet image.
distances = st.just(0.0) | st.floats(1e-16, 1e-6) | st.floats(1e-6, 0.05)


def lost_to_the_bend(distance: float) -> float:
    """What a radius may lose to the bound on Phi^-1(1/2 + distance), which adds 1 % for its
    curvature.
    """
    return 0.011 * math.sqrt(2 * math.pi) * distance


@given(counts(largest=10**5), alphas, distances)
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


@given(counts(largest=10**5), alphas, distances, distances, st.floats(0.05, 4))
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


@given(counts(largest=10**5), alphas, st.floats(0.05, 4), distances)
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


def more_than(k: int, statements: int, probability: float) -> mpmath.mpf:
    """P[Binomial(statements, probability) > k], to 40 digits of its complement."""
    with mpmath.workdps(DIGITS):
        p = mpmath.mpf(probability)
        return 1 - probability_of_at_most(k, statements, p) if p else p


few = st.tuples(st.integers(0, 40), st.floats(0, 0.999), st.floats(1e-12, 1 - 1e-6))
many = st.tuples(st.integers(1000, 200_000), st.floats(1e-6, 0.05), st.floats(1e-9, 0.1))


@settings(max_examples=120)
@given(few | many)
@example((1, 0.002, 0.001))
@example((1, 0.001, 0.001))  # a tie, in floats
@example((40, 0.5, 0.5))
@example((3, 0.0, 1e-12))
@example((3, 5e-324, 1e-12))
@example((30, 0.999, 1e-12))
@example((50_000, 0.002, 0.001))
@example((10_000, 0.002, 0.001))
@example((500, 0.002, 0.001))
def test_tolerated_number_is_the_smallest_that_exact_tails_allow(case):
    """Where a tail is within rounding of the level either neighbour will do."""
    statements, probability, false_alarm = case
    k = tolerated_false_statements(*case)
    assert more_than(k, statements, probability) <= false_alarm * (1 + 1e-9)
    assert k == 0 or more_than(k - 1, statements, probability) > false_alarm * (1 - 1e-9)
    assert 0 <= k <= statements


@given(st.integers(1, 40), st.floats(1e-6, 0.5), st.floats(1e-9, 0.5))
def test_exact_deduction_is_the_smallest_share_that_exact_tails_allow(examples, alpha, rho):
    share = certified_accuracy_deduction(examples, alpha, rho, exact=True)
    false = round(share * examples)
    assert share == false / examples and more_than(false, examples, alpha) <= rho * (1 + 1e-9)
    assert false == 0 or more_than(false - 1, examples, alpha) > rho * (1 - 1e-9)
    assert share <= certified_accuracy_deduction(examples, alpha, rho), (
        "Bernstein's inequality allows no less"
    )


@pytest.mark.parametrize("probability", [1.0, 1.4])
def test_statements_that_may_all_be_false_contradict_nothing(probability):
    assert [tolerated_false_statements(n, probability, 0.001) for n in (0, 1, 50)] == [0, 1, 50]


@given(counts(), st.floats(0.5, 0.9999))
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
