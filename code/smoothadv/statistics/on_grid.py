"""Procedures that decide, at several looks at the votes, which radii of a grid are certified."""

import hashlib
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smoothadv.base.settings import non_negative_float, setting
from smoothadv.statistics import (
    LABEL_AWARE,
    LEVEL,
    LOOKS,
    SAMPLES,
    TABLES,
    Bound,
    Draws,
    Looked,
    Procedure,
    Votes,
)
from smoothadv.statistics.bounds import radius_probability
from smoothadv.statistics.ranges import trusting
from smoothadv.statistics.two_sided import RIVAL, strongest_rival

PAPER_RADII = tuple(0.25 * step for step in range(10))
"""SmoothAdv, table 2: the columns of CIFAR-10; and 0."""
SMALLEST_ALPHA = 1e-9
"""Each look reserves an error of 1e-12 against rounding, which would use up a smaller alpha."""
GRID_COLUMNS = (SAMPLES, LEVEL, LOOKS)


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
    )
    label_aware: bool = setting(
        False,
        help="for benchmarks only: stop if the selected class is not the true class; the log "
        "records it",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        radii = PAPER_RADII if self.radii is None else self.radii
        if self.smoothing.alpha < SMALLEST_ALPHA:
            raise ValueError(
                f"alpha must be at least {SMALLEST_ALPHA:g} for {type(self).__name__.lower()}, got "
                f"{self.smoothing.alpha:g}"
            )
        # One order, one description: the same radii in another order are the same procedure.
        object.__setattr__(self, "radii", tuple(sorted({0.0, *map(float, radii)})))

    def record(self) -> dict[str, Any]:
        digest = hashlib.sha256(b"".join(map(bytes, self.tables)))
        return {**super().record(), TABLES: digest.hexdigest()}

    @property
    @abstractmethod
    def tables(self) -> Sequence[Any]:
        """The bytes, or contiguous arrays, that decide the numbers besides the settings."""

    @property
    @abstractmethod
    def further_columns(self) -> tuple[str, ...]:
        """The columns beside ``GRID_COLUMNS`` and ``LABEL_AWARE``."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*GRID_COLUMNS, *self.further_columns, *((LABEL_AWARE,) if self.label_aware else ()))

    def skips(self, candidate: int, label: int) -> bool:
        return self.label_aware and candidate != label

    def details(self, own: Bound, votes: Votes, radius: float) -> dict[str, int]:
        level = sum(each <= radius for each in self.radii) - 1
        return {**super().details(own, votes, radius), LEVEL: level}


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
    def certified(self, own: int, others: int, look: int) -> float:
        """The largest radius that is certified for the candidate at this look by the votes for it,
        ``own``, and those for all classes but its strongest rival; negative if none is.

        The probability, over the draws, that any look certifies a radius within which the class of
        the smoothed classifier is not the candidate's must be at most alpha.
        """

    @abstractmethod
    def is_futile(self, own: int, others: int, look: int, following: float) -> bool:
        """Whether, by these votes, the radius ``following`` is too unlikely to be certified at a
        later look for drawing on.

        ``look`` is -1 for the votes of the selection. No answer can make a statement false.
        """

    def null(self, radius: float) -> float:
        """The largest p_A for which a radius is not certified by p_A alone; of a procedure with a
        ``threshold``, that must be exceeded in place of 1/2.
        """
        own, threshold = self.smoothing, getattr(self, "threshold", 0.5)
        return trusting(radius_probability)(float(radius), own.sigma, own.noise_distance, threshold)

    def shown(self, row: Mapping[str, int]) -> float | None:
        rival = row.get(RIVAL, row["trials"] - row["successes"])
        return self.largest(self.certified_by(row["successes"], rival, row["trials"]))

    def certified_by(self, own: int, rival: int, trials: int) -> float:
        """As ``certified``, of the counts of the candidate and of its strongest rival; negative
        where no look has so many trials.
        """
        if trials not in self.looks:
            return -1.0
        look = int(np.searchsorted(self.looks, trials))
        # Without a rival, all votes are for the candidate.
        return self.certified(own, trials - rival if rival else own, look)

    def details(self, own: Bound, votes: Votes, radius: float) -> dict[str, int]:
        rival = strongest_rival(votes[0], own.chosen)
        return {**super().details(own, votes, radius), RIVAL: rival}

    def counted(self, votes: np.ndarray, candidate: int) -> tuple[int, int]:
        """The ``votes`` [K] for the candidate, and those for all classes but its strongest
        rival.
        """
        return int(votes[candidate]), int(votes.sum()) - trusting(strongest_rival)(votes, candidate)

    def decide(
        self, selection: np.ndarray, candidate: int, most: float, stage: int
    ) -> Generator[Draws, np.ndarray, Looked]:
        """Look at the votes of fresh draws of a stage until the next radius up to ``most`` is
        certified for the candidate or out of reach; ``selection`` [K] are earlier votes.
        """
        votes = deciding = np.zeros_like(selection)
        drawn, looks, best = 0, 0, -1.0
        if not self.is_futile(*self.counted(selection, candidate), -1, 0.0):
            for look, n in enumerate(self.looks.tolist()):
                votes = votes + (yield Draws(n - drawn, stage=stage))
                drawn, looks = n, look + 1
                counts = self.counted(votes, candidate)
                if (radius := self.certified(*counts, look)) > best or best < 0:
                    best, deciding = max(radius, -1.0), votes
                following = next((r for r in self.radii if best < r <= most), None)
                if (
                    following is None
                    or n == self.smoothing.n
                    or self.is_futile(*counts, look, following)
                ):
                    break
        return Looked(best, deciding, drawn, looks)
