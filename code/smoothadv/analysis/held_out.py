"""held_out: the best of many models, chosen on some images, on the images that had no part in the
choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.empirical import digest_of, model_of
from smoothadv.analysis.envelope import Envelope
from smoothadv.analysis.logs import Log, Logs, group_by
from smoothadv.analysis.radii import AtRadii, Radius
from smoothadv.analysis.selection import Choosing
from smoothadv.analysis.table_formats import Cell, Column, Table, columns_of
from smoothadv.base.errors import UserError
from smoothadv.base.settings import probability, setting


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
        groups = group_by(self.taking_part(logs.certification), lambda log: log.group)
        choosing = {name: _of_most_models(group) for name, group in groups.items()}
        radii = self.chosen_radii([log for some in choosing.values() for log in some])
        rows = [
            row
            for name, group in groups.items()
            for row in self._rows(name, group, choosing[name], radii)
        ]
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
        self, name: str, group: Sequence[Log], choosing: list[Log], radii: Sequence[Radius]
    ) -> list[list[Cell]]:
        from statsmodels.stats.proportion import (
            confint_proportions_2indep,
        )  # takes a second to load

        envelope = Envelope(self.norm, self.high_probability, self.radii, self.unfinished)
        rows: list[list[Cell]] = []
        of_choice = list({log.table["idx"].to_numpy().tobytes(): log for log in choosing}.values())
        for radius, best in zip(radii, envelope.select(choosing, radii)):
            count, share = len(best.log.table), best.certified_accuracy
            row: list[Cell] = [name, float(radius), best.log.label, len(choosing), share, count]
            further = [
                _without(log, of_choice) for log in group if _compared(log) == _compared(best.log)
            ]
            other = max(further, key=lambda log: len(log.table))
            others = len(other.table)
            if others and share:
                accuracy = float(self.accuracies(other, [radius])[0])
                row += [accuracy, others]
                if self.high_probability is None:  # else each is lower by a deduction of its own
                    # Newcombe's interval (1998, method 10), as of independent samples of images.
                    counts = round(accuracy * others), others, round(share * count), count
                    low, high = confint_proportions_2indep(
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
    """The log without the images of the others, unless manifests say that theirs are of other
    data.
    """
    table = log.table
    for other in others:
        settings = log.facts.settings, other.facts.settings
        pairs = [
            [of_one.get(name) for of_one in settings] for name in ("split", "dataset_fingerprint")
        ]
        if all(None in pair or pair[0] == pair[1] for pair in pairs):
            table = table[~table["idx"].isin(other.table["idx"])]
    return replace(log, table=table)
