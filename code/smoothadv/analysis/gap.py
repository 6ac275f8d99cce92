"""gap: certified accuracy below, accuracy under attack above, on the same images, and whether the two contradict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.compare import pair_up
from smoothadv.analysis.empirical import attack_radius, model_of
from smoothadv.analysis.shared.logs import Log, Logs
from smoothadv.analysis.shared.table_formats import Annotated, Column, Table
from smoothadv.bounds import binomial_interval, tolerated_false_statements
from smoothadv.errors import UserError
from smoothadv.settings import probability, setting

if TYPE_CHECKING:
    import pandas as pd

_FALSE_ALARM = 0.001
_PUBLISHED_ALPHA = 0.001
_SHARED = ("dataset", "split", "sigma")
_ROUNDING = 1e-6  # relative, of a float32 norm


@ANALYSES.register("gap")
@dataclass(frozen=True)
class Gap:
    """a row per attack: certified accuracy at its radius, accuracy under it, and images on which the two contradict"""

    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")
    confidence: float = setting(0.95, parse=probability, help="LEVEL of the intervals of accuracy under attack")

    def __call__(self, logs: Logs) -> Table:
        attacks = [log for log in logs.prediction if attack_radius(log) > 0]
        if not logs.certification or not attacks:
            raise UserError("gap needs a certification log and prediction logs under attack, of the same model")
        columns = [
            Column("attack", "attack", "text"),
            Column("radius", "l2 radius", "number"),
            Column("examples", "examples", "count"),
            Column("certified_accuracy", "certified", "fraction"),
            Column("empirical_accuracy", "under attack", "fraction"),
            Column("low", f"{100 * self.confidence:g}% low", "fraction"),
            Column("high", f"{100 * self.confidence:g}% high", "fraction"),
            Column("abstention_rate", "abstained", "fraction"),
            Column("contradictions", "contradictions", "count"),
            Column("tolerated", "tolerated", "count"),
        ]
        attacks = sorted(attacks, key=attack_radius)
        rows = [self._row(log, certificates_for(log, logs.certification)) for log in attacks]
        kept = [column for column in columns if column.key not in ("low", "high")]
        shown = [[*row[:4], Annotated(row[4], interval=(row[5], row[6])), *row[7:]] for row in rows]
        return Table(columns, rows, Table(kept, shown))

    def _row(self, attacked: Log, certified: Log) -> list:
        radius = attack_radius(attacked)
        pairs = pair_up(certified, attacked)
        hits = int(pairs.correct_second.sum())
        interval = binomial_interval(hits, len(pairs), self.confidence)
        alphas = [float(log.parameters.get("alpha") or _PUBLISHED_ALPHA) for log in (attacked, certified)]
        return [
            attacked.name,
            radius,
            len(pairs),
            float((pairs.correct_first.eq(1) & pairs.radius.ge(radius)).mean()),
            hits / len(pairs),
            *interval,
            float(pairs.predict_second.eq(-1).mean()),
            contradictions(pairs, radius),
            tolerated_false_statements(len(pairs), sum(alphas), _FALSE_ALARM),
        ]


def contradictions(pairs: pd.DataFrame, epsilon: float) -> int:
    """How many images got another class within their certified radius.

    ``pairs`` holds predict_first and radius of the certificates, predict_second of the attacked images and, where it is
    known, their attack_norm. Each is a false certificate or a wrong prediction, which an image gets with a probability
    of at most the sum of their alphas: more than that explains, among all images, contradict one of the logs.
    """
    norm = pairs.attack_norm if "attack_norm" in pairs else epsilon
    claimed = pairs.predict_first.ge(0) & pairs.radius.gt(norm * (1 + _ROUNDING))
    contradicted = claimed & pairs.predict_second.ge(0) & pairs.predict_second.ne(pairs.predict_first)
    return int(contradicted.sum())


def certificates_for(attacked: Log, certified: Sequence[Log]) -> Log:
    """The certification log of the model that was attacked; UserError where that is none or not clear."""
    same = [log for log in certified if model_of(log) == model_of(attacked) and not _differ(attacked, log)]
    if not same and len(certified) == 1 and None in (attacked.parameters.manifest, certified[0].parameters.manifest):
        same = [log for log in certified if not _differ(attacked, log)]
    if len(same) != 1:
        found = "none" if not same else ", ".join(str(log.path) for log in same)
        raise UserError(f"{attacked.path}: one certification log of the model attacked is needed, found {found}")
    return same[0]


def _differ(first: Log, second: Log) -> bool:
    """Whether two logs are known to be of different images, or of another arithmetic."""
    known = [(log.parameters.manifest or {}).get("settings", {}) for log in (first, second)]
    said = [(first.parameters.get(name), second.parameters.get(name)) for name in _SHARED]
    said += [(known[0].get(name), known[1].get(name)) for name in ("dataset_fingerprint", "precision")]
    return any(None not in pair and pair[0] != pair[1] for pair in said)
