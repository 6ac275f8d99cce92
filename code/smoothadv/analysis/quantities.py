"""What a certification log says, as numbers. Tables are those of ``records.read_certification_log``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

_STEPS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_MOST_COLUMNS = 12


def certified_accuracy(table: pd.DataFrame, radius: float) -> float:
    """The share of examples classified correctly with a certified radius of at least ``radius``: a fraction.

    acc(r) = mean[predict = label and R >= r] (Cohen et al., section 4; SmoothAdv, section 4).
    """
    return float((table.correct.eq(1) & table.radius.ge(radius)).mean())


def clean_accuracy(table: pd.DataFrame) -> float:
    """The certified accuracy at radius 0: correct and not abstained; a fraction."""
    return certified_accuracy(table, 0.0)


def average_certified_radius(table: pd.DataFrame) -> float:
    """mean(R * [predict = label]) (Zhai et al., 2020): the area under the certified-accuracy curve."""
    return float((table.radius * table.correct).mean())


def abstention_rate(table: pd.DataFrame) -> float:
    """The share of examples without a statement (predict = -1): a fraction."""
    return float(table.predict.eq(-1).mean())


def default_radii(tables: Iterable[pd.DataFrame]) -> list[float]:
    """Multiples of 0.25, as in the paper's tables, up to the largest certified radius; coarser where that is many."""
    largest = max((float(table.radius.max()) for table in tables), default=0.0)
    for step in _STEPS:
        count = max(1, int(largest / step))
        if count <= _MOST_COLUMNS:
            break
    return [round(step * (k + 1), 2) for k in range(min(count, _MOST_COLUMNS))]


def accuracy_curve(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The certified-accuracy curve as the corners of its steps: radii ascending from 0, and the accuracy at each.

    Between two radii the accuracy is that of the larger one, since acc(r) counts R >= r.
    """
    certified = np.sort(table.radius[table.correct.eq(1)].to_numpy())
    radii, counts = np.unique(certified, return_counts=True)
    # Correct examples with R >= radii[i]: those not among the smaller ones.
    at_least = len(certified) - np.concatenate(([0], np.cumsum(counts)[:-1]))
    end = radii[-1] if len(radii) else 0.0
    return (np.concatenate(([0.0], radii, [end])), np.concatenate(([len(certified)], at_least, [0])) / len(table))
