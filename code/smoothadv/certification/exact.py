"""CERTIFY of Cohen et al. (2019), section 3.2.2: fixed sample sizes, Clopper-Pearson, the exact binomial bound."""

from __future__ import annotations

from smoothadv.bounds import certified_radius
from smoothadv.certification import ABSTAIN, PROCEDURES, Certificate, VoteCounter


@PROCEDURES.register("exact")
def certify_exact(count_votes: VoteCounter, *, sigma: float, n0: int, n: int, alpha: float) -> Certificate:
    """Select a class by ``n0`` votes, then bound its probability by ``n`` fresh votes.

    With c the most frequent of the n0 votes (the smallest class among ties) and k its count among the n,
    returns c with radius sigma * Phi^-1(p_lower(k, n, alpha)), or abstains where p_lower < 1/2.

    Formal guarantee: the probability, over the draws, of returning a class and a radius such that the
    smoothed classifier is not that class throughout the open ball of that radius is at most alpha. It
    holds for each input by itself and is void if draws are reused or the run repeated until it pleases.
    """
    selection, estimation = count_votes(n0, n)
    candidate = int(selection.argmax())
    successes = int(estimation[candidate])
    radius = certified_radius(successes, n, sigma, alpha)
    if radius is None:
        return Certificate(ABSTAIN, 0.0, successes, n)
    return Certificate(candidate, radius, successes, n)
