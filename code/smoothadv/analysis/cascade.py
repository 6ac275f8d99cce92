"""cascade: from logs of single models, the certified accuracy that cascades of them would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.radii import AtRadii
from smoothadv.analysis.table_formats import Cell, Column, Table, columns_of
from smoothadv.base.errors import UserError, counted
from smoothadv.base.settings import number, positive_int, setting
from smoothadv.records.logs import COUNT_COLUMNS
from smoothadv.statistics import ABSTAIN

if TYPE_CHECKING:
    from pandas import DataFrame

_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
_MOST_LOGS = 5


@ANALYSES.register("cascade")
@dataclass(frozen=True)
class CascadeEstimate(AtRadii, Analysis):
    """what cascades of single models would certify (statistics.cascade), estimated from their logs:
    a row per order of two or more logs and threshold, by average certified radius, then one per
    log, and that of an oracle, which knows the labels. Rivals are taken as 1 - p_A where an image's
    class is that of the cascade, as p_A elsewhere; p_A is bounded by the counts in a log, or
    Phi(radius / sigma) without them: logs that stop early make the estimate too small. No
    substitute for a certificate
    """

    thresholds: Sequence[float] = setting(
        _THRESHOLDS,
        many=True,
        parse=number(float, "a probability from 0.5 to 0.999", lambda v: 0.5 <= v <= 0.999),
        help="thresholds p0 to try",
    )
    choose_on: int | None = setting(
        None,
        parse=positive_int,
        metavar="K",
        help="sort by every K-th image, and take the accuracies from the others: whoever chooses "
        "the best cascade by an image cannot measure it there",
    )
    rows: int = setting(20, parse=positive_int, help="cascades that people see")

    def __call__(self, logs: Logs) -> Table:
        part = logs.certification
        if not 2 <= len(part) <= _MOST_LOGS:
            raise UserError(
                f"cascade: found {counted(len(part), 'log')}, expected 2 to {_MOST_LOGS}"
            )
        tables = [log.table.set_index("idx") for log in part]
        images = tables[0].index
        for table in tables[1:]:
            images = images.intersection(table.index)
        if not len(images):
            raise UserError("cascade: the logs have no image in common")
        labels = tables[0].loc[images, "label"].to_numpy()
        sigmas = [_sigma(log) for log in part]
        radii = self.chosen_radii_from_0(part)
        lengths = self.l2_lengths(part[0], radii)
        chooses = np.arange(len(images)) % (self.choose_on or 1) == 0
        measures = ~chooses if self.choose_on else chooses
        if not measures.any():
            raise UserError("--choose-on 1 leaves no image to measure: give 2 or more")

        def row(name: str, threshold: float | None, found: np.ndarray) -> list[Cell]:
            """``found`` [N] is the radius of each image, -1 where its class is wrong."""
            accuracies = (found[measures, None] >= lengths).mean(0).tolist()
            average = float(np.maximum(found[measures], 0).mean())
            return [name, threshold, average, *accuracies]

        rows = [table.loc[images] for table in tables]
        of_logs = [
            (at.predict.to_numpy(), _one_sided_radii(at, sigma, log.facts.alpha), sigma)
            for log, at, sigma in zip(part, rows, sigmas)
        ]
        titles = [log.title or log.name for log in part]
        found: list[tuple[float, list[Cell]]] = []
        for size in range(2, len(part) + 1):
            for order in permutations(range(len(part)), size):
                name = " > ".join(titles[place] for place in order)
                stages = [of_logs[place] for place in order]
                for threshold in self.thresholds:
                    radius = estimated_radii(stages, threshold, labels)
                    promise = float(np.maximum(radius[chooses], 0).mean())
                    found.append((promise, row(name, float(threshold), radius)))
        found.sort(key=lambda each: -each[0])
        alone = [np.where(at.predict == labels, at.radius, -1.0) for at in rows]
        singles = [row(title, None, radius) for title, radius in zip(titles, alone)]
        singles.append(row("oracle: the best log of each image", None, np.max(alone, axis=0)))
        columns = [
            Column("cascade", f"cascade (at {self.heading})", "text"),
            *columns_of("number", threshold="threshold", average="average certified radius (l2)"),
            *(radius.column() for radius in radii),
        ]
        ordered = [each for _, each in found]
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
    if "sigmas" in log.facts.settings:
        raise UserError(f"{log.path} has several stages: give logs of single models")
    sigma = log.facts.get("sigma")
    if sigma is None:
        raise UserError(f"{log.path} does not say its sigma: --sigma states it, or its manifest")
    return float(sigma)
