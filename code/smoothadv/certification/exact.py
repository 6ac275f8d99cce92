"""CERTIFY of Cohen et al. (2019), section 3.2.2: fixed sample sizes, Clopper-Pearson, the exact binomial bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from smoothadv.bounds import certified_radius, minimum_successes_to_certify, minimum_trials_to_certify
from smoothadv.certification import ABSTAIN, PROCEDURES, Certificate, Draws, Procedure, Voting


@PROCEDURES.register("exact")
@dataclass(frozen=True)
class Exact(Procedure):
    """Select a class by n0 votes, then bound its probability by n fresh votes.

    With c the most frequent of the n0 votes (the smallest class among ties) and k its count among the n,
    returns c with radius sigma * Phi^-1(p_lower(k, n, alpha)), or abstains where p_lower < 1/2. Counting stops as soon
    as so many votes are against c that only an abstention is possible: this changes no decision, but the counts of
    such an abstention are partial.

    Formal guarantee: the probability, over the draws, of returning a class and a radius such that the
    smoothed classifier is not that class throughout the closed ball of that radius is at most alpha. It
    holds for each input by itself. It is void if draws are reused, or if the run is repeated until its result pleases.
    """

    default_n: ClassVar[int] = 100_000
    fixed_sample: ClassVar[bool] = True
    one_sided: ClassVar[bool] = True

    @classmethod
    def least_draws(cls, alpha: float) -> int:
        return minimum_trials_to_certify(alpha)

    @cached_property
    def _allowed_misses(self) -> int:
        n, alpha = self.smoothing.n, self.smoothing.alpha
        return max(0, n - minimum_successes_to_certify(n, alpha, self.smoothing.noise_distance))

    def votes(self, label: int) -> Voting:
        selection = yield Draws(self.smoothing.n0)
        candidate = int(selection.argmax())
        estimation = yield Draws(
            self.smoothing.n, lambda counts: int(counts.sum() - counts[candidate]) > self._allowed_misses
        )
        successes, trials = int(estimation[candidate]), int(estimation.sum())
        s = self.smoothing
        radius = certified_radius(successes, trials, s.sigma, s.alpha, s.noise_distance) if trials == s.n else None
        return Certificate(*((ABSTAIN, 0.0) if radius is None else (candidate, radius)), successes, trials)
