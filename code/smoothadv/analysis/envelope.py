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
_SHOWN = (*_FACTS, "model")


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
        _SHOWN[0],
        parse=one_of(_SHOWN),
        help=f"what markdown and latex show of the logs, one of {', '.join(_SHOWN)}",
    )

    def __call__(self, logs: Logs) -> Table:
        part = self.taking_part(logs.certification)
        groups = groups_of(part, self.group_by or [])
        radii = self.chosen_radii(part)
        selected = {name: self.select(group, radii) for name, group in groups.items()}
        columns = [
            Column("group", "group", "text"),
            Column("radius", self.heading, "number"),
            *columns_of("fraction", **{name: name.replace("_", " ") for name in _FACTS}),
            Column("model", "model", "text"),
            *columns_of("count", models="models", examples="examples"),
        ]
        rows: list[list[Cell]] = [
            [
                name,
                float(radius),
                *_facts(best),
                best.log.label,
                len(groups[name]),
                len(best.log.table),
            ]
            for name, winners in selected.items()
            for radius, best in zip(radii, winners)
        ]
        # Names of models are too long for a column per radius.
        return Table(
            columns,
            rows,
            None if self.show == "model" else self._for_people(groups, radii, selected),
        )

    def select(self, group: Sequence[Log], radii: Sequence[Radius | float]) -> list[Selected]:
        """The best log of the group at each radius."""
        accuracies = np.array([self.accuracies(log, radii, models=len(group)) for log in group])
        return upper_envelope(group, accuracies)

    def _for_people(
        self,
        groups: dict[str, list[Log]],
        radii: Sequence[Radius],
        selected: dict[str, list[Selected]],
    ) -> Table:
        title = self.heading + (
            "" if self.show == "certified_accuracy" else f", {self.show.replace('_', ' ')}"
        )
        columns = [Column("group", title, "text"), Column("models", "models", "count")]
        compared = self.show == "certified_accuracy" and are_alike(
            [some[0] for some in groups.values()]
        )
        columns += [radius.column(compared) for radius in radii]
        rows: list[list[Cell]] = [
            [name, len(groups[name]), *(self._shown(best) for best in winners)]
            for name, winners in selected.items()
        ]
        return Table(columns, rows)

    def _shown(self, best: Selected) -> Cell:
        accuracy, _, clean = facts = _facts(best)
        return (
            Annotated(accuracy, raised=clean)
            if self.show == _FACTS[0]
            else facts[_FACTS.index(self.show)]
        )


def _facts(best: Selected) -> tuple[float, float | None, float]:
    """Certified accuracy, abstention rate and clean accuracy of the selected log."""
    return best.certified_accuracy, abstention_rate(best.log.table), accuracy(best.log.table)
