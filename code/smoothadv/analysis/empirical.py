"""empirical: accuracy under attack from prediction logs, per group and attack radius the best attacked model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.quantities import empirical_accuracy
from smoothadv.analysis.radii import radius_column
from smoothadv.analysis.selection import groups_of, hyper_parameter
from smoothadv.analysis.tables import Column, Table
from smoothadv.errors import UserError
from smoothadv.settings import setting


@ANALYSES.register("empirical")
@dataclass(frozen=True)
class Empirical:
    """a row per group: accuracy under attack at each attack radius, of the best of its attacked models"""

    kinds: ClassVar[tuple[str, ...]] = ("prediction",)
    group_by: list[str] | None = setting(
        None,
        many=True,
        parse=hyper_parameter,
        help="hyper-parameters that make a group of their own, like num_noise_vec, N or gradient",
    )

    def __call__(self, logs: Logs) -> Table:
        groups = groups_of(logs.prediction, self.group_by or [])
        curves = {name: empirical_curve(group) for name, group in groups.items()}
        columns = [
            Column("group", "group", "text"),
            Column("radius", "attack radius (l2)", "number"),
            Column("empirical_accuracy", "empirical accuracy", "fraction"),
            Column("model", "model", "text"),
            Column("models", "models", "count"),
            Column("examples", "examples", "count"),
        ]
        rows = [
            [name, radius, empirical_accuracy(best.table), best.name, models, len(best.table)]
            for name, curve in curves.items()
            for radius, (best, models) in curve.items()
        ]
        return Table(columns, rows, _for_people(curves))


def empirical_curve(logs: Sequence[Log]) -> dict[float, tuple[Log, int]]:
    """Per attack radius, ascending, the log with the largest accuracy and the number of logs there.

    A log without an attack counts at radius 0. UserError where an attack's radius is unknown.
    """
    at_radius: dict[float, list[Log]] = {}
    for log in logs:
        radius = log.parameters.get("epsilon")
        if radius is None and log.parameters.get("attack") is not None:
            raise UserError(f"{log.path} was made under an attack of unknown radius: neither manifest nor path says it")
        at_radius.setdefault(float(radius or 0.0), []).append(log)
    return {
        radius: (max(at_radius[radius], key=lambda log: empirical_accuracy(log.table)), len(at_radius[radius]))
        for radius in sorted(at_radius)
    }


def _for_people(curves: dict[str, dict[float, tuple[Log, int]]]) -> Table:
    radii = sorted({radius for curve in curves.values() for radius in curve})
    columns = [Column("group", "attack radius (l2)", "text")]
    for radius in radii:
        column = radius_column(radius)
        columns.append(Column(column.key, column.title, "percent"))
    rows = [
        [name, *(empirical_accuracy(curve[radius][0].table) if radius in curve else None for radius in radii)]
        for name, curve in curves.items()
    ]
    return Table(columns, rows)
