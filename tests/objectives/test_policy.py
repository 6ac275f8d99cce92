"""Which training images a data policy keeps, how it weighs and draws them, and before which
epochs.
"""

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from smoothadv.base.errors import UserError
from smoothadv.objectives import OBJECTIVES, DataPolicy

FALSE_ALARM = 1e-6


def test_images_with_fewer_votes_than_the_share_are_left_out():
    votes = np.arange(101)
    for percent in range(1, 101):
        kept = DataPolicy(0, percent / 100).kept(votes)
        assert kept.tolist() == [float(count >= percent) for count in votes], percent
    with pytest.raises(UserError, match=r"--drop-below .* leaves none of 2 .* 0%"):
        DataPolicy(0, 0.01).kept(np.zeros(2))


def test_weights_are_quantiles_of_bounds_of_at_least_three_quarters_of_the_votes():
    for draws in (16, 100):
        weights, counts = (
            DataPolicy(0, resample_draws=draws).weights(np.arange(draws + 1)),
            np.arange(draws + 1),
        )
        # The lower end of a two-sided interval at .2 is the one-sided bound at .1; at .1 it is a
        # control.
        ours, wrong = (
            stats.norm.ppf(
                proportion_confint(
                    np.maximum(counts, 0.75 * draws), draws, alpha=alpha, method="beta"
                )[0]
            )
            for alpha in (0.2, 0.1)
        )
        np.testing.assert_allclose(weights, ours, rtol=1e-9)
        assert weights.min() > 0 and abs(weights / wrong - 1).max() > 0.05


def test_policy_of_acr_weakness_is_the_papers():
    objectives = [OBJECTIVES["acr-weakness"](noise_sd=noise_sd) for noise_sd in (0.25, 0.5, 1.0)]
    assert [objective.policy for objective in objectives] == [
        *(DataPolicy(60, 0.5, 10), DataPolicy(70, 0.4, 10), DataPolicy(60, 0.4, 10))
    ]
    assert [[each.epsilon(epoch) for epoch in (59, 60, 69, 70)] for each in objectives] == [
        *([0, 0.75, 0.75, 0.75], [0, 0, 0, 1.5], [0, 2, 2, 2])
    ], "the attack begins with the policy"


@pytest.mark.parametrize(
    "wrong",
    [
        {"from_epoch": -1},
        {"resample_draws": 3},
        {"drop_draws": 0},
        {"drop_below": -1e-9},
        {"drop_below": 1 + 1e-9},
        {"resample_every": -1},
    ],
)
def test_policy_that_makes_no_sense_is_refused(wrong):
    """With 3 draws a bound of 2 votes is below a half, and its quantile is no weight."""
    with pytest.raises(ValueError):
        DataPolicy(**{"from_epoch": 0, **wrong})


@pytest.mark.parametrize(("every", "looks"), [(0, []), (1, [2, 3, 4, 5, 6, 7, 8]), (3, [2, 5, 8])])
@pytest.mark.parametrize("drop_below", [0.0, 0.4])
def test_looks_come_before_the_epochs_that_count(every, looks, drop_below):
    policy = DataPolicy(2, drop_below, every)
    assert [epoch for epoch in range(9) if policy.drops_before(epoch)] == (
        [2] if drop_below else []
    )
    assert [epoch for epoch in range(9) if policy.weighs_before(epoch)] == looks


def drawn(weights: list[float], seed: int = 0) -> np.ndarray:
    return DataPolicy.order(
        np.array(weights, dtype=np.float64), torch.Generator().manual_seed(seed)
    ).numpy()


def test_images_are_drawn_independently_in_proportion_to_their_weights():
    """Chi-square tests of 20,000 draws: of which of 20 weights they have, and of which follows
    which of 3.
    """
    kinds = np.tile(np.linspace(0.2, 2, 20), 1000)
    counts = np.bincount(drawn(kinds.tolist()) % 20, minlength=20)
    assert stats.chisquare(counts, kinds[:20] / kinds[:20].sum() * len(kinds)).pvalue > FALSE_ALARM
    assert stats.chisquare(counts).pvalue < FALSE_ALARM, "a control"
    order = drawn([1.0] * 20_001) % 3
    assert stats.chi2_contingency(np.histogram2d(order[:-1], order[1:], 3)[0]).pvalue > FALSE_ALARM
    assert len(set(drawn([1.0] * 1000).tolist())) < 800, "with replacement"


@given(
    weights=st.lists(
        st.sampled_from([0.0, 1e-300, 1e-9, 0.3, 1.0, 1e9]), min_size=1, max_size=30
    ).filter(any),
    number=st.sampled_from([None, 0.0, 1 - 2**-53]),
)
@example([0.0, 1.0], 0.0)
@example([1.0, 0.0], 1 - 2**-53)
def test_weights_of_zero_are_never_drawn(weights, number):
    """Nor at the ends of the interval of random numbers, where the first and the last image with a
    weight are.
    """
    fixed = mock.Mock(return_value=torch.full((len(weights),), number or 0.0, dtype=torch.float64))
    with contextlib.nullcontext() if number is None else mock.patch.object(torch, "rand", fixed):
        order = drawn(weights)
    assert (
        order.dtype == np.int64
        and len(order) == len(weights)
        and all(weights[index] > 0 for index in order)
    )
    assert number != 0 or order[0] == np.flatnonzero(weights)[0]
