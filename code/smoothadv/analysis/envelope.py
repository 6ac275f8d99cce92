"""envelope: per group and radius the best log, as in the paper's Tables 1 and 2."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.radii import AtRadii, Radius
from smoothadv.analysis.selection import Choosing, are_alike, grouping, groups_of
from smoothadv.analysis.table_formats import Annotated, Cell, Column, Table, columns_of
from smoothadv.base.settings import one_of, setting
from smoothadv.statistics.accuracy import abstention_rate, accuracy

_FACTS = ("certified_accuracy", "abstention_rate", "clean_accuracy")


@dataclass(frozen=True)
class Selected:
    """The best log of a group at one radius."""

    log: Log
    certified_accuracy: float


def upper_envelope(logs: Sequence[Log], accuracies: np.ndarray) -> list[Selected]:
    """The log with the largest accuracy at each radius; of equal ones, that of larger clean
    accuracy, or the first.

    ``accuracies`` is [len(logs), number of radii]. The logs are selected on the images that measure
    their accuracy: an envelope is optimistic, the more so the more logs it is selected from
    (SmoothAdv, section 4).
    """
    clean = np.array([accuracy(log.table) for log in logs])
    selected = []
    for column in accuracies.T:
        best = np.flatnonzero(column == column.max())
        winner = best[clean[best].argmax()]
        selected.append(Selected(logs[winner], float(column[winner])))
    return selected


@ANALYSES.register("envelope")
@dataclass(frozen=True)
class Envelope(Choosing, AtRadii, Analysis):
    """a row per group and image set: at each radius the best of its logs, with the clean accuracy
    of that log raised
    """

    group_by: list[str] | None = grouping(
        "the groups, like sigma or epsilon (default: the groups of the command line: NAME=LOG, or "
        "each folder)"
    )
    show: str = setting(
        _FACTS[0],
        parse=one_of((*_FACTS, "model")),
        help=f"what markdown and latex show of the logs, one of {', '.join(_FACTS)}, model",
    )

    def __call__(self, logs: Logs) -> Table:
        part = self.taking_part(logs.certification)
        groups = groups_of(part, self.group_by or [])
        radii = self.chosen_radii(part)
        rows: list[list[Cell]] = []
        people: list[list[Cell]] = []
        for name, group in groups.items():
            people.append([name, len(group)])
            for radius, best in zip(radii, self.select(group, radii)):
                table, clean = best.log.table, accuracy(best.log.table)
                facts = (best.certified_accuracy, abstention_rate(table), clean)
                shown = dict(zip(_FACTS, facts)) | {_FACTS[0]: Annotated(facts[0], raised=clean)}
                people[-1].append(shown.get(self.show))
                rows.append([name, float(radius), *facts, best.log.label, len(group), len(table)])
        columns = [
            Column("group", "group", "text"),
            Column("radius", self.heading, "number"),
            *columns_of("fraction", **{name: name.replace("_", " ") for name in _FACTS}),
            Column("model", "model", "text"),
            *columns_of("count", models="models", examples="examples"),
        ]
        if self.show == "model":  # whose names are too long for a column per radius
            return Table(columns, rows)
        is_accuracy = self.show == _FACTS[0]
        title = self.heading + ("" if is_accuracy else f", {self.show.replace('_', ' ')}")
        compared = is_accuracy and are_alike([group[0] for group in groups.values()])
        columns_for_people = [
            Column("group", title, "text"),
            Column("models", "models", "count"),
            *(radius.column(compared) for radius in radii),
        ]
        return Table(columns, rows, Table(columns_for_people, people))

    def select(self, group: Sequence[Log], radii: Sequence[Radius | float]) -> list[Selected]:
        """The best log of the group at each radius."""
        accuracies = np.array([self.accuracies(log, radii, models=len(group)) for log in group])
        return upper_envelope(group, accuracies)
