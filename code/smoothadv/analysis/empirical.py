"""Accuracy under attack, from prediction logs. empirical: the strongest attack on each model, the
best model; gap: beside certified accuracy on the same images, and whether the two contradict each
other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.compare import pair_up
from smoothadv.analysis.facts import path_without_attack
from smoothadv.analysis.logs import Log, Logs, group_by
from smoothadv.analysis.radii import Radius
from smoothadv.analysis.selection import Choosing, differ, grouping, groups_of
from smoothadv.analysis.table_formats import Annotated, Cell, Column, Table, columns_of
from smoothadv.base.errors import UserError
from smoothadv.base.settings import one_of, probability, setting
from smoothadv.records.logs import CLASS, DENOISER, numbered
from smoothadv.records.readers import DataFrame
from smoothadv.statistics.accuracy import abstention_rate, accuracy
from smoothadv.statistics.bounds import binomial_interval, tolerated_false_statements

_ACCURACY, _ABSTENTION = _SHOWN = ("empirical_accuracy", "abstention_rate")
_FALSE_ALARM = 0.001
_ROUNDING = 1e-6  # relative, of a float32 norm


@ANALYSES.register("empirical")
@dataclass(frozen=True)
class Empirical(Choosing, Analysis):
    """a row per group and image set: accuracy under the strongest attack at each radius, of its
    best attacked model
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
                whole = Annotated(share, interval=ends)
                shown[name, radius] = abstained if self.show == _ABSTENTION else whole
        columns = [
            Column("group", "group", "text"),
            Column("radius", "attack radius (l2)", "number"),
            Column(_ACCURACY, "empirical accuracy", "fraction"),
            Column("model", "model", "text"),
            *columns_of("count", models="models", attacks="attacks on it", examples="examples"),
            Column(_ABSTENTION, "abstention rate", "fraction"),
        ]
        if self.confidence is not None:
            level = f"{100 * self.confidence:g}%"
            columns += columns_of("fraction", low=f"{level} low", high=f"{level} high")
        title = "attack radius (l2)" + ", abstention rate" * (self.show == _ABSTENTION)
        radii = sorted({radius for _, radius in shown})
        people = Table(
            [Column("group", title, "text"), *(Radius.of(r).column(compared=False) for r in radii)],
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


@ANALYSES.register("gap")
@dataclass(frozen=True)
class Gap(Analysis):
    """a row per attack: certified accuracy at its radius, accuracy under it, and images whose class
    it changed within their certified radius, beside the number of them that chance explains"""

    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")
    confidence: float = setting(
        0.95, parse=probability, help="LEVEL of the intervals of accuracy under attack"
    )

    def __call__(self, logs: Logs) -> Table:
        attacks = [log for log in logs.prediction if attack_radius(log) > 0]
        if not logs.certification or not attacks:
            raise UserError(
                "gap needs a certification log and prediction logs under attack, of the same model"
            )
        level = f"{100 * self.confidence:g}%"
        columns = [
            Column("attack", "attack", "text"),
            Column("radius", "l2 radius", "number"),
            Column("examples", "examples", "count"),
            *columns_of(
                "fraction", certified_accuracy="certified", empirical_accuracy="under attack"
            ),
            *columns_of(
                "fraction", low=f"{level} low", high=f"{level} high", abstention_rate="abstained"
            ),
            *columns_of("count", contradictions="contradictions", tolerated="tolerated"),
        ]
        attacks = sorted(attacks, key=attack_radius)
        rows = [self._row(log, certificates_for(log, logs.certification)) for log in attacks]
        # People see the interval beside the accuracy.
        kept = [column for column in columns if column.key not in ("low", "high")]
        shown = [[*row[:4], Annotated(row[4], interval=(row[5], row[6])), *row[7:]] for row in rows]
        return Table(columns, rows, Table(kept, shown))

    def _row(self, attacked: Log, certified: Log) -> list[Any]:
        radius, pairs = attack_radius(attacked), pair_up(certified, attacked)
        certified_accuracy = float((pairs.correct_first.eq(1) & pairs.radius.ge(radius)).mean())
        hits = int(pairs.correct_second.sum())
        interval = binomial_interval(hits, len(pairs), self.confidence)
        alphas = attacked.facts.alpha + certified.facts.alpha
        tolerated = tolerated_false_statements(len(pairs), alphas, _FALSE_ALARM)
        return [
            *(attacked.label, radius, len(pairs), certified_accuracy, hits / len(pairs)),
            *(*interval, float(pairs.predict_second.eq(-1).mean())),
            *(contradictions(pairs, radius), tolerated),
        ]


def contradictions(pairs: DataFrame, epsilon: float) -> int:
    """The number of attacked images that PREDICT gave another class although they lie within their
    certified radius.

    ``pairs`` holds predict_first and radius of the certificates, predict_second of the attacked
    images, class_1 to class_k where PREDICT gave k classes, none of which is the certified one
    then, and attack_norm where it is known. Such an image has a false certificate or a wrong
    prediction. The probability of that is at most the sum of the two alphas per image; if there are
    more such images than ``bounds.tolerated_false_statements`` allows, one of the logs must be
    wrong.
    """
    norm = pairs.attack_norm if "attack_norm" in pairs else epsilon
    claimed = pairs.predict_first.ge(0) & pairs.radius.gt(norm * (1 + _ROUNDING))
    found = pairs[numbered(pairs.columns, CLASS) or ["predict_second"]]
    contradicted = (
        claimed & pairs.predict_second.ge(0) & found.ne(pairs.predict_first, axis=0).all(axis=1)
    )
    return int(contradicted.sum())


def certificates_for(attacked: Log, certified: Sequence[Log]) -> Log:
    """The certification log of the model that was attacked; UserError unless there is exactly
    one.
    """
    known = "dataset", "split", "sigma", "dataset_fingerprint", "precision"
    same = [
        log
        for log in certified
        if log.top_k == attacked.top_k and not differ(attacked, log, *known)
    ]
    # Of a released log, nothing tells that its model is another one than that of the only other.
    if len(certified) > 1 or None not in (attacked.facts.manifest, certified[0].facts.manifest):
        same = [log for log in same if model_of(log) == model_of(attacked)]
    if len(same) != 1:
        found = ", ".join(str(log.path) for log in same) or "none"
        one_class = {log.top_k for log in [attacked, *certified]} == {1}
        top = "" if one_class else f"top-{attacked.top_k} "
        raise UserError(
            f"{attacked.path}: one {top}certification log of the model attacked is needed, found "
            f"{found}"
        )
    return same[0]
