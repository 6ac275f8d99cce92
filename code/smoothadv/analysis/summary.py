"""summary: one row per log with everything that describes a certified classifier."""

from dataclasses import dataclass

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.shared.log_statistics import (
    abstention_rate,
    accuracy,
    average_certified_radius,
)
from smoothadv.analysis.shared.logs import Logs
from smoothadv.analysis.shared.radii import AtRadii, radius_column
from smoothadv.analysis.shared.selection import are_alike, labelling, labels_by, with_facts
from smoothadv.analysis.shared.table_formats import Cell, Column, Table

_ON_GRID = Column(
    "average_certified_radius_on_the_grid", "average certified radius (l2) on the grid", "number"
)


@ANALYSES.register("summary")
@dataclass(frozen=True)
class Summary(AtRadii, Analysis):
    """a row per log: examples, clean accuracy, average certified radius, abstention rate, certified
    accuracies
    """

    label_by: list[str] | None = labelling()

    def __call__(self, logs: Logs) -> Table:
        labelled = labels_by(logs.certification, by := self.label_by or [])
        radii = self.chosen_radii(logs.certification)
        grids = any(log.is_on_grid for log in logs.certification)
        columns = [
            Column(
                "log", "log" if self.heading == "l2 radius" else f"log (at {self.heading})", "text"
            ),
            Column("examples", "examples", "count"),
            Column("clean_accuracy", "clean accuracy", "fraction"),
            Column("average_certified_radius", "average certified radius (l2)", "number"),
            *([_ON_GRID] if grids else []),
            Column("abstention_rate", "abstention rate", "fraction"),
            *(radius_column(radius, are_alike(logs.certification)) for radius in radii),
        ]
        rows: list[list[Cell]] = [
            [
                label,
                len(log.table),
                accuracy(log.table),
                None if log.is_on_grid else average_certified_radius(log.table),
                *(
                    [average_certified_radius(log.table) if log.is_on_grid else None]
                    if grids
                    else []
                ),
                abstention_rate(log.table),
                *self.accuracies(log, radii).tolist(),
            ]
            for log, label in labelled
        ]
        return with_facts(Table(columns, rows), [log for log, _ in labelled], by)
