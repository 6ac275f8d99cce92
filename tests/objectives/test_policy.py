"""Which training images a data policy keeps, how it weighs and draws them, and before which epochs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from smoothadv.errors import UserError
from smoothadv.objectives import DataPolicy

FALSE_ALARM = 1e-6


@pytest.mark.parametrize("percent", [1, 40, 50, 75, 99, 100])
def test_images_with_fewer_votes_than_the_share_are_left_out(percent):
    votes = np.arange(101)
    assert DataPolicy(0, percent / 100).kept(votes).tolist() == [float(count >= percent) for count in votes]


@given(percent=st.integers(0, 100), draws=st.sampled_from([1, 7, 16, 100, 1000]))
def test_kept_is_one_or_zero_and_more_votes_never_leave_an_image_out(percent, draws):
    kept = DataPolicy(0, percent / 100, drop_draws=draws).kept(np.arange(draws + 1))
    assert kept.dtype == np.float64 and set(kept) <= {0.0, 1.0} and (np.diff(kept) >= 0).all() and kept[-1] == 1
    assert abs((kept == 0).sum() - percent * draws / 100) <= 1


def test_policy_that_leaves_nothing_is_refused():
    with pytest.raises(UserError, match=r"--drop-below 0.5 leaves none of 3 .* 49%"):
        DataPolicy(0, 0.5).kept(np.array([0, 49, 12]))


def test_weights_are_quantiles_of_confidence_bounds_of_at_least_three_quarters_of_the_votes():
    for draws in (16, 100):
        weights = DataPolicy(0, resample_draws=draws).weights(np.arange(draws + 1))
        # The lower end of a two-sided interval at .2 is the one-sided bound at .1.
        counts = np.maximum(np.arange(draws + 1), 0.75 * draws)
        expected = stats.norm.ppf(proportion_confint(counts, draws, alpha=0.2, method="beta")[0])
        np.testing.assert_allclose(weights, expected, rtol=1e-9)
        assert len(set(weights)) == draws // 4 + 1 and weights.min() > 0
        wrong = stats.norm.ppf(proportion_confint(counts, draws, alpha=0.1, method="beta")[0])
        assert abs(weights / wrong - 1).max() > 0.05, "a control"
    assert DataPolicy(0).weights(np.array([16]))[0] == pytest.approx(stats.norm.ppf(0.1 ** (1 / 16)))


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("drop_below", [0.0, 0.4])
def test_looks_come_before_the_epochs_that_count(every, drop_below):
    policy = DataPolicy(2, drop_below, every)
    assert [epoch for epoch in range(10) if policy.drops_before(epoch)] == ([2] if drop_below else [])
    expected = {0: [], 1: list(range(2, 10)), 3: [2, 5, 8]}[every]
    assert [epoch for epoch in range(10) if policy.weighs_before(epoch)] == expected


def drawn(weights: list[float], seed: int = 0) -> np.ndarray:
    return DataPolicy.order(np.array(weights, dtype=np.float64), torch.Generator().manual_seed(seed)).numpy()


def test_images_are_drawn_in_proportion_to_their_weights():
    """A chi-square test of 20,000 draws of 20,000 images of 20 weights; equal weights are told from them."""
    kinds = np.tile(np.linspace(0.2, 2, 20), 1000)
    counts = np.bincount(drawn(kinds.tolist()) % 20, minlength=20)
    assert stats.chisquare(counts, kinds[:20] / kinds[:20].sum() * len(kinds)).pvalue > FALSE_ALARM
    assert stats.chisquare(counts).pvalue < FALSE_ALARM, "a control"
    # Draws are independent: of so many a share exp(-1) of images with the mean weight is never drawn.
    same = drawn([1.0] * 20_000)
    missed = 20_000 - len(set(same.tolist()))
    deviation = math.sqrt(20_000 * math.exp(-1) * (1 - 2 * math.exp(-1)))  # of an occupancy problem
    assert abs(missed - 20_000 * math.exp(-1)) < -stats.norm.ppf(FALSE_ALARM / 2) * deviation


@given(weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.3, 1.0, 1e9]), min_size=1, max_size=30).filter(any))
def test_weights_of_zero_are_never_drawn(weights):
    """The first, the last and those in between; all indices are of images, as many as there are."""
    for seed in range(5):
        order = drawn(weights, seed)
        assert order.dtype == np.int64 and len(order) == len(weights)
        assert all(weights[index] > 0 for index in order)
        assert (order == drawn(weights, seed)).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_ends_of_the_unit_interval_draw_the_first_and_the_last_image_with_a_weight(number, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.full((size,), number, dtype=torch.float64))
    for weights in ([0, 0, 0.1, 0.7, 0], [0, 3, 1e-20, 0.1, 0]):
        positive = np.flatnonzero(weights)
        assert set(drawn(weights)) == {positive[-1 if number else 0]}
