"""summary: one row per log with everything that describes a certified classifier."""

from __future__ import annotations

from dataclasses import dataclass

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.logs import CertificationLog
from smoothadv.analysis.quantities import (
    abstention_rate,
    average_certified_radius,
    certified_accuracy,
    clean_accuracy,
    default_radii,
)
from smoothadv.analysis.tables import Column, Table, radius_column
from smoothadv.settings import non_negative_float, setting


@ANALYSES.register("summary")
@dataclass(frozen=True)
class Summary:
    """a row per log: examples, clean accuracy, average certified radius, abstention rate, certified accuracies"""

    radii: list[float] | None = setting(
        None,
        many=True,
        parse=non_negative_float,
        help="l2 radii of the columns (default: 0.25, 0.5, ... as far as anything is certified)",
    )

    def __call__(self, logs: list[CertificationLog]) -> Table:
        radii = self.radii or default_radii([log.table for log in logs])
        columns = [
            Column("log", "log", "text"),
            Column("examples", "examples", "count"),
            Column("clean_accuracy", "clean accuracy", "fraction"),
            Column("average_certified_radius", "average certified radius", "radius"),
            Column("abstention_rate", "abstention rate", "fraction"),
            *map(radius_column, radii),
        ]
        return Table(
            columns,
            [
                [
                    log.name,
                    len(log.table),
                    clean_accuracy(log.table),
                    average_certified_radius(log.table),
                    abstention_rate(log.table),
                    *(certified_accuracy(log.table, radius) for radius in radii),
                ]
                for log in logs
            ],
        )
