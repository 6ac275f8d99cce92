"""table: certified accuracy by radius, a row per log, as in the paper's tables."""

from dataclasses import dataclass

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.shared.logs import Logs
from smoothadv.analysis.shared.radii import AtRadii, Bands, radius_column, radius_key, radius_text
from smoothadv.analysis.shared.selection import are_alike, labelling, labels_by, with_facts
from smoothadv.analysis.shared.table_formats import Annotated, Column, Table


@ANALYSES.register("table")
@dataclass(frozen=True)
class CertifiedAccuracyTable(Bands, AtRadii, Analysis):
    """a row per log: certified accuracy at each radius, the best of a column in bold"""

    label_by: list[str] | None = labelling()

    def __call__(self, logs: Logs) -> Table:
        radii = self.radii or [0.0, *self.chosen_radii(logs.certification)]
        by = self.label_by or []
        labelled = labels_by(logs.certification, by)
        ordered = [log for log, _ in labelled]
        accuracies = {label: self.accuracies(log, radii) for log, label in labelled}
        first = Column("log", self.heading + self.band_note, "text")
        columns = [first, *(radius_column(radius, are_alike(ordered)) for radius in radii)]
        rows = [[name, *values.tolist()] for name, values in accuracies.items()]
        if self.confidence is None:
            return with_facts(Table(columns, rows), ordered, by)
        both = [zip(*self.ends(accuracies[label], len(log.table))) for log, label in labelled]
        shown = [
            [
                name,
                *(
                    Annotated(value, interval=(float(low), float(high)))
                    for value, (low, high) in zip(values, ends)
                ),
            ]
            for (name, *values), ends in zip(rows, both)
        ]
        triples = [
            Column(f"{radius_key(radius)}{end}", radius_text(radius), "percent")
            for radius in radii
            for end in ("", "_low", "_high")
        ]
        full = [
            [name, *(x for cell in cells for x in (cell.value, *cell.interval))]
            for name, *cells in shown
        ]
        return with_facts(Table([first, *triples], full, Table(columns, shown)), ordered, by)
