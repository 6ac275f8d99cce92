"""Procedures that decide, at several looks at the votes, which radii of a grid are certified."""

import io
import json
import math
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smoothadv.base.files import cached, digest
from smoothadv.base.settings import non_negative_float, setting
from smoothadv.statistics import Certificate, Draws, FixedSample, Looked, Procedure, Voting
from smoothadv.statistics.bounds import radius_probability
from smoothadv.statistics.error_spending import efficacy_table
from smoothadv.statistics.two_sided import RIVAL, strongest_rival

PAPER_RADII = tuple(0.25 * step for step in range(10))
"""0 and the columns of the paper's CIFAR-10 tables."""
SMALLEST_ALPHA = 1e-9
"""Each look reserves an error of 1e-12 against rounding, which would use up a smaller alpha."""
_VERSION = 3  # of the tables in the cache
GRID_COLUMNS = ("samples", "level", "looks")
LABEL_AWARE = "label_aware"
"""Columns of a log. samples counts all draws, level is the number of the largest radius that was
certified (-1: none), looks counts the looks; LABEL_AWARE is 1 where the class selected was not the
label. successes and trials are the counts at the look that certified the radius: later looks, for a
larger radius, may have a smaller share of successes."""


@dataclass(frozen=True)
class Bound:
    """A bound of a certificate: the ``test`` that decides it, of the class that was ``chosen`` by
    the ``selection``, votes [K] of the classifier of this ``stage``.
    """

    test: "FixedSample | GridProcedure"
    chosen: int
    selection: np.ndarray
    stage: int = 0


def decided(
    bounds: Sequence[Bound], most: float
) -> Generator[Draws, np.ndarray, tuple[float, dict[int, np.ndarray], int, int]]:
    """Decides ``bounds`` one after the other, each up to the radius that is left, which is ``most``
    at first; none if that is negative.

    Returns the smallest radius, negative if none is certified; the votes [K] of each stage at the
    look that decided; and the numbers of draws and looks.
    """
    drawn = looks = 0
    votes = {each.stage: np.zeros_like(each.selection) for each in bounds}
    for each in bounds:
        if most >= 0:
            looked = yield from each.test.decide(each.selection, each.chosen, most, each.stage)
            votes[each.stage], most = looked.votes, min(most, looked.radius)
            drawn, looks = drawn + looked.drawn, looks + looked.looks
    return most, votes, drawn, looks


