"""parameters: the hyper-parameters of each log and how each is known."""

from dataclasses import dataclass
from typing import Any, ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import FIELDS, display
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.table_formats import Column, Table


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
            [
                log.label,
                len(log.table),
                *(log.facts.get(name) for name in known),
                _sources(log),
            ]
            for log in both
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
