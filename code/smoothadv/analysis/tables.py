"""Tables with a row per log: summary, table (as in the paper), parameters."""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import FIELDS, display
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.radii import AtRadii, Bands
from smoothadv.analysis.selection import (
    are_alike,
    hyper_parameter,
    labels_by,
    with_columns_of_logs,
)
from smoothadv.analysis.table_formats import Annotated, Cell, Column, Table
from smoothadv.base.settings import setting
from smoothadv.statistics.accuracy import (
    abstention_rate,
    accuracy,
    average_certified_radius,
)


@dataclass(frozen=True)
class LabelBy:
    """The names of the rows."""

    label_by: list[str] | None = setting(
        None,
        many=True,
        parse=hyper_parameter,
        help="hyper-parameters that order the rows of each group and, for people, name them in "
        "place of paths, like sigma epsilon; csv and json have columns of them",
    )


@ANALYSES.register("summary")
@dataclass(frozen=True)
class Summary(LabelBy, AtRadii, Analysis):
    """a row per log: examples, clean accuracy, average certified radius, abstention rate, certified
    accuracies
    """

    def __call__(self, logs: Logs) -> Table:
        labelled = labels_by(logs.certification, self.label_by or [])
        ordered = [log for log, _ in labelled]
        radii = self.chosen_radii(ordered)
        average = Column("average_certified_radius", "average certified radius (l2)", "number")
        on_grid = Column(f"{average.key}_on_the_grid", f"{average.title} on the grid", "number")
        averages = [average, on_grid] if any(log.is_on_grid for log in ordered) else [average]
        title = "log" if self.heading == "l2 radius" else f"log (at {self.heading})"
        columns = [
            Column("log", title, "text"),
            Column("examples", "examples", "count"),
            Column("clean_accuracy", "clean accuracy", "fraction"),
            *averages,
            Column("abstention_rate", "abstention rate", "fraction"),
            *(radius.column(are_alike(ordered)) for radius in radii),
        ]
        rows: list[list[Cell]] = [
            [
                *(label, len(log.table), accuracy(log.table)),
                *(
                    average_certified_radius(log.table)
                    if (one is on_grid) == log.is_on_grid
                    else None
                    for one in averages
                ),
                *(abstention_rate(log.table), *self.accuracies(log, radii).tolist()),
            ]
            for log, label in labelled
        ]
        return with_columns_of_logs(Table(columns, rows), ordered, self.label_by or [])


@ANALYSES.register("table")
@dataclass(frozen=True)
class CertifiedAccuracyTable(LabelBy, Bands, AtRadii, Analysis):
    """a row per log: certified accuracy at each radius, the best of a column in bold"""

    def __call__(self, logs: Logs) -> Table:
        labelled = labels_by(logs.certification, self.label_by or [])
        ordered = [log for log, _ in labelled]
        radii = self.chosen_radii_from_0(ordered)
        first = Column("log", self.heading + self.band_note, "text")
        columns = [first, *(radius.column(are_alike(ordered)) for radius in radii)]
        shares = [self.accuracies(log, radii) for log in ordered]
        rows: list[list[Cell]] = [
            [label, *some.tolist()] for (_, label), some in zip(labelled, shares)
        ]
        table = Table(columns, rows)
        if self.confidence is not None:
            bands = [
                np.transpose([some, *self.ends(some, len(log.table))]).tolist()
                for log, some in zip(ordered, shares)
            ]
            triples = [
                Column(f"{radius.key}{end}", radius.text, "percent")
                for radius in radii
                for end in ("", "_low", "_high")
            ]
            full = [[row[0], *itertools.chain(*band)] for row, band in zip(rows, bands)]
            people = [
                [row[0], *(Annotated(share, interval=(low, high)) for share, low, high in band)]
                for row, band in zip(rows, bands)
            ]
            table = Table([first, *triples], full, Table(columns, people))
        return with_columns_of_logs(table, ordered, self.label_by or [])


@ANALYSES.register("parameters")
@dataclass(frozen=True)
class ParametersTable(Analysis):
    """a row per log: dataset, training, sigma and other hyper-parameters, and the source of each"""

    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")

    def __call__(self, logs: Logs) -> Table:
        both = [*logs.certification, *logs.prediction]
        known = [name for name in FIELDS if any(log.facts.get(name) is not None for log in both)]
        columns = [
            Column("log", "log", "text"),
            Column("examples", "examples", "count"),
            *(Column(name, FIELDS[name], "text") for name in known),
            Column("sources", "known from", "text"),
        ]
        rows: list[list[Any]] = [
            [log.label, len(log.table), *map(log.facts.get, known), _sources(log)] for log in both
        ]
        people = [[*row[:2], *map(display, known, row[2:-1]), row[-1]] for row in rows]
        return Table(columns, rows, Table(columns, people))


def _sources(log: Log) -> str:
    """ "path: dataset (cifar10), noise (noise_0.25); assumed: N, alpha"."""
    sources: dict[str, list[str]] = {}
    for name in FIELDS:
        if name in log.facts.sources:
            kind, _, part = log.facts.sources[name].partition(" ")
            sources.setdefault(kind, []).append(f"{name} ({part})" if part else name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in sources.items())
