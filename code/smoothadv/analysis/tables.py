"""Tables with a row per log: summary, table (as in the paper), parameters, and the distribution of
the bounds of p_A over the images, which an average radius hides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy import special

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import FIELDS, display
from smoothadv.analysis.logs import LabelBy, Log, Logs, are_alike, with_columns_of_logs
from smoothadv.analysis.radii import AtRadii, Bands
from smoothadv.analysis.table_formats import Cell, Column, Table, columns_of
from smoothadv.base.errors import UserError, warn
from smoothadv.statistics.accuracy import (
    abstention_rate,
    accuracy,
    average_certified_radius,
)
from smoothadv.statistics.bounds import lower_confidence_bound
from smoothadv.statistics.exact import Exact

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_LEVELS = (0.5, 0.9, 0.99, 0.999)


@ANALYSES.register("summary")
@dataclass(frozen=True)
class Summary(LabelBy, AtRadii, Analysis):
    """a row per log: examples, clean accuracy, average certified radius, abstention rate, certified
    accuracies
    """

    def __call__(self, logs: Logs) -> Table:
        ordered = self.ordered(logs.certification)
        radii = self.chosen_radii(ordered)
        average = Column("average_certified_radius", "average certified radius (l2)", "number")
        on_grid = Column(f"{average.key}_on_the_grid", f"{average.title} on the grid", "number")
        averages = [average, on_grid] if any(log.is_on_grid for log in ordered) else [average]
        title = "log" if self.heading == "l2 radius" else f"log (at {self.heading})"
        if len(names := {log.procedure_name for log in ordered}) == 1 and ordered[0].top_k > 1:
            title += f", {names.pop()}"
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
                *(log.label, len(log.table), accuracy(log.table)),
                *(
                    average_certified_radius(log.table)
                    if log.is_on_grid == (one is on_grid)
                    else None
                    for one in averages
                ),
                *(abstention_rate(log.table), *self.accuracies(log, radii).tolist()),
            ]
            for log in ordered
        ]
        return with_columns_of_logs(Table(columns, rows), ordered, self.label_by)


@ANALYSES.register("table")
@dataclass(frozen=True)
class CertifiedAccuracyTable(LabelBy, Bands, AtRadii, Analysis):
    """a row per log: certified accuracy at each radius, the best of a column in bold"""

    def __call__(self, logs: Logs) -> Table:
        ordered = self.ordered(logs.certification)
        radii = self.chosen_radii_from_0(ordered)
        first = Column("log", self.heading + self.band_note, "text")
        ends = () if self.confidence is None else ("_low", "_high")
        columns = [first, *(radius.column(are_alike(ordered), ends) for radius in radii)]
        rows = [[log.label, *self.cells(log, self.accuracies(log, radii))] for log in ordered]
        return with_columns_of_logs(Table(columns, rows), ordered, self.label_by)


@ANALYSES.register("parameters")
@dataclass(frozen=True)
class ParametersTable(Analysis):
    """a row per log: dataset, training, sigma and other hyper-parameters, and the source of each"""

    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")

    def __call__(self, logs: Logs) -> Table:
        both = [*logs.certification, *logs.prediction]
        known = [name for name in FIELDS if any(log.facts.get(name) is not None for log in both)]
        columns = [
            *columns_of("text", log="log"),
            *columns_of("count", examples="examples"),
            *columns_of("text", **{name: FIELDS[name] for name in known}, sources="known from"),
        ]
        rows: list[list[Any]] = [
            [log.label, len(log.table), *map(log.facts.get, known), _sources(log)] for log in both
        ]
        people = [
            [*row[:2], *map(display, known, row[2:-1]), _sources(log, brief=True)]
            for row, log in zip(rows, both)
        ]
        return Table(columns, rows, Table(columns, people))


def _sources(log: Log, brief: bool = False) -> str:
    """ "path: dataset (cifar10), noise (noise_0.25); assumed: N, alpha"; in ``brief`` only what is
    assumed is listed: "path; assumed: N, alpha".
    """
    sources: dict[str, list[str]] = {}
    for name in FIELDS:
        if name in log.facts.sources:
            kind, _, part = log.facts.sources[name].partition(" ")
            sources.setdefault(kind, []).append(f"{name} ({part})" if part else name)
    return "; ".join(
        kind if brief and kind != "assumed" else f"{kind}: {', '.join(names)}"
        for kind, names in sources.items()
    )


@ANALYSES.register("probabilities")
@dataclass(frozen=True)
class Probabilities(Analysis):
    """a row per log: quantiles over the images of the lower bound of p_A, 0 if wrong, and shares of
    images above a few levels, beside the average certified radius"""

    def __call__(self, logs: Logs) -> Table:
        bounded = with_bounds(logs.certification)
        grids = ", of grids a lower bound" if any(log.is_on_grid for log, _ in bounded) else ""
        columns = [
            Column("log", "lower bound of p_A", "text"),
            Column("examples", "examples", "count"),
            Column("average_certified_radius", f"average certified radius (l2){grids}", "number"),
            *(
                Column(f"quantile_{share:g}", f"{100 * share:g}% quantile", "number")
                for share in _QUANTILES
            ),
            *(
                Column(f"at_least_{level:g}", f"at least {level:g}", "fraction")
                for level in _LEVELS
            ),
        ]
        rows: list[list[Cell]] = [
            [
                *(log.label, len(bounds), average_certified_radius(log.table)),
                *np.quantile(bounds, _QUANTILES, method="inverted_cdf").tolist(),
                *(float((bounds >= level).mean()) for level in _LEVELS),
            ]
            for log, bounds in bounded
        ]
        return with_columns_of_logs(Table(columns, rows), [log for log, _ in bounded])


def with_bounds(logs: Sequence[Log]) -> list[tuple[Log, np.ndarray]]:
    """Logs, each with the lower bounds of p_A of its images, float64 [examples], where these are
    known.

    p_A is the probability of the class selected. Of a fixed sample, the bounds are
    Clopper-Pearson's from the counts, at the share of alpha that the procedure spends on p_A. Where
    counting stopped at a fixed number of misses, as in ``exact``, the partial counts give one too;
    by another rule, the draws that were not made count as misses. Else, of one-sided procedures,
    they are Phi(R / sigma), and 0 for abstentions. An image classified wrongly has 0: nothing is
    proven of its true class. Warns of logs left out; UserError if none is left.
    """
    found = [(log, _bounds(log)) for log in logs]
    known = [(log, bounds) for log, bounds in found if bounds is not None]
    if len(known) < len(logs):
        paths = ", ".join(str(log.path) for log, bounds in found if bounds is None)
        reason = (
            "the bounds of p_A, which need one classifier and --sigma or counts of a fixed sample, "
            "cannot be told of"
        )
        if not known:
            raise UserError(f"{reason} {paths}")
        warn(f"{reason} {paths}")
    return known


def _bounds(log: Log) -> np.ndarray | None:
    table, facts, sigma = log.table, log.facts, log.facts.get("sigma")
    is_one_sided = log.procedure_type.certificate == Exact.certificate
    if "sigmas" in facts.settings:
        return None
    if log.radii_follow_from_counts:
        alpha = facts.alpha * facts.settings.get("alpha_share", 1)
        bound = np.vectorize(lower_confidence_bound, otypes=[float])
        trials = np.maximum(table["trials"], 1) if is_one_sided else facts.n
        bounds = bound(table["successes"], trials, alpha)
    elif is_one_sided and sigma is not None:
        bounds = np.where(
            table["predict"] >= 0, special.ndtr(table["radius"].to_numpy() / sigma), 0.0
        )
    else:
        return None
    return np.where((table["predict"] >= 0) & (table["correct"] == 0), 0.0, bounds)
