"""CERTIFY with a bound on the strongest rival: both sides of Theorem 1 of Cohen et al. (2019), from the same votes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smoothadv.bounds import two_sided_radius
from smoothadv.certification import ABSTAIN, PROCEDURES, Certificate, Draws, Procedure, Voting
from smoothadv.records import COUNT_COLUMNS
from smoothadv.settings import number, setting

DEFAULT_SHARE = 0.9
RIVAL = "rival"
"""Column of a log: the largest count of another class among the estimation draws."""


def share_setting() -> float:
    """The field that tells how alpha is divided between the bounds on p_A and on the rivals."""
    return setting(
        DEFAULT_SHARE,
        help="the share of alpha that the lower bound on p_A may spend, fixed before any draw; the upper bound on the "
        "rivals has the rest",
        parse=number(float, "a share above 0 and below 1", lambda v: 0 < v < 1),
    )


def check_share(alpha_share: float, alpha: float) -> None:
    """ValueError unless both parts of alpha are above 0."""
    if not (0 < alpha_share < 1 and alpha_share * alpha > 0 and (1 - alpha_share) * alpha > 0):
        raise ValueError(f"alpha_share must lie strictly between 0 and 1, got {alpha_share}")


def strongest_rival(votes: np.ndarray, candidate: int) -> int:
    """The largest count in ``votes`` [K] of a class other than ``candidate``; 0 if there is none."""
    return int(np.delete(votes, candidate).max(initial=0))


@PROCEDURES.register("two-sided")
@dataclass(frozen=True)
class TwoSided(Procedure):
    """Select a class by n0 votes, then bound its probability, and that of its rivals, by n fresh votes.

    With c the most frequent of the n0 votes, k its count among the n and b the largest count of another class, returns
    c with radius ``bounds.two_sided_radius(k, b, n, ...)``, or abstains. That may be positive also where p_A < 1/2, if
    no rival is as probable. Counting stops as soon as only an abstention is possible: this changes no decision, but
    the counts of such an abstention are partial.

    Formal guarantee: the probability, over the draws, of returning a class and a radius such that the
    smoothed classifier is not that class throughout the closed ball of that radius is at most alpha (proof:
    ``bounds.two_sided_radius``). It holds for each input by itself. It is void if draws are reused, if ``alpha_share``
    is chosen after the draws, or if the run is repeated until its result pleases.
    """

    default_n: ClassVar[int] = 100_000
    fixed_sample: ClassVar[bool] = True
    alpha_share: float = share_setting()

    def __post_init__(self) -> None:
        check_share(self.alpha_share, self.smoothing.alpha)

    @property
    def columns(self) -> tuple[str, ...]:
        return (RIVAL,)

    @classmethod
    def counts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        return (*COUNT_COLUMNS, RIVAL)

    @classmethod
    def radius_from(cls, counts: Mapping[str, int], settings: Mapping[str, Any]) -> float | None:
        successes, rival, trials = (counts[name] for name in ("successes", RIVAL, "trials"))
        levels = settings["alpha"], settings["alpha_share"]
        return two_sided_radius(successes, rival, trials, settings["sigma"], *levels)

    def candidate(self, selection: np.ndarray, label: int) -> int:
        """The class that the statement is about, by the votes [K] of the selection."""
        return int(selection.argmax())

    def rivals(self, votes: np.ndarray, candidate: int) -> list[int]:
        """The counts of other classes that the radius depends on, one for each of ``columns``."""
        return [strongest_rival(votes, candidate)]

    def radius(self, successes: int, rivals: list[int]) -> float | None:
        """The radius that these counts among n draws certify; None for an abstention."""
        s = self.smoothing
        return two_sided_radius(successes, rivals[0], s.n, s.sigma, s.alpha, self.alpha_share, s.noise_distance)

    def votes(self, label: int) -> Voting:
        selection = yield Draws(self.smoothing.n0)
        candidate = self.candidate(selection, label)

        def must_abstain(counts: np.ndarray) -> bool:
            most = self.smoothing.n - int(counts.sum() - counts[candidate])
            return self.radius(most, self.rivals(counts, candidate)) is None

        estimation = yield Draws(self.smoothing.n, must_abstain)
        successes, trials = int(estimation[candidate]), int(estimation.sum())
        rivals = self.rivals(estimation, candidate)
        radius = self.radius(successes, rivals) if trials == self.smoothing.n else None
        statement = (ABSTAIN, 0.0) if radius is None else (candidate, radius)
        return Certificate(*statement, successes, trials, dict(zip(self.columns, rivals)))
