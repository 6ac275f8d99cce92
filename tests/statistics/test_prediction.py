"""PREDICT from counts of votes: against binomial tests, and how often a set of k classes is wrong.

A check on random outcomes rejects what is right with probability at most 1e-6, and is shown to
reject what is wrong.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from smoothadv.statistics import Draws
from smoothadv.statistics.bounds import lead_is_significant
from smoothadv.statistics.prediction import least_draws, predict, predict_from_votes
from support.statistical_checks import too_many
from support.votes import outcome


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any),
    st.sampled_from([0.2, 0.05, 1e-3, 1e-6]),
)
def test_the_leader_is_returned_where_it_beats_the_runner_up_significantly(votes, alpha):
    *_, runner_up, top = sorted([0, *votes])
    assert predict_from_votes(np.array(votes), alpha) == (
        [votes.index(top)] if stats.binomtest(top, top + runner_up, 0.5).pvalue <= alpha else []
    )


def predicted(votes: list[np.ndarray], n: int, alpha: float, top_k: int) -> list[int]:
    """What ``predict`` returns when its requests get these votes."""
    answers = iter(votes)
    return outcome(predict(n, alpha, top_k), lambda request: next(answers))


def test_a_set_is_selected_by_a_tenth_of_the_votes_and_proved_by_the_others():
    selection = np.array([40, 30, 20, 10, 0])
    assert predicted([selection, np.array([380, 280, 30, 200, 10])], 1000, 1e-3, 2) == [0, 1]
    assert predicted([selection, np.array([280, 380, 30, 200, 10])], 1000, 1e-3, 2) == [0, 1]
    assert (
        predicted([selection, np.array([380, 220, 90, 200, 10])], 1000, 1e-3, 2) == []
    )  # 220 do not lead 200
    assert predicted([selection, np.array([380, 280, 200, 30, 10])], 1000, 1e-3, 3) == [0, 1, 2]
    assert predicted([np.array([630, 320, 50, 0, 0])], 1000, 1e-3, 1) == [0]
    for n, selecting in [(2, 1), (9, 1), (19, 1), (20, 2)]:
        voting = predict(n, 0.5, 2)
        assert [next(voting), voting.send(selection)] == [Draws(selecting), Draws(n - selecting)]


@pytest.mark.parametrize(
    ("p", "k"), [([0.3, 0.2, 0.2, 0.3], 3), ([0.1] * 10, 4), ([0.5, 0.25, 0.25], 2)]
)
def test_a_set_is_wrong_no_more_often_than_alpha(p, k):
    """Every set is as good as one that is wrong: a class in it ties with one outside."""
    alpha, runs = 0.02, 4000
    generator = np.random.default_rng(k)
    selections, votes = generator.multinomial(50, p, runs), generator.multinomial(450, p, runs)
    true = set(np.argsort(p)[::-1][:k].tolist())
    ties = {index for index, value in enumerate(p) if value == sorted(p)[::-1][k]}

    def wrong(select: np.ndarray) -> int:
        sets = [predicted([one, two], 500, alpha, k) for one, two in zip(select, votes)]
        return sum(
            bool(found) and (bool(ties & set(found)) or set(found) != true) for found in sets
        )

    assert not too_many(wrong(selections), runs, alpha)
    if len(p) == 3:  # the set is chosen by the votes that then prove it
        assert too_many(wrong(votes), runs, alpha)


@given(st.integers(0, 400), st.integers(0, 400), st.sampled_from([0.7, 0.2, 0.05, 1e-3, 1e-9]))
@example(200, 200, 0.7)
def test_a_lead_is_that_of_the_one_sided_binomial_test(ahead, behind, alpha):
    tail = sum(
        Fraction(math.comb(ahead + behind, k), 2 ** (ahead + behind))
        for k in range(ahead, ahead + behind + 1)
    )
    expected = ahead > behind and tail <= Fraction(alpha)
    assert lead_is_significant(ahead, behind, alpha) == expected
    assert not lead_is_significant(ahead, behind, math.nextafter(float(tail), 0)), (
        "no rounding may decide for it"
    )
    if expected:
        assert lead_is_significant(ahead + 1, behind, alpha) and lead_is_significant(
            ahead, max(0, behind - 1), alpha
        )


# At 2^-10, the p-value of 11 equal votes is the level itself.
@pytest.mark.parametrize("alpha", [0.5, 0.05, 2**-10, 1e-3, 1e-300])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_from_the_least_number_of_draws_on_something_can_be_returned(alpha, top_k):
    least = least_draws(alpha, top_k)

    def best(n: int) -> list[int]:
        """What is returned where each of the first ``top_k`` classes gets an equal part of all
        votes.
        """
        requests = [n] if top_k == 1 else [max(1, n // 10), n - max(1, n // 10)]
        votes = [
            np.array([*((wanted + place) // top_k for place in range(top_k)), 0, 0, 0])
            for wanted in requests
        ]
        return predicted(votes, n, alpha, top_k)

    assert not best(least - 1) and set(best(least)) == set(range(top_k)) and best(least + 1)
