"""The best log of each group at each radius: envelope, as in the paper's Tables 1 and 2; held_out:
chosen on some images, on the images that had no part in the choice; empirical: accuracy under the
strongest attack on each model, of the best model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import path_without_attack
from smoothadv.analysis.logs import (
    Choosing,
    Log,
    Logs,
    are_alike,
    differ,
    group_by,
    grouping,
    groups_of,
)
from smoothadv.analysis.radii import AtRadii, Radius
from smoothadv.analysis.table_formats import (
    Annotated,
    Cell,
    Column,
    Table,
    columns_of,
    columns_of_ends,
)
from smoothadv.base.errors import UserError
from smoothadv.base.settings import one_of, probability, setting
from smoothadv.records.logs import DENOISER
from smoothadv.statistics.accuracy import abstention_rate, accuracy
from smoothadv.statistics.bounds import binomial_interval

_FACTS = ("certified_accuracy", "abstention_rate", "clean_accuracy")


@ANALYSES.register("envelope")
@dataclass(frozen=True)
class Envelope(Choosing, AtRadii, Analysis):
    """a row per group and image set: the best of its logs at each radius, with that log's clean
    accuracy as a superscript
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
        rows: list[list[Any]] = [
            [
                *(name, float(radius), share, abstention_rate(best.table), accuracy(best.table)),
                *(best.label, len(group), len(best.table)),
            ]
            for name, group in groups.items()
            for radius, (best, share) in zip(radii, self.select(group, radii))
        ]
        columns = [
            Column("group", "group", "text"),
            Column("radius", self.heading, "number"),
            *columns_of("fraction", **{name: name.replace("_", " ") for name in _FACTS}),
            Column("model", "model", "text"),
            *columns_of("count", models="models", examples="examples"),
        ]
        if self.show == "model":  # whose names are too long for a column per radius
            return Table(columns, rows)
        is_certified = self.show == _FACTS[0]
        compared = is_certified and are_alike([group[0] for group in groups.values()])
        title = self.heading + ("" if is_certified else f", {self.show.replace('_', ' ')}")
        columns_for_people = [
            Column("group", title, "text"),
            Column("models", "models", "count"),
            *(radius.column(compared) for radius in radii),
        ]
        place = [column.key for column in columns].index(self.show)
        shown = [
            (row[0], Annotated(row[2], raised=row[4]) if is_certified else row[place])
            for row in rows
        ]
        people = [
            [name, len(group), *(cell for of, cell in shown if of == name)]
            for name, group in groups.items()
        ]
        return Table(columns, rows, Table(columns_for_people, people))


