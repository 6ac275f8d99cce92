"""gap: certified accuracy and accuracy under attack on the same images, and whether the two
contradict each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.compare import pair_up
from smoothadv.analysis.empirical import attack_radius, model_of
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.table_formats import Annotated, Column, Table, columns_of
from smoothadv.base.errors import UserError
from smoothadv.base.settings import probability, setting
from smoothadv.records.logs import CLASS, numbered
from smoothadv.records.readers import DataFrame
from smoothadv.statistics.bounds import binomial_interval, tolerated_false_statements

_FALSE_ALARM = 0.001
_ROUNDING = 1e-6  # relative, of a float32 norm


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
    # Of a released log, nothing tells that its model is another one than that of the only other.
    may_be_any = len(certified) == 1 and None in (
        attacked.facts.manifest,
        certified[0].facts.manifest,
    )
    same = [
        log
        for log in certified
        if (may_be_any or model_of(log) == model_of(attacked)) and not _differ(attacked, log)
    ]
    if len(same) != 1:
        found = ", ".join(str(log.path) for log in same) or "none"
        one_class = {log.top_k for log in [attacked, *certified]} == {1}
        top = "" if one_class else f"top-{attacked.top_k} "
        raise UserError(
            f"{attacked.path}: one {top}certification log of the model attacked is needed, found "
            f"{found}"
        )
    return same[0]


def _differ(first: Log, second: Log) -> bool:
    """Whether two logs are known to be of different images or numbers of classes, or computed in
    another precision.
    """
    pairs: list[tuple[Any, Any]] = [(first.top_k, second.top_k)]
    for name in ("dataset", "split", "sigma"):
        pairs.append((first.facts.get(name), second.facts.get(name)))
    for name in ("dataset_fingerprint", "precision"):
        pairs.append((first.facts.settings.get(name), second.facts.settings.get(name)))
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)
