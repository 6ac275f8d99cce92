"""Thresholds of conformal sets: their definition, their rounding, and what they cover."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp
from scipy import integrate, special, stats

from smoothadv.base.settings import SettingError
from smoothadv.sets.coverage import (
    COUNTING,
    calibrates,
    draws_under_attack,
    images_needed,
    least_probability,
    share_to_miss,
    threshold,
)

LEVELS = st.floats(1e-9, 1 - 1e-9)
SCORES = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=40)


@given(LEVELS, st.floats(1e-9, 5), st.floats(1e-3, 10))
def test_probability_under_attack_is_the_normal_shift_rounded_down(chance, radius, sigma):
    with mp.workdps(60):
        exact = mp.ncdf(mp_quantile(chance) - mp.mpf(radius) / mp.mpf(sigma))
        found = least_probability(chance, radius, sigma)
        assert found <= exact
        if exact > 1e-190:
            assert found > float(exact * (1 - mp.mpf(10) ** -9))
    share = Fraction(str(chance))
    assert share_to_miss(share, radius, sigma) == min(Fraction(found), share)
    assert share_to_miss(share, 0.0, sigma) == share


def mp_quantile(chance: float) -> mp.mpf:
    return mp.sqrt(2) * mp.erfinv(2 * mp.mpf(chance) - 1)


def test_what_is_certain_or_impossible_stays_so():
    assert least_probability(0.0, 0.25, 0.25) == 0.0
    assert 1 - 1e-12 < least_probability(1.0, 0.25, 0.25) <= 1.0


@pytest.mark.parametrize(
    "wrong", [{"chance": -1}, {"chance": 1.1}, {"radius": math.inf}, {"sigma": 0}]
)
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(SettingError, match=[*wrong][0]):
        least_probability(**{"chance": 0.1, "radius": 0.25, "sigma": 0.25, **wrong})


@given(st.data(), st.integers(2, 300), st.floats(0.01, 2), st.floats(1e-5, 0.2))
def test_draws_under_attack_are_those_of_the_definition_rounded_down(data, trials, ratio, alpha):
    """The bounds solve P[Binomial(trials, p) >= least] = alpha and P[Binomial(trials, p) <= draws]
    = alpha. Slow: one number of draws after the other.
    """
    least = data.draw(st.integers(1, trials))
    low = stats.beta.ppf(alpha, least, trials - least + 1)
    with mp.workdps(40):
        chance = mp.ncdf(mp_quantile(low) - mp.mpf(ratio))
        draws = next(k for k in range(trials + 1) if tail(k + 1, trials, chance) <= 1 - alpha)
    found = draws_under_attack(least, trials, ratio, 1.0, alpha)
    assert found in (draws, draws - 1) and found <= least


def tail(least: int, trials: int, p: mp.mpf) -> mp.mpf:
    """P[Binomial(trials, p) >= least]."""
    if least > trials:
        return mp.mpf(0)
    return mp.betainc(least, trials - least + 1, 0, p, regularized=True)


@given(SCORES, st.fractions(Fraction(1, 1000), Fraction(999, 1000)))
def test_threshold_is_the_largest_score_with_few_enough_below_it(scores, share):
    most = (len(scores) + 1) * share
    slow = [one for one in scores if sum(other < one for other in scores) + 1 <= most]
    found = threshold(np.array(scores), share)
    assert found == max(slow, default=-math.inf)
    assert (found > -math.inf) == (len(scores) >= images_needed(share))
    if rank := math.floor(most):
        level = Fraction(2 * rank - 1, 2 * len(scores))
        assert found == np.quantile(scores, float(level), method="inverted_cdf")
    assert images_needed(Fraction(0)) == math.inf == -threshold(np.array(scores), Fraction(0))


@pytest.mark.parametrize(
    "share", [Fraction(1, 10), Fraction(1, 4), Fraction(2, 5), Fraction(9, 10)]
)
@pytest.mark.parametrize("images", range(2, 7))
def test_of_exchangeable_images_no_more_are_missed(images, share):
    """Each image in turn is the one that is tested, for all scores, equal ones included; if none
    are equal, as many are missed as may be.
    """
    for scores in itertools.product(range(3), repeat=images):
        missed = missed_of(np.array(scores, float), share)
        assert missed <= share * images
    assert missed_of(np.arange(float(images)), share) == math.floor(share * images)


def missed_of(scores: np.ndarray, share: Fraction) -> int:
    each = range(len(scores))
    return sum(scores[k] < threshold(np.delete(scores, k), share) for k in each)


@pytest.mark.parametrize(
    ("n", "alpha", "ratio"), [(99, 0.1, 0.5), (500, 0.1, 1.0), (5000, 0.05, 1.5)]
)
def test_guarantee_holds_and_is_tight_for_a_half_space(n, alpha, ratio):
    """The score of the label is one coordinate, of which noise is all: the worst attack lowers it
    by the radius. Another score is below the m-th smallest of n with a probability that is
    distributed as Beta(m, n + 1 - m).
    """

    def missed(share: Fraction) -> float:
        rank = math.floor((n + 1) * share)
        density = stats.beta(rank, n + 1 - rank).pdf
        return integrate.quad(
            lambda u: special.ndtr(special.ndtri(u) + ratio) * density(u), 0, 1, limit=400
        )[0]

    share = share_to_miss(Fraction(str(alpha)), ratio, 1.0)
    assert 0.5 * alpha < missed(share) <= alpha
    assert missed(Fraction(str(alpha))) > 1.5 * alpha, "without the correction"
    worst = special.ndtr(special.ndtri(float(share)) + ratio)
    assert worst == pytest.approx(alpha, rel=1e-10), "and with all images there are"


@pytest.mark.parametrize("levels", [2, 10, 1000])
def test_guarantee_holds_for_a_score_of_few_values_and_is_tight_for_many(levels):
    """The score of the label has ``levels`` values with equal probability, in order of the noise's
    coordinate along which the worst attack moves the image. All thresholds are enumerated: the m-th
    smallest of n scores is one of the first k values if at least m scores are.
    """
    n, alpha, ratio = 2000, 0.2, 0.5
    clean = np.arange(levels + 1) / levels
    attacked = special.ndtr(special.ndtri(clean) + ratio)

    def missed(share: Fraction) -> float:
        rank = int(threshold(np.arange(1.0, n + 1), share))
        is_below = stats.binom(n, clean).sf(rank - 1)
        return float((np.diff(is_below) * attacked[:-1]).sum())

    share = share_to_miss(Fraction(str(alpha)), ratio, 1.0)
    assert missed(share) <= alpha
    if levels == 1000:
        assert missed(share) > 0.98 * alpha
        assert missed(Fraction(str(alpha))) > 1.5 * alpha, "without the correction"


@pytest.mark.parametrize("draws", [20, 100, 2000])
def test_guarantee_holds_for_counts_and_is_tight_for_many_draws(draws):
    """The label fits a noisy copy with one of 200 probabilities, equally often, each lowered by the
    worst attack. All thresholds are enumerated: the m-th smallest of n counts is at most k if at
    least m of them are.
    """
    n, alpha, ratio = 2000, Fraction(1, 10), 0.5
    chances = (np.arange(200) + 0.5) / 200
    attacked = special.ndtr(special.ndtri(chances) - ratio)
    counts = np.arange(draws + 1)

    def missed(share: Fraction, is_corrected: bool) -> float:
        rank = int(threshold(np.arange(1.0, n + 1), share))
        up_to = stats.binom.cdf(counts[:, None], draws, chances).mean(1)
        is_threshold = np.diff(stats.binom(n, up_to).sf(rank - 1), prepend=0.0)
        part = float(alpha * COUNTING)
        least = [
            draws_under_attack(int(k), draws, ratio, 1.0, part) if is_corrected and k else k
            for k in counts
        ]
        below = stats.binom.cdf(np.array(least)[:, None] - 1, draws, attacked).mean(1)
        return float(is_threshold @ below)

    share = alpha * (1 - 2 * COUNTING)
    assert missed(share, True) <= alpha
    if draws == 2000:
        assert missed(share, True) > 0.5 * alpha
    assert missed(alpha, False) > 1.5 * alpha, "without the correction"


def test_images_calibrate_at_random_each_by_itself():
    """The counts of 10,000 images are within five standard deviations: false alarm below 1e-6."""
    chosen = [[calibrates(index, 0.3, seed) for index in range(10_000)] for seed in (0, 1)]
    for each in chosen:
        assert abs(sum(each) - 3000) < 5 * math.sqrt(2100)
    both = sum(one and two for one, two in zip(*chosen))
    assert abs(both - 900) < 5 * math.sqrt(819)
    assert all(calibrates(index, 0.8, 0) for index in range(10_000) if chosen[0][index])
