"""empirical: accuracy under attack, from prediction logs: the strongest attack on each model, the
best model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import path_without_attack
from smoothadv.analysis.logs import Log, Logs, group_by
from smoothadv.analysis.radii import Radius
from smoothadv.analysis.selection import Choosing, grouping, groups_of
from smoothadv.analysis.table_formats import Annotated, Cell, Column, Table, columns_of
from smoothadv.base.errors import UserError
from smoothadv.base.settings import one_of, probability, setting
from smoothadv.records.logs import DENOISER
from smoothadv.statistics.accuracy import abstention_rate, accuracy
from smoothadv.statistics.bounds import binomial_interval

_ACCURACY, _ABSTENTION = _SHOWN = ("empirical_accuracy", "abstention_rate")


@ANALYSES.register("empirical")
@dataclass(frozen=True)
class Empirical(Choosing, Analysis):
    """a row per group and image set: accuracy under the strongest attack at each radius, of its
    best attacked model
    """

    kinds: ClassVar[tuple[str, ...]] = ("prediction",)
    group_by: list[str] | None = grouping("the groups, like num_noise_vec, N or gradient")
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
        groups = groups_of(self.taking_part(logs.prediction), self.group_by or [])
        curves = {name: empirical_curve(group) for name, group in groups.items()}
        level = "" if self.confidence is None else f"{100 * self.confidence:g}%"
        columns = [
            Column("group", "group", "text"),
            Column("radius", "attack radius (l2)", "number"),
            Column(_ACCURACY, "empirical accuracy", "fraction"),
            Column("model", "model", "text"),
            *columns_of("count", models="models", attacks="attacks on it", examples="examples"),
            Column(_ABSTENTION, "abstention rate", "fraction"),
            *(Column(end, f"{level} {end}", "fraction") for end in ("low", "high") if level),
        ]
        rows: list[list[Cell]] = []
        shown: dict[tuple[str, float], Cell] = {}
        for name, curve in curves.items():
            for radius, best in curve.items():
                table = best.log.table
                share, abstained = accuracy(table), abstention_rate(table)
                ends = None if self.confidence is None else best.interval(self.confidence)
                counts = (best.models, best.attacks, len(table))
                rows.append(
                    [name, radius, share, best.log.label, *counts, abstained, *(ends or ())]
                )
                shown[name, radius] = (
                    Annotated(share, interval=ends) if self.show == _ACCURACY else abstained
                )
        title = "attack radius (l2)" + ("" if self.show == _ACCURACY else ", abstention rate")
        radii = sorted({radius for _, radius in shown})
        people = Table(
            [
                Column("group", title, "text"),
                *(Radius.of(radius).column(compared=False) for radius in radii),
            ],
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
            draws = [log.facts.number("N") or 0 for log in attacks]
            precise = [log for log, n in zip(attacks, draws) if n == max(draws)]
            attacked = min(precise, key=lambda log: accuracy(log.table))
            strongest.append(Attacked(attacked, len(models), len(precise)))
        curve[radius] = max(strongest, key=lambda attacked: accuracy(attacked.log.table))
    return curve


def attack_radius(log: Log) -> float:
    """The l2 norm allowed to the attack of a prediction log, 0 without an attack; UserError if it
    is unknown.
    """
    radius = log.facts.number("epsilon")
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
