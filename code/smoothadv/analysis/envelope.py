"""envelope: per group and radius the best log, as in the paper's Tables 1 and 2; held_out: the best
log, chosen on some images, on the images that had no part in the choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.empirical import digest_of, model_of
from smoothadv.analysis.logs import Log, Logs, group_by
from smoothadv.analysis.radii import AtRadii, Radius
from smoothadv.analysis.selection import Choosing, are_alike, differ, grouping, groups_of
from smoothadv.analysis.table_formats import Annotated, Cell, Column, Table, columns_of
from smoothadv.base.errors import UserError
from smoothadv.base.settings import one_of, probability, setting
from smoothadv.statistics.accuracy import abstention_rate, accuracy

_FACTS = ("certified_accuracy", "abstention_rate", "clean_accuracy")


@ANALYSES.register("envelope")
@dataclass(frozen=True)
class Envelope(Choosing, AtRadii, Analysis):
    """a row per group and image set: at each radius the best of its logs, with the clean accuracy
    of that log raised
    """

    group_by: Sequence[str] = grouping(
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
        groups = groups_of(part, self.group_by)
        radii = self.chosen_radii(part)
        rows: list[list[Cell]] = []
        people: list[list[Cell]] = []
        for name, group in groups.items():
            people.append([name, len(group)])
            for radius, (best, share) in zip(radii, self.select(group, radii)):
                table, clean = best.table, accuracy(best.table)
                facts = (share, abstention_rate(table), clean)
                shown = dict(zip(_FACTS, facts)) | {_FACTS[0]: Annotated(share, raised=clean)}
                people[-1].append(shown.get(self.show))
                rows.append([name, float(radius), *facts, best.label, len(group), len(table)])
        columns = [
            Column("group", "group", "text"),
            Column("radius", self.heading, "number"),
            *columns_of("fraction", **{name: name.replace("_", " ") for name in _FACTS}),
            Column("model", "model", "text"),
            *columns_of("count", models="models", examples="examples"),
        ]
        if self.show == "model":  # whose names are too long for a column per radius
            return Table(columns, rows)
        title, compared = self.heading, are_alike([group[0] for group in groups.values()])
        if self.show != _FACTS[0]:
            title, compared = f"{title}, {self.show.replace('_', ' ')}", False
        columns_for_people = [
            Column("group", title, "text"),
            Column("models", "models", "count"),
            *(radius.column(compared) for radius in radii),
        ]
        return Table(columns, rows, Table(columns_for_people, people))


@ANALYSES.register("held_out")
@dataclass(frozen=True)
class HeldOut(Choosing, AtRadii, Analysis):
    """at each radius the best log of its group, as the paper reports it, and the same model on
    other images: logs of the images on which most models were certified choose; another log of the
    chosen model has the other images"""

    confidence: float = setting(
        0.95,
        parse=probability,
        help="LEVEL of the difference's interval, as if the model had not been chosen",
    )

    def __call__(self, logs: Logs) -> Table:
        groups = group_by(self.taking_part(logs.certification), lambda log: log.group).values()
        choosing = [_of_most_models(group) for group in groups]
        radii = self.chosen_radii([log for some in choosing for log in some])
        rows = [row for pair in zip(groups, choosing) for row in self._rows(*pair, radii)]
        if all(row[3] == 1 or row[6] is None for row in rows):  # the columns models and held_out
            raise UserError(
                "held_out needs logs of several models, and a further log of a chosen one, of "
                "images beside those that chose it"
            )
        level = f"{100 * self.confidence:g}%"
        columns = [
            Column("group", "group", "text"),
            Column("radius", self.heading, "number"),
            Column("model", "chosen model", "text"),
            Column("models", "of", "count"),
            Column("chosen", "where chosen", "fraction"),
            Column("chosen_examples", "images", "count"),
            Column("held_out", "on other images", "fraction"),
            Column("held_out_examples", "other images", "count"),
            *columns_of(
                "difference", difference="difference", low=f"{level} low", high=f"{level} high"
            ),
        ]
        return Table(columns, rows)

    def _rows(
        self, group: Sequence[Log], choosing: Sequence[Log], radii: Sequence[Radius]
    ) -> list[list[Cell]]:
        from statsmodels.stats import proportion  # takes a second to load

        rows: list[list[Cell]] = []
        of_choice = list({log.table["idx"].to_numpy().tobytes(): log for log in choosing}.values())
        for radius, (chosen, share) in zip(radii, self.select(choosing, radii)):
            count = len(chosen.table)
            row: list[Cell] = [
                chosen.group,
                float(radius),
                chosen.label,
                len(choosing),
                share,
                count,
            ]
            further = [
                _without(log, of_choice) for log in group if _compared(log) == _compared(chosen)
            ]
            other = max(further, key=lambda log: len(log.table))
            others = len(other.table)
            if others and share:
                accuracy = float(self.accuracies(other, [radius])[0])
                row += [accuracy, others]
                if self.high_probability is None:  # else each is lower by a deduction of its own
                    # Newcombe's interval (1998, method 10), as of independent samples of images.
                    counts = round(accuracy * others), others, round(share * count), count
                    low, high = proportion.confint_proportions_2indep(
                        *counts, method="newcomb", alpha=1 - self.confidence
                    )
                    row += [accuracy - share, float(low), float(high)]
            rows.append(row + [None] * (11 - len(row)))
        return rows


def _of_most_models(logs: Sequence[Log]) -> list[Log]:
    """The logs of the images, and procedure, of the most models; of equally many, those with fewer
    images.
    """

    def size(some: list[Log]) -> tuple[int, int]:
        return len({digest_of(log) or log.path for log in some}), -len(some[0].table)

    return max(group_by(logs, lambda log: (log.images, log.procedure)).values(), key=size)


def _compared(log: Log) -> tuple[object, ...]:
    """What must be equal where accuracies on two sets of images are compared."""
    return log.procedure, log.facts.get("dataset"), model_of(log)


def _without(log: Log, others: Sequence[Log]) -> Log:
    """The log without the images of the others, unless theirs are known to be of other data."""
    table = log.table
    for other in others:
        if not differ(log, other, "split", "dataset_fingerprint"):
            table = table[~table["idx"].isin(other.table["idx"])]
    return replace(log, table=table)
