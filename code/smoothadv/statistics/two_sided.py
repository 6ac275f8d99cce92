"""CERTIFY with a bound on the strongest rival: both sides of Theorem 1 of Cohen et al. (2019), from
the same votes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smoothadv.base.settings import SettingError, number, setting
from smoothadv.statistics import COUNT_COLUMNS, PROCEDURES, FixedSample, Procedure
from smoothadv.statistics.bounds import two_sided_radius
from smoothadv.statistics.ranges import trusting, within_ranges

RIVAL = "rival"
"""Column of a log: the largest count of another class among the estimation draws."""


@within_ranges
def check_share(alpha_share: float, alpha: float, parts: int = 1) -> None:
    """ValueError unless this share of alpha, and each of ``parts`` of the rest, are above 0."""
    if not min(alpha_share * alpha, (1 - alpha_share) * alpha / parts) > 0:
        expected = f"one that leaves both shares of alpha = {alpha} above 0"
        raise SettingError(f"alpha_share: found {alpha_share}, expected {expected}")


@within_ranges
def strongest_rival(votes: np.ndarray, candidate: int) -> int:
    """The largest count in ``votes`` [K] of a class other than ``candidate``; 0 if there is
    none.
    """
    if not 0 <= candidate < len(votes):
        raise SettingError(f"candidate: found {candidate}, expected one of {len(votes)} classes")
    others = votes.copy()
    others[candidate] = 0
    return int(others.max())


@dataclass(frozen=True)
class SharedAlpha(Procedure):
    """Divides alpha between the bounds on p_A and on the rivals."""

    alpha_share: float = setting(
        0.9,
        help="the share of alpha that the lower bound on p_A may spend, fixed before any draw; the "
        "upper bound on the rivals has the rest",
        parse=number(float, "a share above 0 and below 1", lambda v: 0 < v < 1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.alpha_share, self.smoothing.alpha)


@PROCEDURES.register("two-sided")
@dataclass(frozen=True)
class TwoSided(SharedAlpha, FixedSample):
    """Select a class by n0 votes, then bound its probability, and that of its rivals, by n fresh
    votes.

    With c the most frequent of the n0 votes, k its count among the n and b the largest count of
    another class, returns c with radius ``bounds.two_sided_radius(k, b, n, ...)``, or abstains.
    That may be positive also where p_A < 1/2, if no rival is as probable.

    Formal guarantee: that of ``Procedure``; docs/guarantee.md has the proof.
    """

    certificate: ClassVar[str] = "two-sided"

    @classmethod
    def counts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        return (*COUNT_COLUMNS, RIVAL)

    @classmethod
    def radius_from(cls, counts: Mapping[str, int], settings: Mapping[str, Any]) -> float | None:
        successes, rival, trials = (counts[name] for name in ("successes", RIVAL, "trials"))
        levels = settings["alpha"], settings["alpha_share"], settings.get("noise_distance", 0.0)
        return two_sided_radius(successes, rival, trials, settings["sigma"], *levels)

    def certified_by(self, own: int, rival: int, trials: int) -> float:
        """The radius that these counts of a class and its strongest rival certify; negative if they
        certify none.
        """
        radius = self.shown({"successes": own, RIVAL: rival, "trials": trials})
        return -1.0 if radius is None else radius

    def rivals(self, votes: np.ndarray, candidate: int) -> list[int]:
        return [trusting(strongest_rival)(votes, candidate)]
