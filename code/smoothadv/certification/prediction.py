"""PREDICT of Cohen et al. (2019), section 3.2.1: the smoothed classifier's class, or an abstention."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from smoothadv.bounds import vote_is_significant
from smoothadv.certification import ABSTAIN, Draws


def predict(n: int, alpha: float) -> Generator[Draws, np.ndarray, int]:
    """PREDICT for one input: requests ``n`` votes and returns the class that leads them significantly, or ABSTAIN."""
    votes = yield Draws(n)
    return predict_from_votes(votes, alpha)


def predict_from_votes(votes: np.ndarray, alpha: float) -> int:
    """The class that leads ``votes`` [K] significantly, or ABSTAIN.

    A two-sided binomial test of the top count against the runner-up's at level ``alpha``; the smaller
    class goes first among ties, which are never significant.

    Formal guarantee: the probability of returning a class other than the smoothed classifier's is at most
    alpha.
    """
    order = np.argsort(-votes, kind="stable")
    top = int(votes[order[0]])
    runner_up = int(votes[order[1]]) if len(votes) > 1 else 0
    return int(order[0]) if vote_is_significant(top, runner_up, alpha) else ABSTAIN