@ANALYSES.register("held_out")
@dataclass(frozen=True)
class HeldOut(Choosing, AtRadii, Analysis):
    """the accuracy of the best model of each group at each radius, on the images that chose it and
    on other images. The images on which most models were certified choose; the other images are
    those of a further log of the chosen model"""

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
        columns = [
            Column("group", "group", "text"),
            Column("radius", self.heading, "number"),
            Column("model", "chosen model", "text"),
            Column("models", "of", "count"),
            Column("chosen", "where chosen", "fraction"),
            Column("chosen_examples", "images", "count"),
            Column("held_out", "on other images", "fraction"),
            Column("held_out_examples", "other images", "count"),
            Column("difference", "difference", "difference"),
            *columns_of_ends("difference", self.confidence),
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


_ACCURACY, _ABSTENTION = _SHOWN = ("empirical_accuracy", "abstention_rate")


@ANALYSES.register("empirical")
@dataclass(frozen=True)
class Empirical(Choosing, Analysis):
    """a row per group and image set: the accuracy of its best attacked model at each radius, under
    the strongest attack
    """

    kinds: ClassVar[tuple[str, ...]] = ("prediction",)
    group_by: Sequence[str] = grouping("the groups, like num_noise_vec, N or gradient")
    confidence: float | None = setting(
        None,
        parse=probability,
        help="LEVEL of intervals (Clopper-Pearson) over the choice of images, like 0.95; they are "
        "those of the log shown and do not allow for its selection from several (default: none)",
    )
    show: str = setting(
        _ACCURACY,
        parse=one_of(_SHOWN),
        help=f"what markdown and latex show of the logs, {' or '.join(_SHOWN)}",
    )

    def __call__(self, logs: Logs) -> Table:
        groups = groups_of(self.taking_part(logs.prediction), self.group_by)
        curves = {name: empirical_curve(group) for name, group in groups.items()}
        rows: list[list[Any]] = [
            [
                *(name, radius, accuracy(best.log.table), best.log.label),
                *(best.models, best.attacks, len(best.log.table), abstention_rate(best.log.table)),
                *(best.interval(self.confidence) if self.confidence else ()),
            ]
            for name, curve in curves.items()
            for radius, best in curve.items()
        ]
        is_abstention = self.show == _ABSTENTION
        shown = {
            (name, radius): abstained
            if is_abstention
            else Annotated(share, interval=tuple(ends) or None)
            for name, radius, share, _, _, _, _, abstained, *ends in rows
        }
        columns = [
            Column("group", "group", "text"),
            Column("radius", "attack radius (l2)", "number"),
            Column(_ACCURACY, "empirical accuracy", "fraction"),
            Column("model", "model", "text"),
            *columns_of("count", models="models", attacks="attacks on it", examples="examples"),
            Column(_ABSTENTION, "abstention rate", "fraction"),
        ]
        if self.confidence is not None:
            columns += columns_of_ends("fraction", self.confidence)
        title = "attack radius (l2)" + ", abstention rate" * is_abstention
        radii = sorted({radius for _, radius in shown})
        people = Table(
            [Column("group", title, "text"), *(Radius(r).column(compared=False) for r in radii)],
            [[name, *(shown.get((name, radius)) for radius in radii)] for name in curves],
        )
        return Table(columns, rows, people)


@dataclass(frozen=True)
class Attacked:
    """The most accurate of ``models`` at an attack radius, under the strongest of ``attacks`` on
    it.
    """

    log: Log
    models: int
    attacks: int

    def interval(self, confidence: float) -> tuple[float, float]:
        """The Clopper-Pearson interval of the accuracy, over the choice of images."""
        return binomial_interval(int(self.log.table.correct.sum()), len(self.log.table), confidence)


def empirical_curve(logs: Sequence[Log]) -> dict[float, Attacked]:
    """By attack radius, ascending: the largest accuracy of all models, each under the strongest
    attack on it.

    Of each model only the logs with its largest n count: with fewer draws PREDICT abstains more
    often, which is not the attack's success. A log without an attack counts at radius 0. UserError
    where an attack's radius is unknown.
    """
    curve = {}
    for radius, some in sorted(group_by(logs, attack_radius).items()):
        models = group_by(some, model_of).values()
        strongest = []
        for attacks in models:
            draws = [log.facts.get("N") or 0 for log in attacks]
            precise = [log for log, n in zip(attacks, draws) if n == max(draws)]
            attacked = min(precise, key=lambda log: accuracy(log.table))
            strongest.append(Attacked(attacked, len(models), len(precise)))
        curve[radius] = max(strongest, key=lambda attacked: accuracy(attacked.log.table))
    return curve


def attack_radius(log: Log) -> float:
    """The l2 norm allowed to the attack of a prediction log, 0 without an attack; UserError if it
    is unknown.
    """
    radius = log.facts.get("epsilon")
    if radius is None and log.facts.get("attack") is not None:
        raise UserError(
            f"{log.path} was made under an attack of unknown radius: neither manifest nor path "
            "states it"
        )
    return float(radius or 0.0)


def model_of(log: Log) -> tuple[object, ...]:
    """What identifies a smoothed classifier: checkpoint and sigma, or the part of the path that
    describes no attack.
    """
    digest = digest_of(log)
    return (digest, log.facts.get("sigma")) if digest else path_without_attack(log.path)


def digest_of(log: Log) -> str:
    """The digest of the file with the weights, or of those of all members; "" where no manifest
    tells.
    """
    settings = log.facts.settings
    digest = str(settings.get("checkpoint_sha256") or settings.get("module_sha256") or "")
    return f"{settings[DENOISER]}{digest}" if DENOISER in settings else digest
