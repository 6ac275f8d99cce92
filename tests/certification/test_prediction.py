"""PREDICT from counts of votes: against the two-sided binomial test of the two largest ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from smoothadv.certification import ABSTAIN
from smoothadv.certification.prediction import predict_from_votes

many = settings(deadline=None, derandomize=True, max_examples=100)


@many
@given(st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any), st.sampled_from([0.2, 0.05, 1e-3, 1e-6]))
def test_the_leader_is_returned_where_it_beats_the_runner_up_significantly(votes, alpha):
    *_, runner_up, top = sorted([0, *votes])
    is_significant = stats.binomtest(top, top + runner_up, 0.5).pvalue <= alpha
    assert predict_from_votes(np.array(votes), alpha) == (votes.index(top) if is_significant else ABSTAIN)


@pytest.mark.parametrize("last", [0, 1, 250])
@pytest.mark.parametrize(("top", "prediction"), [(330, ABSTAIN), (350, 1)])
def test_other_classes_than_the_two_leading_ones_do_not_matter(top, prediction, last):
    assert predict_from_votes(np.array([255, top, last]), 1e-3) == prediction
