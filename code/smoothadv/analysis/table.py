"""table: certified accuracy by radius, a row per log, as in the paper's tables."""

from dataclasses import dataclass

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.logs import Logs
from smoothadv.analysis.radii import AtRadii, Bands
from smoothadv.analysis.selection import are_alike, labelling, labels_by, with_columns_of_logs
from smoothadv.analysis.table_formats import Annotated, Cell, Column, Table


@ANALYSES.register("table")
@dataclass(frozen=True)
class CertifiedAccuracyTable(Bands, AtRadii, Analysis):
    """a row per log: certified accuracy at each radius, the best of a column in bold"""

    label_by: list[str] | None = labelling()

    def __call__(self, logs: Logs) -> Table:
        by = self.label_by or []
        radii = self.chosen_radii_from_0(logs.certification)
        labelled = labels_by(logs.certification, by)
        ordered = [log for log, _ in labelled]
        first = Column("log", self.heading + self.band_note, "text")
        columns = [first, *(radius.column(are_alike(ordered)) for radius in radii)]
        shares = [self.accuracies(log, radii) for log in ordered]
        rows = [[label, *some.tolist()] for (_, label), some in zip(labelled, shares)]
        if self.confidence is None:
            return with_columns_of_logs(Table(columns, rows), ordered, by)
        triples = [
            Column(f"{radius.key}{end}", radius.text, "percent")
            for radius in radii
            for end in ("", "_low", "_high")
        ]
        full: list[list[Cell]] = []
        people: list[list[Cell]] = []
        for (log, label), some in zip(labelled, shares):
            low, high = (end.tolist() for end in self.ends(some, len(log.table)))
            cells = list(zip(some.tolist(), zip(low, high)))
            full.append([label, *(number for share, pair in cells for number in (share, *pair))])
            people.append([label, *(Annotated(share, interval=pair) for share, pair in cells)])
        table = Table([first, *triples], full, Table(columns, people))
        return with_columns_of_logs(table, ordered, by)
