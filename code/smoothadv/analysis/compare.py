"""Logs on the same examples: compare, two logs, with an interval for the difference and McNemar's
exact test; gap, accuracy under attack beside certified accuracy, and whether the two contradict
each other; cascade, the certified accuracy that cascades of single models would have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, permutations, product
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.logs import Log, Logs, differ, refuse_other_images
from smoothadv.analysis.radii import AtRadii
from smoothadv.analysis.table_formats import (
    Annotated,
    Cell,
    Column,
    Table,
    columns_of,
    columns_of_ends,
)
from smoothadv.analysis.tables import attack_radius, model_of
from smoothadv.base.errors import UserError, counted, warn
from smoothadv.base.settings import (
    a_threshold,
    any_seed,
    positive_int,
    probability,
    refuse_any,
    setting,
)
from smoothadv.records.logs import CLASS, numbered
from smoothadv.records.readers import DataFrame
from smoothadv.statistics import ABSTAIN, COUNT_COLUMNS
from smoothadv.statistics.bounds import binomial_interval, tolerated_false_statements
from smoothadv.statistics.on_grid import LABEL_AWARE

_RESAMPLES = 4_000
_FALSE_ALARM = 0.001
_ROUNDING = 1e-6  # relative, of a float32 norm


@ANALYSES.register("compare")
@dataclass(frozen=True)
class Comparison(AtRadii, Analysis):
    """the differences of two logs, in pairs of the examples that are in both, with intervals and
    exact tests: of certified accuracy, abstentions and radii, or of the accuracy of predictions"""

    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")
    pairs_examples: ClassVar[bool] = True
    confidence: float = setting(0.95, parse=probability, help="LEVEL of the intervals")
    seed: int = setting(
        0, parse=any_seed, help="seed of the resampling behind the radius's interval"
    )

    def __call__(self, logs: Logs) -> Table:
        both = logs.certification or logs.prediction
        counts = f"{len(logs.certification)} and {len(logs.prediction)}"
        refuse_any(
            {
                "compare takes no --high-probability: the deduction is the same for both logs": (
                    self.high_probability is not None
                ),
                f"compare takes two certification logs or two prediction logs, got {counts}": (
                    len(both) != 2
                ),
                "compare reads no --radii where predictions are compared: each log is of one "
                "attack": bool(self.radii) and not logs.certification,
            }
        )
        if both[0].path.resolve() == both[1].path.resolve():
            warn(f"{both[0].path} is compared with itself")
        pairs = pair_up(*both)
        _warn_of_unshared(both, len(pairs))
        right = [pairs.correct_first.eq(1), pairs.correct_second.eq(1)]
        quantity, rows = "predictions", [self._row("accuracy", *right)]
        if logs.certification:
            quantity = f"certified accuracy at {self.heading}"
            rows = self._of_certificates(both, pairs, right)
        first, second = (log.label.text for log in both)
        columns = [
            Column("quantity", quantity, "text"),
            Column("examples", "examples", "count"),
            *columns_of("fraction", first=first, second=second),
            Column("difference", "second - first", "difference"),
            *columns_of_ends("difference", self.confidence),
            *columns_of("count", only_first="only first", only_second="only second"),
            Column("p_value", "p (McNemar, exact)", "probability"),
        ]
        return Table(columns, rows)

    def _of_certificates(
        self, both: Sequence[Log], pairs: DataFrame, right: Sequence[Any]
    ) -> list[list[Cell]]:
        radii, radius_of = self.chosen_radii_from_0(both), [pairs.radius_first, pairs.radius_second]
        lengths = zip(*(self.l2_lengths(log, radii) for log in both))
        rows = [
            self._row(radius.text, *(right[k] & radius_of[k].ge(least[k]) for k in range(2)))
            for radius, least in zip(radii, lengths)
        ]
        if not any(LABEL_AWARE in log.table for log in both):
            rows.append(
                self._row("abstained", pairs.predict_first.eq(-1), pairs.predict_second.eq(-1))
            )
        first, second = ((radius_of[k] * right[k]).to_numpy() for k in range(2))
        rows.append(self._row("larger radius", first > second, second > first))
        grids = ", of grids a lower bound" if any(log.is_on_grid for log in both) else ""
        gain = second - first
        average = [first.mean(), second.mean(), gain.mean(), *self._interval_of_mean(gain)]
        kinds = ("number", "number", "signed", "signed", "signed")
        cells = [Annotated(float(value), kind=kind) for value, kind in zip(average, kinds)]
        title = f"average certified radius (l2){grids}"
        return [*rows, [title, len(pairs), *cells, None, None, None]]

    def _row(self, quantity: str, *which: ArrayLike) -> list[Cell]:
        """A row, where bool [examples] of the first and the second log say ``which`` ones count."""
        first, second = map(np.asarray, which)
        only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
        low, high = paired_difference_interval(only_first, only_second, len(first), self.confidence)
        shares = [float(first.mean()), float(second.mean())]
        difference = (only_second - only_first) / len(first)
        p_value = mcnemar_p_value(only_first, only_second)
        counts = only_first, only_second, p_value
        return [quantity, len(first), *shares, difference, low, high, *counts]

    def _interval_of_mean(self, values: np.ndarray) -> Sequence[float]:
        """A percentile bootstrap interval of the mean."""
        from scipy import stats  # takes a second to load

        if len(values) == 1:
            return [values[0], values[0]]
        return stats.bootstrap(
            (values,),
            np.mean,
            n_resamples=_RESAMPLES,
            batch=max(1, 20_000_000 // len(values)),
            confidence_level=self.confidence,
            method="percentile",
            random_state=np.random.default_rng(self.seed),
        ).confidence_interval


def pair_up(first: Log, second: Log) -> DataFrame:
    """The examples that are in both logs, side by side; UserError if there are none, or their
    labels differ.
    """
    one, other = shared_rows([first, second])
    return one.merge(other, on="idx", suffixes=("_first", "_second"))


def shared_rows(logs: Sequence[Log]) -> list[DataFrame]:
    """The rows of each log by idx, of the examples that all logs hold, in one order; UserError as
    ``pair_up``.
    """
    named = " and ".join(str(log.path) for log in logs)
    refuse_other_images(logs, named)
    tables = [log.table.set_index("idx") for log in logs]
    shared = reduce(lambda one, other: one.intersection(other), (each.index for each in tables))
    if shared.empty:
        raise UserError(f"{named} have no example in common")
    return [table.loc[shared] for table in tables]


def _warn_of_unshared(logs: Sequence[Log], shared: int) -> None:
    if any(len(log.table) > shared for log in logs):
        sizes = " and ".join(f"{len(log.table):,}" for log in logs)
        warn(f"only the {shared:,} examples that all logs hold, of {sizes}, are compared")


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """McNemar's exact two-sided test that the two shares are equal, from the discordant counts."""
    from statsmodels.stats.contingency_tables import mcnemar  # takes a second to load

    return float(min(1.0, mcnemar([[0, only_first], [only_second, 0]], exact=True).pvalue))


