"""PREDICT of Cohen et al. (2019), section 3.2.1: the class of a smoothed classifier, or its top k;
or an abstention.
"""

from collections.abc import Generator
from itertools import count

import numpy as np

from smoothadv.statistics import Draws
from smoothadv.statistics.bounds import lead_is_significant, vote_is_significant
from smoothadv.statistics.ranges import within_ranges
from smoothadv.statistics.top_k import check_top_k, leading_classes

SELECTION_SHARE = 10
"""Of n draws, n // 10 (at least one) select the k classes of a top-k prediction."""


@within_ranges
def least_draws(alpha: float, top_k: int = 1) -> int:
    """The smallest n from which ``predict`` can return anything."""
    if top_k == 1:
        return next(n for n in count(1) if vote_is_significant(n, 0, alpha))
    votes = top_k * next(votes for votes in count(1) if lead_is_significant(votes, 0, alpha))
    return votes + max(1, (votes - 1) // (SELECTION_SHARE - 1))  # then n - _selecting(n) is votes


def _selecting(n: int) -> int:
    return max(1, n // SELECTION_SHARE)


@within_ranges
def predict(n: int, alpha: float, top_k: int = 1) -> Generator[Draws, np.ndarray, list[int]]:
    """PREDICT for one input: requests ``n`` votes and returns the ``top_k`` most probable classes,
    none if abstaining.

    With one class, ``predict_from_votes`` all of them. Else a tenth of the draws selects k classes,
    which it returns, the most frequent first, if among the others the least frequent of them leads
    all other classes significantly, by a one-sided binomial test at level ``alpha``. ValueError
    unless 1 <= ``top_k`` < the number of classes, or 1.

    Formal guarantee: the probability of returning a set that is not that of the k most probable
    classes is at most alpha (proof: docs/guarantee.md).
    """
    if top_k == 1:
        return predict_from_votes((yield Draws(n)), alpha)
    selection = yield Draws(_selecting(n))
    check_top_k(top_k, len(selection))
    votes = yield Draws(n - _selecting(n))
    leading = leading_classes(selection, top_k)
    least, rival = int(votes[leading].min()), int(np.delete(votes, leading).max())
    return leading if lead_is_significant(least, rival, alpha) else []


@within_ranges
def predict_from_votes(votes: np.ndarray, alpha: float) -> list[int]:
    """The class that leads ``votes`` [K] significantly, none if abstaining.

    A two-sided binomial test of the top count against the runner-up's at level ``alpha``; the
    smaller class goes first among ties, which are never significant.

    Formal guarantee: the probability of returning a class other than the smoothed classifier's is
    at most alpha.
    """
    order = np.argsort(-votes, kind="stable")
    top = int(votes[order[0]])
    runner_up = int(votes[order[1]]) if len(votes) > 1 else 0
    return [int(order[0])] if vote_is_significant(top, runner_up, alpha) else []
