"""Certificates of a cascade: several smoothed classifiers, of which the first that is sure decides.

Stage j has a base classifier f_j and noise N_j of standard deviation sigma_j. With a threshold p0
in [1/2, 1), the cascade g(x) is the class b of the first stage j < K with P[f_j(x + N_j) = b] > p0;
where there is none, it is the most probable class of stage K. This is multi-scale smoothing (Jeong
and Shin, NeurIPS 2023), which also bounds all other classes at the stages before, but by asymptotic
intervals. The bounds from finitely many draws, with alpha undivided, and the sequential form are
this package's.

A certificate states that g is class c on the closed ball of radius R around x. The selection draws
choose c and a stage k; all bounds below are from other draws. It is true if, on that ball,

- at each stage j < k, no class but c has more than p0. A rival with probability q_j at x has at
  most Phi(Phi^-1(q_j) + r / sigma_j) at distance r (Cohen et al., 2019, lemma 4), which is at most
  p0 for r <= R_j = sigma_j (Phi^-1(p0) - Phi^-1(q_j)), the edge included; and
- at stage k < K, c has more than p0: for r < R_k = sigma_k (Phi^-1(p_k) - Phi^-1(p0)), with p_k its
  probability at x; or at stage K, c is more probable than any other class (``two-sided``).

For then the first stage that decides returns c: a stage before k that decides at all returns c, as
only c can have more than p0 there, and stage k decides for c if none did. No two classes have more
than p0 >= 1/2; a tie at p0 = 1/2 is no decision, which both conditions treat as such.

**All of alpha serves each bound.** Let T_j be the radius R_j or R_k for the true probabilities, and
j* the bound with the smallest T_j, the last one of several: it depends on c, k and the classifiers,
not on the draws of the bounds. If j* < k, the statement is true where R <= T_j*, as T_j* < T_k; if
j* = k, where R < T_k. R is the smallest radius that the bounds show. So a false statement needs
the bound j* alone to show more than T_j* (T_k or more, if j* = k), which has probability at most
alpha: the confidence bound on p_k fails so, and the one on q_j, too,
which is from the largest count of any class but c. That count is at least the count of the most
probable rival, and only its bound has to hold (as for ``two-sided``). Other bounds can only make R
smaller; neither do they matter by stopping early, nor need the stages' draws be independent.
"""

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
from scipy import special

from smoothadv.base.settings import SettingError, a_threshold, checked, positive_float, setting
from smoothadv.statistics import (
    COUNT_COLUMNS,
    PROCEDURES,
    TABLES,
    Bound,
    Draws,
    Selected,
    Smoothing,
    Votes,
    a_distance,
)
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.bounds import (
    failure_upper_bound,
    threshold_radius,
)
from smoothadv.statistics.on_grid import GridProcedure, OnGrid
from smoothadv.statistics.prediction import predict_from_votes
from smoothadv.statistics.ranges import within_ranges
from smoothadv.statistics.sequential import Sequential
from smoothadv.statistics.two_sided import RIVAL, SharedAlpha, TwoSided, strongest_rival

DEFAULT_THRESHOLD = 0.7
STAGE, RIVAL_AT, DRAWN_AT = "stage", "stage_{}_rival", "stage_{}_trials"
"""Columns of a log. STAGE is the number, from 1, of the stage whose lower bound on the class is in
the certificate: successes and trials are its counts. RIVAL_AT and DRAWN_AT have, of each stage, the
largest count of another class and the number of estimation draws; both are 0 of a stage that was
not looked at."""
Test: TypeAlias = TwoSided | GridProcedure
"""What decides one bound of a certificate."""


