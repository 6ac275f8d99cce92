"""probabilities: the distribution of the bounds of p_A over the images, which an average radius
hides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.selection import with_columns_of_logs
from smoothadv.analysis.table_formats import Cell, Column, Table
from smoothadv.base.errors import UserError, warn
from smoothadv.statistics.accuracy import average_certified_radius
from smoothadv.statistics.bounds import lower_confidence_bound

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_LEVELS = (0.5, 0.9, 0.99, 0.999)


@ANALYSES.register("probabilities")
@dataclass(frozen=True)
class Probabilities(Analysis):
    """a row per log: quantiles over the images of the lower bound of p_A, 0 if wrong, and shares of
    images above a few levels, beside the average certified radius"""

    def __call__(self, logs: Logs) -> Table:
        bounded = with_bounds(logs.certification)
        on_grid = any(log.is_on_grid for log, _ in bounded)
        grids = ", of grids a lower bound" if on_grid else ""
        columns = [
            Column("log", "lower bound of p_A", "text"),
            Column("examples", "examples", "count"),
            Column("average_certified_radius", f"average certified radius (l2){grids}", "number"),
            *(
                Column(f"quantile_{share:g}", f"{100 * share:g}% quantile", "number")
                for share in _QUANTILES
            ),
            *(
                Column(f"at_least_{level:g}", f"at least {level:g}", "fraction")
                for level in _LEVELS
            ),
        ]
        rows: list[list[Cell]] = [
            [
                *(log.label, len(bounds), average_certified_radius(log.table)),
                *np.quantile(bounds, _QUANTILES, method="inverted_cdf").tolist(),
                *(float((bounds >= level).mean()) for level in _LEVELS),
            ]
            for log, bounds in bounded
        ]
        return with_columns_of_logs(Table(columns, rows), [log for log, _ in bounded])


def with_bounds(logs: Sequence[Log]) -> list[tuple[Log, np.ndarray]]:
    """Logs, each with the lower bounds of p_A of its images, float64 [examples], where these are
    known.

    p_A is the probability of the class selected. Of a fixed sample, the bounds are
    Clopper-Pearson's from the counts, at the share of alpha that the procedure spends on p_A. Where
    counting stopped at a fixed number of misses, as in ``exact``, the partial counts give one too;
    by another rule, the draws that were not made count as misses. Else, of one-sided procedures,
    they are Phi(R / sigma), and 0 for abstentions. An image classified wrongly has 0: nothing is
    proven of its true class. Warns of logs left out; UserError if none is left.
    """
    found = [(log, _bounds(log)) for log in logs]
    known = [(log, bounds) for log, bounds in found if bounds is not None]
    if len(known) < len(logs):
        paths = ", ".join(str(log.path) for log, bounds in found if bounds is None)
        reason = (
            "the bounds of p_A, which need --sigma or counts of a fixed sample, cannot be told of "
            f"{paths}"
        )
        if not known:
            raise UserError(reason)
        warn(reason)
    return known


def _bounds(log: Log) -> np.ndarray | None:
    table, facts, sigma = log.table, log.facts, log.facts.number("sigma")
    if log.radii_follow_from_counts:
        alpha = facts.alpha * facts.settings.get("alpha_share", 1)
        bound = np.vectorize(lower_confidence_bound, otypes=[float])
        trials = np.maximum(table["trials"], 1) if log.is_one_sided else facts.n
        bounds = bound(table["successes"], trials, alpha)
    elif log.is_one_sided and sigma is not None:
        bounds = np.where(
            table["predict"] >= 0, special.ndtr(table["radius"].to_numpy() / sigma), 0.0
        )
    else:
        return None
    return np.where((table["predict"] >= 0) & (table["correct"] == 0), 0.0, bounds)
