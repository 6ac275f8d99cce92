"""compare: two logs on the same examples, with an interval for the difference and McNemar's exact
test.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.radii import AtRadii
from smoothadv.analysis.selection import refuse_other_images
from smoothadv.analysis.table_formats import Annotated, Cell, Column, Table, columns_of
from smoothadv.base.errors import UserError, warn
from smoothadv.base.settings import any_seed, probability, setting
from smoothadv.records.readers import DataFrame
from smoothadv.statistics.on_grid import LABEL_AWARE

_RESAMPLES = 4_000


@ANALYSES.register("compare")
@dataclass(frozen=True)
class Comparison(AtRadii, Analysis):
    """two logs on the examples that are in both: differences with intervals and exact tests; of
    certified accuracy, abstentions and radii, as of two procedures, or of the accuracy of
    predictions, as under two attacks"""

    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")
    pairs_examples: ClassVar[bool] = True
    confidence: float = setting(0.95, parse=probability, help="LEVEL of the intervals")
    seed: int = setting(
        0, parse=any_seed, help="seed of the resampling behind the radius's interval"
    )

    def __call__(self, logs: Logs) -> Table:
        if self.high_probability is not None:
            raise UserError(
                "compare takes no --high-probability: the deduction is the same for both logs"
            )
        both = logs.certification or logs.prediction
        if len(both) != 2:
            found = f"{len(logs.certification)} and {len(logs.prediction)}"
            raise UserError(
                f"compare takes two certification logs or two prediction logs, got {found}"
            )
        first, second = both
        pairs, sizes = pair_up(first, second), (len(first.table), len(second.table))
        if max(sizes) > len(pairs):
            warn(
                f"only the {len(pairs):,} examples that both logs hold, of {sizes[0]:,} and "
                f"{sizes[1]:,}, are compared"
            )
        if not logs.certification:
            return self._of_predictions(first, second, pairs)
        radii = self.chosen_radii_from_0(logs.certification)
        columns = self._columns(f"certified accuracy at {self.heading}", first, second)
        right = pairs.correct_first.eq(1), pairs.correct_second.eq(1)
        lengths = zip(self.l2_lengths(first, radii), self.l2_lengths(second, radii))
        rows = [
            self._row(
                radius.text,
                right[0] & pairs.radius_first.ge(a),
                right[1] & pairs.radius_second.ge(b),
            )
            for radius, (a, b) in zip(radii, lengths)
        ]
        if not any(LABEL_AWARE in log.table for log in (first, second)):
            rows.append(
                self._row("abstained", pairs.predict_first.eq(-1), pairs.predict_second.eq(-1))
            )
        credited = [
            (pairs[f"radius_{log}"] * pairs[f"correct_{log}"]).to_numpy()
            for log in ("first", "second")
        ]
        rows.append(
            self._row("larger radius", credited[0] > credited[1], credited[1] > credited[0])
        )
        average = self._average_radius(*credited)
        kinds = ("number", "number", "signed", "signed", "signed")
        people = [Annotated(value, kind=kind) for value, kind in zip(average, kinds)]
        row: list[Cell] = [_average_title(first, second), len(pairs)]
        no_test = [None] * 3
        full = [*rows, [*row, *average, *no_test]]
        return Table(columns, full, Table(columns, [*rows, [*row, *people, *no_test]]))

    def _columns(self, quantity: str, first: Log, second: Log) -> list[Column]:
        level = f"{100 * self.confidence:g}%"
        return [
            Column("quantity", quantity, "text"),
            Column("examples", "examples", "count"),
            *columns_of("fraction", first=first.label.text, second=second.label.text),
            *columns_of(
                "difference", difference="second - first", low=f"{level} low", high=f"{level} high"
            ),
            *columns_of("count", only_first="only first", only_second="only second"),
            Column("p_value", "p (McNemar, exact)", "probability"),
        ]

    def _of_predictions(self, first: Log, second: Log, pairs: DataFrame) -> Table:
        if self.radii:
            raise UserError(
                "compare reads no --radii where predictions are compared: each log is of one attack"
            )
        row = self._row("accuracy", pairs.correct_first.eq(1), pairs.correct_second.eq(1))
        return Table(self._columns("predictions", first, second), [row])

    def _row(self, quantity: str, *which: ArrayLike) -> list[Cell]:
        """A row, where bool [examples] of the first and the second log say ``which`` ones count."""
        first, second = map(np.asarray, which)
        only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
        low, high = paired_difference_interval(only_first, only_second, len(first), self.confidence)
        difference, p_value = (
            (only_second - only_first) / len(first),
            mcnemar_p_value(only_first, only_second),
        )
        test = [difference, low, high, only_first, only_second, p_value]
        return [quantity, len(first), float(first.mean()), float(second.mean()), *test]

    def _average_radius(self, first: np.ndarray, second: np.ndarray) -> list[float]:
        """Means of R * [correct], each [examples], and a percentile bootstrap interval of their
        paired difference.
        """
        from scipy import stats  # takes a second to load

        difference = second - first
        low = high = float(difference.mean())
        if len(difference) > 1:
            low, high = stats.bootstrap(
                (difference,),
                np.mean,
                n_resamples=_RESAMPLES,
                batch=max(1, 20_000_000 // len(difference)),
                confidence_level=self.confidence,
                method="percentile",
                random_state=np.random.default_rng(self.seed),
            ).confidence_interval
        return [
            float(value) for value in (first.mean(), second.mean(), difference.mean(), low, high)
        ]


def _average_title(first: Log, second: Log) -> str:
    """The name of the row of average radii; it says which are on a grid, since these are smaller
    for that reason.
    """
    on_grids = first.is_on_grid, second.is_on_grid
    if not any(on_grids):
        return "average certified radius (l2)"
    whose = {(True, True): "", (True, False): ", the first", (False, True): ", the second"}[
        on_grids
    ]
    return f"average certified radius (l2){whose} on the grid"


def pair_up(first: Log, second: Log) -> DataFrame:
    """The examples that are in both logs, side by side; UserError if there are none, or their
    labels differ.
    """
    refuse_other_images([first, second], f"{first.path} and {second.path}")
    pairs = first.table.merge(second.table, on="idx", suffixes=("_first", "_second"))
    if pairs.empty:
        raise UserError(f"{first.path} and {second.path} have no example in common")
    return pairs


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
    from scipy import stats

    z = float(stats.norm.ppf((1 + confidence) / 2))
    first, second = (only_first + 1) / (pairs + 2), (only_second + 1) / (pairs + 2)
    half = z * math.sqrt((first + second - (second - first) ** 2) / (pairs + 2))
    return max(-1.0, second - first - half), min(1.0, second - first + half)
