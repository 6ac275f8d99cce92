"""Certificates of a router: a smoothed classifier that says which of several stages classifies.

Stage j has a base classifier f_j and noise of standard deviation sigma_j; its smoothed class is the
most probable one. The router h is a classifier of images into the numbers of the stages, with noise
of its own. g(x) is the class of the stage that the smoothed router chooses for x (dual randomized
smoothing, Sun, Mao and Vechev, ICLR 2026). If the router chooses k on the closed ball of radius R
around x, and stage k has class c there, then g is c on that ball.

The selection draws choose k and c. R is the smaller one of the radii that ``two-sided`` certifies
for the router's k and for the stage's c, each at alpha. Of the two true radii, the smaller one
belongs to a fixed bound, since k and c are chosen: a false statement needs this bound to fail, so
that alpha is not divided (as in ``cascade``), and the draws need not be independent.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from smoothadv.base.settings import SettingError
from smoothadv.statistics import COUNT_COLUMNS, PROCEDURES, Bound, Draws, Selected, Votes
from smoothadv.statistics.cascade import STAGE, StagedOnGrid, StagedProcedure, Test
from smoothadv.statistics.prediction import predict_from_votes
from smoothadv.statistics.ranges import within_ranges
from smoothadv.statistics.two_sided import RIVAL, strongest_rival

ROUTED, ROUTED_RIVAL, ROUTED_TRIALS = "router_successes", "router_rival", "router_trials"
"""Columns of a log: of the router's estimation draws, the count of the stage, the largest count of
another stage, and all."""


@dataclass(frozen=True)
class RouterProcedure(StagedProcedure):
    """What the certificates of a router share; the last one of ``sigmas`` is the router's."""

    certificate: ClassVar[str] = "router"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sigmas) < 3:
            expected = "those of two stages or more, and last the router's"
            raise SettingError(f"sigmas: found {self.sigmas}, expected {expected}")

    def selected(self, label: int) -> Generator[Draws, np.ndarray, Selected]:
        """Draw n0 votes of the router, which select a stage, and n0 of it, which select a class."""
        router, n0 = len(self.sigmas) - 1, self.smoothing.n0
        routed = yield Draws(n0, stage=router)
        stage = int(routed.argmax())
        votes = yield Draws(n0, stage=stage)
        own = Bound(self.bounds[stage], int(votes.argmax()), votes, stage)
        bounds = [Bound(self.bounds[router], stage, routed, router), own]
        if self.on_grid:  # what decides soonest first
            bounds.sort(key=lambda one: self.sigmas[one.stage] * (one.selection.max() / n0 - 0.5))
        return own, bounds, 2 * n0

    @cached_property
    def bounds(self) -> dict[int, Test]:
        """The test of each stage, and last of the router."""
        return {place: self.two_sided(own) for place, own in enumerate(self.smoothings)}

    def shown(self, row: Mapping[str, int]) -> float | None:
        of_router = row[ROUTED], row[ROUTED_RIVAL], row.get(ROUTED_TRIALS, row["trials"])
        of_stage = row["successes"], row[RIVAL], row["trials"]
        stage, router = self.bounds[row[STAGE] - 1], self.bounds[len(self.sigmas) - 1]
        return self.largest(min(router.certified_by(*of_router), stage.certified_by(*of_stage)))

    def details(self, own: Bound, votes: Votes, radius: float) -> dict[str, int]:
        routed = votes[len(self.sigmas) - 1]
        return {
            **super().details(own, votes, radius),
            STAGE: own.stage + 1,
            RIVAL: strongest_rival(votes[own.stage], own.chosen),
            ROUTED: int(routed[own.stage]),
            ROUTED_RIVAL: strongest_rival(routed, own.stage),
            ROUTED_TRIALS: int(routed.sum()),
        }


@PROCEDURES.register("router")
@dataclass(frozen=True)
class Router(RouterProcedure):
    """Certify a router and its stages by n votes of the router and n votes of one stage.

    The radius is the smaller one of the radii of ``two_sided_radius``, of the router for the stage
    that the selection draws choose, and of that stage for the class that they choose.

    Formal guarantee: that of ``Procedure``, of the router with its stages.
    """

    fixed_sample: ClassVar[bool] = True

    @classmethod
    def counts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        return (*COUNT_COLUMNS, STAGE, RIVAL, ROUTED, ROUTED_RIVAL)


@PROCEDURES.register("sequential-router")
@dataclass(frozen=True)
class SequentialRouter(StagedOnGrid, RouterProcedure):
    """Decide radii of a grid for a router and its stages, with as many draws of each as its
    decision needs.

    The certificates are those of ``router``; each of the two bounds is ``sequential``. The one that
    the selection draws make smaller is decided first, and the other one up to that radius.

    Formal guarantee: that of ``router``, however early the tests stop.
    """

    further_columns: ClassVar[tuple[str, ...]] = (STAGE, RIVAL, ROUTED, ROUTED_RIVAL, ROUTED_TRIALS)


@within_ranges
def predict_by_router(n: int, alpha: float, stages: int) -> Generator[Draws, np.ndarray, list[int]]:
    """PREDICT for a router with so many stages, as ``prediction.predict``: by n votes of the router
    and n votes of the stage that they predict, each at alpha / 2.
    """
    routed = predict_from_votes((yield Draws(n, stage=stages)), alpha / 2)
    return predict_from_votes((yield Draws(n, stage=routed[0])), alpha / 2) if routed else []
