"""summary: one row per log with everything that describes a certified classifier."""

from dataclasses import dataclass

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.logs import Logs
from smoothadv.analysis.radii import AtRadii
from smoothadv.analysis.selection import are_alike, labelling, labels_by, with_columns_of_logs
from smoothadv.analysis.table_formats import Cell, Column, Table
from smoothadv.statistics.accuracy import (
    abstention_rate,
    accuracy,
    average_certified_radius,
)

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
        by = self.label_by or []
        labelled = labels_by(logs.certification, by)
        radii = self.chosen_radii(logs.certification)
        title = "log" if self.heading == "l2 radius" else f"log (at {self.heading})"
        columns = [
            Column("log", title, "text"),
            Column("examples", "examples", "count"),
            Column("clean_accuracy", "clean accuracy", "fraction"),
            Column("average_certified_radius", "average certified radius (l2)", "number"),
            _ON_GRID,
            Column("abstention_rate", "abstention rate", "fraction"),
            *(radius.column(are_alike(logs.certification)) for radius in radii),
        ]
        rows: list[list[Cell]] = []
        for log, label in labelled:
            average = average_certified_radius(log.table)
            averages = [None, average] if log.is_on_grid else [average, None]
            rates = [accuracy(log.table), *averages, abstention_rate(log.table)]
            rows.append([label, len(log.table), *rates, *self.accuracies(log, radii).tolist()])
        if not any(log.is_on_grid for log in logs.certification):
            place = columns.index(_ON_GRID)
            columns = [*columns[:place], *columns[place + 1 :]]
            rows = [[*row[:place], *row[place + 1 :]] for row in rows]
        return with_columns_of_logs(Table(columns, rows), [log for log, _ in labelled], by)