@dataclass(frozen=True)
class OnGrid(Procedure):
    """Decides which radii of a grid are certified."""

    on_grid: ClassVar[bool] = True
    default_n: ClassVar[int] = 125_000
    radii: tuple[float, ...] = setting(
        None,
        help="l2 radii to decide, in addition to 0 (default: the columns of the paper's tables for "
        "the dataset)",
        parse=non_negative_float,
        many=True,
    )
    label_aware: bool = setting(
        False,
        help="for benchmarks only: stop if the selected class is not the true class; the log "
        "records it",
    )

    def __post_init__(self) -> None:
        radii = PAPER_RADII if self.radii is None else self.radii
        if self.smoothing.alpha < SMALLEST_ALPHA:
            name = type(self).__name__.lower()
            raise ValueError(
                f"alpha must be at least {SMALLEST_ALPHA:g} for {name}, got "
                f"{self.smoothing.alpha:g}"
            )
        # One order, one description: the same radii in another order are the same procedure.
        object.__setattr__(self, "radii", tuple(sorted({0.0, *map(float, radii)})))

    def largest(self, most: float) -> float | None:
        """The largest radius of the grid up to ``most``; None if there is none."""
        return max((radius for radius in self.radii if radius <= most), default=None)

    @property
    @abstractmethod
    def further_columns(self) -> tuple[str, ...]:
        """The columns beside ``GRID_COLUMNS`` and ``LABEL_AWARE``."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*GRID_COLUMNS, *self.further_columns, *((LABEL_AWARE,) if self.label_aware else ()))

    def details(self, most: float, skipped: bool, drawn: int, looks: int) -> dict[str, int]:
        """The ``columns`` of a log where bounds show a radius of ``most``; those of
        ``further_columns`` are 0.
        """
        level = sum(radius <= most for radius in self.radii) - 1
        known = {**dict(zip(GRID_COLUMNS, (drawn, level, looks))), LABEL_AWARE: int(skipped)}
        return {name: known.get(name, 0) for name in self.columns}


@dataclass(frozen=True)
class GridProcedure(OnGrid):
    """Selects a class by n0 votes, then looks at the votes of fresh draws until the next radius is
    out of reach.
    """

    further_columns: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def looks(self) -> np.ndarray:
        """The numbers of draws at which the votes are looked at: int64 [L], ascending, the last one
        is n.
        """

    @abstractmethod
    def certified(self, votes: np.ndarray, candidate: int, look: int) -> float:
        """The largest radius that ``votes`` [K] certify for the candidate at this look; negative if
        they certify none.

        Over the draws, some look certifies a radius at which the candidate is not certain with
        probability <= alpha.
        """

    @abstractmethod
    def is_futile(self, votes: np.ndarray, candidate: int, look: int, following: float) -> bool:
        """Whether the radius ``following`` is too unlikely to be certified at a later look for
        drawing on.

        ``look`` is -1 for the votes of the selection. No answer can make a statement false.
        """

    def null(self, radius: float) -> float:
        """The largest p_A for which a radius is not certified by p_A alone."""
        return radius_probability(
            float(radius), self.smoothing.sigma, self.smoothing.noise_distance
        )

    def shown(self, row: Mapping[str, int]) -> float | None:
        rival = row.get(RIVAL, row["trials"] - row["successes"])
        radius = self.certified_by(row["successes"], rival, row["trials"])
        return None if radius < 0 else radius

    def certified_by(self, own: int, rival: int, trials: int) -> float:
        """As ``certified``, of the counts of the candidate and of its strongest rival; negative
        where no look has so many trials.
        """
        look = int(np.searchsorted(self.looks, trials))
        if trials not in self.looks:
            return -1.0
        shared = trials - own  # by classes of which none has more than the strongest rival
        parts = divmod(shared, max(1, rival))
        return self.certified(np.array([own, *[rival] * parts[0], parts[1]]), 0, look)

    def run(self, label: int) -> Voting:
        n0 = self.smoothing.n0
        selection = yield Draws(n0)
        candidate = int(selection.argmax())
        skipped = self.label_aware and candidate != label
        bounds = [Bound(self, candidate, selection)]
        radius, votes, drawn, looks = yield from decided(bounds, -1.0 if skipped else math.inf)
        details = self.details(radius, skipped, n0 + drawn, looks)
        if RIVAL in details:
            details[RIVAL] = strongest_rival(votes[0], candidate)
        return Certificate.of(candidate, radius, votes[0], details)

    def decide(
        self, selection: np.ndarray, candidate: int, most: float = math.inf, stage: int = 0
    ) -> Generator[Draws, np.ndarray, Looked]:
        """Look at the votes of fresh draws of a stage until the next radius up to ``most`` is
        certified for the candidate or out of reach; ``selection`` [K] are earlier votes.
        """
        votes = deciding = np.zeros_like(selection)
        drawn, looks, best = 0, 0, -1.0
        if not self.is_futile(selection, candidate, -1, 0.0):
            for look, n in enumerate(self.looks):
                votes = votes + (yield Draws(int(n) - drawn, stage=stage))
                drawn, looks = int(n), look + 1
                if (radius := self.certified(votes, candidate, look)) > best or best < 0:
                    best, deciding = max(radius, -1.0), votes
                following = next((r for r in self.radii if best < r <= most), None)
                if (
                    following is None
                    or n == self.looks[-1]
                    or self.is_futile(votes, candidate, look, following)
                ):
                    break
        return Looked(best, deciding, drawn, looks)


def cached_tables(
    nulls: Sequence[Sequence[float]], looks: np.ndarray, levels: Sequence[float], early: float
) -> list[np.ndarray]:
    """The ``efficacy_table`` of each of ``nulls`` at its level, from this user's cache; missing or
    damaged, built.
    """

    def built() -> bytes:
        content = io.BytesIO()
        tables = [efficacy_table(each, looks, level, early) for each, level in zip(nulls, levels)]
        np.save(content, np.concatenate(tables))
        return content.getvalue()

    parameters = json.dumps([_VERSION, nulls, looks.tolist(), levels, early])
    name = "tables-" + digest([parameters])[:32]
    rows = np.load(io.BytesIO(cached(name, built)), allow_pickle=False)
    return np.split(rows, np.cumsum([len(each) for each in nulls])[:-1])
