"""table: certified accuracy by radius, a row per log, as in the paper's tables."""

from __future__ import annotations

from dataclasses import dataclass

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.logs import CertificationLog
from smoothadv.analysis.quantities import certified_accuracy, default_radii
from smoothadv.analysis.tables import Column, Table, radius_column
from smoothadv.settings import non_negative_float, setting


@ANALYSES.register("table")
@dataclass(frozen=True)
class CertifiedAccuracyTable:
    """a row per log: certified accuracy at each radius, the best of a column in bold"""

    radii: list[float] | None = setting(
        None,
        many=True,
        parse=non_negative_float,
        help="l2 radii of the columns (default: 0, 0.25, ... as far as anything is certified)",
    )

    def __call__(self, logs: list[CertificationLog]) -> Table:
        radii = self.radii or [0.0, *default_radii([log.table for log in logs])]
        return Table(
            [Column("log", "l2 radius", "text"), *map(radius_column, radii)],
            [[log.name, *(certified_accuracy(log.table, radius) for radius in radii)] for log in logs],
        )
