"""What a log says: on one counted by hand, as laws that hold for any log, and against counting row
by row.
"""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from smoothadv.statistics.accuracy import (
    abstention_rate,
    accuracy,
    accuracy_curve,
    average_certified_radius,
    bootstrap_interval,
    certified_accuracies,
    clopper_pearson_band,
    default_radii,
    dkw_band,
    exact_interval,
)

# Correct at 0.5 and 0.25, an abstention, wrong at 0.8, correct at 1.
LOG = pd.DataFrame(
    {"predict": [3, 4, -1, 1, 2], "correct": [1, 1, 0, 0, 1], "radius": [0.5, 0.25, 0.0, 0.8, 1.0]}
)


def table_of(rows: list[tuple[int, float]]) -> pd.DataFrame:
    """The log of (predict, radius) pairs whose label is always 1."""
    predict, radius = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    radius = np.where(predict < 0, 0.0, radius)
    return pd.DataFrame(
        {"predict": predict, "correct": (predict == 1).astype(int), "radius": radius}
    )


# Few distinct radii, so that ties and radii asked for exactly are common.
radii = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75]) | st.floats(0, 4)
tables = st.lists(st.tuples(st.integers(-1, 2), radii), min_size=1, max_size=30).map(table_of)


def test_averages():
    assert accuracy(LOG) == pytest.approx(0.6)
    assert average_certified_radius(LOG) == pytest.approx(0.35)
    assert abstention_rate(LOG) == pytest.approx(0.2)


def test_resampled_shares_have_the_quantiles_counted_by_hand():
    """Two examples, one correct: a resample has 0, 1 or 2 correct with probability 1/4, 1/2,
    1/4.
    """
    ends = [bootstrap_interval(np.array([0.5]), 2, confidence) for confidence in (0.4, 0.6)]
    assert [(float(low[0]), float(high[0])) for low, high in ends] == [(0.5, 0.5), (0.0, 1.0)]


@pytest.mark.parametrize(("correct", "confidence"), [(60, 0.95), (97, 0.9), (5, 0.8)])
def test_interval_has_the_quantiles_of_resampling_the_examples(correct, confidence):
    """At most a tail of resampled shares lies beyond each end, and at least a tail from it on."""
    resampled, tail = stats.binom(100, correct / 100), (1 - confidence) / 2
    ends = bootstrap_interval(np.array([correct / 100]), 100, confidence)
    low, high = (round(100 * float(end[0])) for end in ends)
    assert resampled.cdf(low - 1) < tail <= resampled.cdf(low)
    assert resampled.sf(high) <= tail < resampled.sf(high - 1)


def misses(band, confidence: float, radii: np.ndarray) -> int:
    """Of how many of 1000 logs of 60 images each the band leaves out the population's accuracy at
    any of the radii.

    A third of the population is wrong or abstains; the radii of the others are uniform up to 1.6.
    """
    certified = np.random.default_rng(7).uniform(-0.8, 1.6, (1000, 60, 1))
    low, high = zip(*(band(shares, 60, confidence) for shares in (certified >= radii).mean(1)))
    truth = (1.6 - radii) / 2.4
    return int(((truth < np.array(low)) | (truth > np.array(high))).any(1).sum())


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_bands_hold_at_all_radii_at_once(confidence):
    """A true band of this confidence is taken for a false one with probability 1e-6; one that holds
    at each radius by itself, or of half the width, is found out."""
    most = int(stats.binom.isf(1e-6, 1000, 1 - confidence))
    few, many = np.linspace(0, 1.5, 7), np.linspace(0, 1.6, 81)
    assert misses(dkw_band, confidence, many) <= most
    assert misses(clopper_pearson_band, confidence, few) <= most
    assert misses(bootstrap_interval, confidence, few) > most
    assert misses(lambda shares, *_: dkw_band(shares, 4 * 60, confidence), confidence, many) > most


def test_bands_are_those_of_their_formulas():
    shares = np.array([0.5, 0.02, 1.0, 0.0])
    low, high = dkw_band(shares, 200, 0.95)
    half = math.sqrt(math.log(40) / 400)
    assert low == pytest.approx([0.5 - half, 0, 1 - half, 0])
    assert high == pytest.approx([0.5 + half, 0.02 + half, 1, half])
    for band, error in ((clopper_pearson_band, 0.05 / 4), (exact_interval, 0.05)):
        for share, ends in zip(shares, zip(*band(shares, 200, 0.95))):
            exact = stats.binomtest(round(200 * share), 200).proportion_ci(1 - error, "exact")
            assert ends == pytest.approx((exact.low, exact.high), abs=1e-9)


@given(tables, st.lists(radii, min_size=1, max_size=5))
def test_certified_accuracies_are_those_of_counting_row_by_row(table, asked):
    counted = [
        sum(row.correct == 1 and row.radius >= radius for row in table.itertuples()) / len(table)
        for radius in asked
    ]
    assert certified_accuracies(table, asked).tolist() == counted


@given(tables, st.lists(radii, min_size=2, max_size=6).map(sorted))
def test_certified_accuracy_falls_from_the_clean_accuracy_to_nothing(table, asked):
    accuracies = certified_accuracies(table, [0.0, *asked, 4.01])
    assert accuracies[0] == accuracy(table) == table.correct.mean()
    assert np.all(np.diff(accuracies) <= 0) and accuracies[-1] == 0
    assert accuracy(table) + abstention_rate(table) <= 1 + 1e-12


@given(tables)
def test_average_radius_is_the_area_under_any_curve(table):
    radii, accuracies = accuracy_curve(table)
    area = float(np.sum(np.diff(radii) * accuracies[1:]))
    assert average_certified_radius(table) == pytest.approx(area, abs=1e-12)
    assert accuracies[:-1] == pytest.approx(certified_accuracies(table, radii[:-1]), abs=1e-15)
    assert accuracies[-1] == 0, "the curve ends on the axis"


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (0.0, [0.25]),
        (0.3, [0.25]),
        (1.0, [0.25, 0.5, 0.75, 1.0]),
        (3.0, [0.25 * k for k in range(1, 13)]),
        (3.8, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]),
        (15.2, [2.5, 5.0, 7.5, 10.0, 12.5, 15.0]),
    ],
)
def test_default_radii_are_round_numbers_as_far_as_anything_is_certified(largest, expected):
    assert default_radii([table_of([(1, largest)]), table_of([(1, largest / 2)])]) == expected