@dataclass(frozen=True)
class StagedProcedure(SharedAlpha):
    """What certificates of several smoothed classifiers share.

    ``sigmas`` and ``noise_distances`` (none: those of ``smoothing``) are what ``Smoothing`` has, of
    each classifier, in their order. Each bound has all of alpha, since a radius that is the
    smallest of several is too large only if one fixed bound fails. A sum of two bounds has
    ``alpha_share`` for the class and the rest for its rivals, as in ``two-sided``.
    """

    sigmas: tuple[float, ...] = setting((), parse=positive_float, kw_only=True)
    noise_distances: tuple[float, ...] = setting((), parse=a_distance, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sigmas = self.sigmas or (self.smoothing.sigma,)
        distances = self.noise_distances or (self.smoothing.noise_distance,) * len(sigmas)
        if max(sigmas) != self.smoothing.sigma:
            largest = f"the largest one to be {self.smoothing.sigma}"
            raise SettingError(f"sigmas: found {sigmas}, expected {largest}, that of smoothing")
        if len(distances) != len(sigmas):
            given = f"found {len(distances)}, expected one for each of {len(sigmas)} sigmas"
            raise SettingError(f"noise_distances: {given}")
        object.__setattr__(self, "sigmas", sigmas)
        object.__setattr__(self, "noise_distances", distances)

    @property
    def classifiers(self) -> int:
        return len(self.sigmas)

    @property
    @abstractmethod
    def bounds(self) -> Mapping[Any, Test]:
        """The tests of all bounds that a certificate may need."""

    def two_sided(self, own: Smoothing) -> Test:
        """The test of a class of one classifier, with a bound on its rivals."""
        return TwoSided(own, self.alpha_share)

    @property
    def smoothings(self) -> list[Smoothing]:
        """Those of the classifiers."""
        return [
            replace(self.smoothing, sigma=sigma, noise_distance=distance)
            for sigma, distance in zip(self.sigmas, self.noise_distances, strict=True)
        ]


@dataclass(frozen=True)
class StagedOnGrid(StagedProcedure, OnGrid):
    """What certificates of several smoothed classifiers share where each test looks several times
    at the votes.
    """

    @property
    def tables(self) -> list[bytes]:
        return [each.record()[TABLES].encode() for each in self.bounds.values()]

    def two_sided(self, own: Smoothing) -> Test:
        return Sequential(own, self.radii, alpha_share=self.alpha_share)

    def largest(self, radius: float) -> float | None:
        """The largest radius of the grid that is no larger; None if there is none."""
        return max((each for each in self.radii if each <= radius), default=None)


@dataclass(frozen=True)
class CascadeProcedure(StagedProcedure):
    """What the certificates of a cascade share: the threshold, and the choice of class and
    stage.
    """

    certificate: ClassVar[str] = "cascade"
    threshold: float = setting(DEFAULT_THRESHOLD, parse=a_threshold)

    def selected(self, label: int) -> Generator[Draws, np.ndarray, Selected]:
        """Draw n0 votes of each stage, which select the stage whose certificate promises the
        largest radius, and its class.
        """
        votes = []
        for stage in range(len(self.sigmas)):
            votes.append((yield Draws(self.smoothing.n0, stage=stage)))
        promised = [self.promised(votes, stage) for stage in range(len(votes))]
        last = int(np.argmax([min(radii) for radii in promised]))
        candidate = int(votes[last].argmax())
        bounds = [
            Bound(self.bounds[stage, stage < last], candidate, votes[stage], stage)
            for stage in range(last + 1)
        ]
        own = bounds[last]
        if self.on_grid:  # what decides soonest first
            bounds.sort(key=lambda bound: promised[last][bound.stage])
        return own, bounds, len(votes) * self.smoothing.n0

    def promised(self, votes: Sequence[np.ndarray], stage: int) -> list[float]:
        """The radii that the bounds of a certificate of this stage have, in the order of stages, if
        shares of votes are probabilities.
        """
        candidate, drawn = int(votes[stage].argmax()), self.smoothing.n0
        z0, radii = float(special.ndtri(self.threshold)), list[float]()
        for sigma, counts in zip(self.sigmas[: stage + 1], votes):
            own, rival = int(counts[candidate]), strongest_rival(counts, candidate)
            z_own, z_rival = special.ndtri((np.array([own, rival]) + 0.5) / (drawn + 1))
            if len(radii) < stage:
                radius = z0 - z_rival
            else:
                radius = z_own - z0 if stage < len(votes) - 1 else (z_own - z_rival) / 2
            radii.append(sigma * float(radius))
        return radii

    @cached_property
    def bounds(self) -> dict[tuple[int, bool], Test]:
        """The tests, by stage and by whether they are about the rivals alone."""
        bounds: dict[tuple[int, bool], Test] = {}
        for place, own in enumerate(self.smoothings[:-1]):
            bounds[place, False] = self.exceeding(own, self.threshold, of_others=False)
            bounds[place, True] = self.exceeding(own, 1 - self.threshold, of_others=True)
        return bounds | {(len(self.sigmas) - 1, False): self.two_sided(self.smoothings[-1])}

    def exceeding(self, own: Smoothing, threshold: float, of_others: bool) -> Test:
        """The test of whether a probability exceeds a threshold: that of the class, or that of all
        classes but the strongest rival.
        """
        return _Exceeding(own, threshold=threshold, of_others=of_others)

    @classmethod
    def counts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        rivals = (RIVAL_AT.format(number + 1) for number in range(len(settings["sigmas"])))
        return (*COUNT_COLUMNS, STAGE, *rivals)

    def shown(self, row: Mapping[str, int]) -> float | None:
        last, radii = row[STAGE] - 1, list[float]()
        for stage in range(last + 1):
            rival = row[RIVAL_AT.format(stage + 1)]
            trials = row.get(DRAWN_AT.format(stage + 1), row["trials"])
            own = row["successes"] if stage == last else trials - rival
            bound = self.bounds[stage, stage < last]
            radii.append(bound.certified_by(own, rival, trials))
        return self.largest(min(radii))

    def details(self, own: Bound, votes: Votes, radius: float) -> dict[str, int]:
        known = {**super().details(own, votes, radius), STAGE: own.stage + 1}
        for stage, counts in votes.items():
            known[RIVAL_AT.format(stage + 1)] = strongest_rival(counts, own.chosen)
            known[DRAWN_AT.format(stage + 1)] = int(counts.sum())
        return known


@PROCEDURES.register("cascade")
@dataclass(frozen=True)
class Cascade(CascadeProcedure):
    """Certify a cascade of smoothed classifiers by n votes of each stage that matters.

    n0 votes of every stage choose a class c and a stage k. Of the stages before k, the strongest
    rival's probability q_j is bounded from above, R_j = sigma_j (Phi^-1(p0) - Phi^-1(q_j)). At
    stage k < K, c's probability is bounded from below, R_k = sigma_k (Phi^-1(p_k) - Phi^-1(p0)); at
    the last stage, R_K is the radius of ``two_sided_radius``. The result is c with the smallest of
    these radii, or an abstention.

    Formal guarantee: the probability, over the draws, of a class and a radius such that the cascade
    is not that class throughout the closed ball of that radius is at most alpha.
    """

    fixed_sample: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class _Exceeding(TwoSided):
    """The radius at which a probability exceeds ``threshold``, by n votes: that of the candidate,
    or with ``of_others`` that of all classes but the strongest rival.
    """

    threshold: float
    of_others: bool

    @classmethod
    def radius_from(cls, counts: Mapping[str, int], settings: Mapping[str, Any]) -> float | None:
        own, trials = counts["successes"], counts["trials"]
        counted = trials - counts[RIVAL] if settings["of_others"] else own
        levels = settings["alpha"], settings["threshold"], settings["noise_distance"]
        radius = threshold_radius(counted, trials, settings["sigma"], *levels)
        return None if radius < 0 else radius


@dataclass(frozen=True, kw_only=True)
class _ExceedingOnGrid(Adaptive):
    """As ``_Exceeding``, radii of a grid."""

    threshold: float
    of_others: bool

    def successes(self, own: int, others: int) -> int:
        return others if self.of_others else own


@PROCEDURES.register("sequential-cascade")
@dataclass(frozen=True)
class SequentialCascade(StagedOnGrid, CascadeProcedure):
    """Decide radii of a grid for a cascade of smoothed classifiers, with as many draws of each
    stage as its decision needs.

    The certificates are those of ``cascade``. Each bound is a sequential test of its own: of p_k
    and of the rivals before the last stage those of ``adaptive``, with p0 in place of 1/2; at the
    last stage that of ``sequential``. The one that promises the smallest radius is decided first,
    and the next ones only up to the radius that is left.

    Formal guarantee: that of ``cascade``, however early the tests stop: a false statement needs one
    fixed test to reject one fixed row of its table, at the last stage one of two fixed rows.
    """

    def exceeding(self, own: Smoothing, threshold: float, of_others: bool) -> Test:
        return _ExceedingOnGrid(own, self.radii, threshold=threshold, of_others=of_others)

    @property
    def further_columns(self) -> tuple[str, ...]:
        drawn = (DRAWN_AT.format(number + 1) for number in range(len(self.sigmas)))
        return (*self.counts(vars(self))[len(COUNT_COLUMNS) :], *drawn)


@within_ranges
def predict_in_cascade(
    n: int, alpha: float, threshold: float, stages: int
) -> Generator[Draws, np.ndarray, list[int]]:
    """PREDICT for a cascade, as ``prediction.predict``: by n votes of each stage until one decides.

    A stage before the last one decides if the lower bound on its most frequent class is above the
    threshold, and leaves it to the next one if the upper bound is not; else the answer is none.
    Each bound has alpha / (2 * stages).

    Formal guarantee: the class is another one than the cascade's with probability at most alpha.
    Each stage errs with probability at most alpha / stages. Where a class has more than the
    threshold, either this class is passed over, or another one decides, for which more than half of
    the votes must be against it. Where no class has more, one of them decides; by convexity of the
    tail, two classes that share all votes are the worst case.
    """
    checked("threshold", threshold, a_threshold)
    level = alpha / (2 * stages)
    for stage in range(stages - 1):
        votes = yield Draws(n, stage=stage)
        leading, count = int(votes.argmax()), int(votes.max())
        if failure_upper_bound(count, n, level) < (1 - threshold) * (1 - 1e-15):
            return [leading]
        if failure_upper_bound(n - count, n, level) > threshold:
            return []
    return predict_from_votes((yield Draws(n, stage=stages - 1)), 2 * level)