def paired_difference_interval(
    only_first: int, only_second: int, pairs: int, confidence: float
) -> tuple[float, float]:
    """Interval for p_second - p_first from paired outcomes: Wald with two pseudo-pairs (Bonett and
    Price, 2012).
    """
    z = float(special.ndtri((1 + confidence) / 2))
    first, second = (only_first + 1) / (pairs + 2), (only_second + 1) / (pairs + 2)
    half = z * math.sqrt((first + second - (second - first) ** 2) / (pairs + 2))
    return max(-1.0, second - first - half), min(1.0, second - first + half)


@ANALYSES.register("gap")
@dataclass(frozen=True)
class Gap(Analysis):
    """a row per attack: certified accuracy at its radius, accuracy under it, how many images it
    changed to another class within their certified radius, and how many of them chance explains"""

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
        columns = [
            Column("attack", "attack", "text"),
            Column("radius", "l2 radius", "number"),
            Column("examples", "examples", "count"),
            Column("certified_accuracy", "certified", "fraction"),
            Column("empirical_accuracy", "under attack", "fraction", ends=("low", "high")),
            Column("abstention_rate", "abstained", "fraction"),
            *columns_of("count", contradictions="contradictions", tolerated="tolerated"),
        ]
        attacks = sorted(attacks, key=attack_radius)
        rows = [self._row(log, certificates_for(log, logs.certification)) for log in attacks]
        return Table(columns, rows)

    def _row(self, attacked: Log, certified: Log) -> list[Any]:
        radius, pairs = attack_radius(attacked), pair_up(certified, attacked)
        certified_accuracy = float((pairs.correct_first.eq(1) & pairs.radius.ge(radius)).mean())
        hits = int(pairs.correct_second.sum())
        interval = binomial_interval(hits, len(pairs), self.confidence)
        alphas = attacked.facts.alpha + certified.facts.alpha
        return [
            *(attacked.label, radius, len(pairs), certified_accuracy),
            Annotated(hits / len(pairs), interval=interval),
            *(float(pairs.predict_second.eq(ABSTAIN).mean()), contradictions(pairs, radius)),
            tolerated_false_statements(len(pairs), alphas, _FALSE_ALARM),
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
    known = "dataset", "split", "arch", "sigma", "dataset_fingerprint", "precision"
    same = [
        log
        for log in certified
        if log.top_k == attacked.top_k and not differ(attacked, log, *known)
    ]
    # Of a released log, nothing tells that its model is another one than that of the only other.
    is_unknown = None in (attacked.facts.manifest, certified[0].facts.manifest)
    if len(certified) > 1 or not is_unknown:
        same = [log for log in same if model_of(log) == model_of(attacked)]
    elif same and model_of(same[0]) != model_of(attacked):
        warn(f"nothing tells whether {attacked.path} and {same[0].path} are of one model")
    if len(same) != 1:
        found = ", ".join(str(log.path) for log in same) or "none"
        one_class = {log.top_k for log in [attacked, *certified]} == {1}
        top = "" if one_class else f"top-{attacked.top_k} "
        raise UserError(
            f"{attacked.path}: one {top}certification log of the model attacked is needed, found "
            f"{found}"
        )
    return same[0]


_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
_MOST_LOGS = 5


@ANALYSES.register("cascade")
@dataclass(frozen=True)
class CascadeEstimate(AtRadii, Analysis):
    """what cascades of the logs' models would certify, by an estimate (statistics.cascade), which
    is no certificate: a row per order of two or more models and per threshold, by average certified
    radius; a row per model; and one of an oracle, which knows the labels. Logs of procedures that
    stop early make the estimate too small
    """

    pairs_examples: ClassVar[bool] = True
    # Rivals are taken as 1 - p_A where an image's class is that of the cascade, as p_A elsewhere.
    # p_A is bounded by the counts in a log, or is Phi(radius / sigma) without them.
    thresholds: Sequence[float] = setting(
        _THRESHOLDS, parse=a_threshold, help="thresholds p0 to try"
    )
    choose_on: int | None = setting(
        None,
        parse=positive_int,
        metavar="K",
        help="sort by every K-th image, and take the accuracies from the others: whoever chooses "
        "the best cascade by an image cannot measure it there",
    )
    rows: int = setting(20, parse=positive_int, help="cascades to show")

    def __call__(self, logs: Logs) -> Table:
        part = logs.certification
        if not 2 <= len(part) <= _MOST_LOGS:
            raise UserError(
                f"cascade: found {counted(len(part), 'log')}, expected 2 to {_MOST_LOGS}"
            )
        rows = shared_rows(part)
        labels = rows[0].label.to_numpy()
        _warn_of_unshared(part, len(labels))
        sigmas = [_sigma(log) for log in part]
        radii = self.chosen_radii_from_0(part)
        lengths = self.l2_lengths(part[0], radii)
        chooses = np.arange(len(labels)) % (self.choose_on or 1) == 0
        measures = ~chooses if self.choose_on else chooses
        if not measures.any():
            raise UserError("--choose-on 1 leaves no image to measure: give 2 or more")

        def row(name: str, threshold: float | None, found: np.ndarray) -> list[Cell]:
            """``found`` [N] is the radius of each image, -1 where its class is wrong."""
            accuracies = (found[measures, None] >= lengths).mean(0).tolist()
            average = float(np.maximum(found[measures], 0).mean())
            return [name, threshold, average, *accuracies]

        of_logs = [
            (at.predict.to_numpy(), _one_sided_radii(at, sigma, log.facts.alpha), sigma)
            for log, at, sigma in zip(part, rows, sigmas)
        ]
        titles = [log.title or log.name for log in part]
        found: list[tuple[float, list[Cell]]] = []
        orders = [permutations(range(len(part)), size) for size in range(2, len(part) + 1)]
        for order, threshold in product(chain(*orders), self.thresholds):
            name = " > ".join(titles[place] for place in order)
            radius = estimated_radii([of_logs[place] for place in order], threshold, labels)
            promise = float(np.maximum(radius[chooses], 0).mean())
            found.append((promise, row(name, float(threshold), radius)))
        alone = [np.where(at.predict == labels, at.radius, -1.0) for at in rows]
        singles = [
            *(row(title, None, radius) for title, radius in zip(titles, alone)),
            row("oracle: the best log of each image", None, np.max(alone, axis=0)),
        ]
        columns = [
            Column("cascade", f"cascade (at {self.heading})", "text"),
            *columns_of("number", threshold="threshold", average="average certified radius (l2)"),
            *(radius.column() for radius in radii),
        ]
        ordered = [each for _, each in sorted(found, key=lambda each: -each[0])]
        people = Table(columns, [*ordered[: self.rows], *singles])
        return Table(columns, [*ordered, *singles], people)


def estimated_radii(
    stages: Sequence[tuple[np.ndarray, np.ndarray, float]], threshold: float, labels: np.ndarray
) -> np.ndarray:
    """The radius that the best certificate of a cascade would have for each image [N]; -1 where it
    has another class than ``labels`` [N], or none.

    ``stages`` have predictions [N], radii [N] and sigma of a log whose p_A is Phi(radius / sigma),
    1/2 where it abstains.
    """
    z0 = float(special.ndtri(threshold))
    best, chosen = np.full(len(labels), -1.0), np.full(len(labels), ABSTAIN)
    for last, (classes, radii, sigma) in enumerate(stages):
        is_last = last == len(stages) - 1
        radius = np.where(classes >= 0, radii - (0.0 if is_last else sigma * z0), -1.0)
        for others, rivals, before in stages[:last]:
            z = rivals / before
            radius = np.minimum(radius, before * (z0 - np.where(others == classes, -z, z)))
        better = (radius > best) & (radius >= 0)
        best, chosen = np.where(better, radius, best), np.where(better, classes, chosen)
    return np.where(chosen == labels, best, -1.0)


def _one_sided_radii(rows: DataFrame, sigma: float, alpha: float) -> np.ndarray:
    """Of each row [N], a radius with p_A >= Phi(radius / sigma): by the counts, where there are
    some (Clopper and Pearson, 1934).
    """
    if not {*COUNT_COLUMNS} <= {*rows}:
        return rows.radius.to_numpy()
    own, trials = rows.successes.to_numpy().clip(min=1), rows.trials.to_numpy().clip(min=1)
    bounds = special.betaincinv(own, trials - own + 1, alpha)
    return np.where(rows.predict >= 0, sigma * special.ndtri(bounds), 0.0)


def _sigma(log: Log) -> float:
    sigma = log.facts.get("sigma")
    refuse_any(
        {
            f"{log.path} has several stages: give logs of single models": (
                "sigmas" in log.facts.settings
            ),
            f"{log.path} does not say its sigma: --sigma states it, or its manifest": sigma is None,
        }
    )
    return float(sigma)
