"""The bounds of p_A: those of the counts or of the radii, with everything that is not proven at
0.
"""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from smoothadv.analysis.facts import Facts
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.tables import Probabilities, with_bounds
from smoothadv.statistics.bounds import certified_radius, lower_confidence_bound
from support.refusals import refusal

SIGMA, N, ALPHA = 0.5, 1000, 0.001
# The last abstains; the fourth is of a wrong class.
COUNTS = [1000, 990, 800, 600, 400]


def log(name: str = "log.tsv", counts: bool = True, table: dict | None = None, **settings) -> Log:
    radii = [certified_radius(count, N, SIGMA, ALPHA) for count in COUNTS]
    columns = {
        "idx": range(5),
        "label": 1,
        "predict": [1, 1, 1, 2, -1],
        "radius": [radius or 0.0 for radius in radii],
    }
    columns |= {
        "correct": [1, 1, 1, 0, 0],
        **({"successes": COUNTS, "trials": N} if counts else {}),
        **(table or {}),
    }
    known = {"sigma": SIGMA, "N": N, "alpha": ALPHA, **settings}
    return Log(
        name,
        name,
        "",
        pd.DataFrame(columns),
        Facts(known, {}, {"settings": known, "runs": []}),
    )


def bounds_of(some: Log) -> list[float]:
    ((_, bounds),) = with_bounds([some])
    return bounds.tolist()


def test_bounds_of_counts_include_abstentions_and_those_of_radii_do_not():
    proven = [lower_confidence_bound(count, N, ALPHA) for count in COUNTS]
    assert bounds_of(log()) == [*proven[:3], 0.0, proven[4]]
    assert bounds_of(log(counts=False)) == pytest.approx([*proven[:3], 0, 0], abs=1e-8)
    given_up = log(table={"trials": [N] * 4 + [700], "successes": [*COUNTS[:4], 150]})
    assert bounds_of(given_up)[4] == lower_confidence_bound(150, 700, ALPHA)


def test_adaptive_logs_have_the_bounds_of_their_radii_whatever_their_counts():
    """The counts at a look that was chosen by what they were do not bound anything by
    themselves.
    """
    grid = log(
        method="adaptive",
        table={"samples": 500, "level": 1, "looks": 2, "radius": [0.5, 0.25, 0, 0, 0]},
    )
    assert bounds_of(grid) == pytest.approx([stats.norm.cdf(1), stats.norm.cdf(0.5), 0.5, 0, 0])
    titles = [Probabilities()(Logs([some])).columns[2].title for some in (grid, log())]
    assert ["of grids a lower bound" in title for title in titles] == [True, False]


def test_two_sided_logs_have_the_bounds_of_their_share_of_alpha():
    """Where counting stopped early by what a rival had, nothing is assumed of the draws that were
    not made.
    """
    columns = {"rival": [0, 5, 100, 300, 590], "trials": [N, N, N, N, 900]}
    bounds = [lower_confidence_bound(count, N, 0.9 * ALPHA) for count in COUNTS]
    assert bounds_of(log(table=columns, method="two-sided", alpha_share=0.9)) == [
        *bounds[:3],
        0,
        bounds[4],
    ]


def test_bound_of_partial_counts_holds():
    """Counting stops at the 31st miss: of p = 0.6, a bound above p has probability at most alpha;
    one of half as many misses would not hold. A true bound fails the test with probability 1e-6."""
    draws = 31 + np.random.default_rng(3).negative_binomial(31, 0.4, 20_000)
    stopped = pd.DataFrame(
        {"idx": range(len(draws)), "label": 1, "predict": -1, "radius": 0.0, "correct": 0}
    )
    alpha = 0.05
    for misses, holds in ((31, True), (16, False)):
        counted = log(alpha=alpha)
        counted = Log(
            "l", "l", "", stopped.assign(successes=draws - misses, trials=draws), counted.facts
        )
        above = int((np.array(bounds_of(counted)) > 0.6).sum())
        assert (above <= stats.binom.isf(1e-6, len(draws), alpha)) == holds


def test_logs_that_do_not_tell_their_bounds_are_named():
    """Of a two-sided radius, p_A cannot be told; of a one-sided one, not without sigma."""
    sequential = log(
        "sequential.tsv", table={"rival": 7, "looks": 1}, method="a procedure of another machine"
    )
    stages = log("stages.tsv", method="cascade", sigmas=[0.5, 0.25], threshold=0.7)
    unknown = log("unknown.tsv", counts=False, sigma=None)
    message = refusal(Probabilities(), Logs([sequential, unknown, stages]))
    assert message.endswith("told of sequential.tsv, unknown.tsv, stages.tsv")
    with pytest.warns(UserWarning, match="told of sequential.tsv$"):
        (row,) = Probabilities()(Logs([log(), sequential])).rows
    assert row[0].value == "log.tsv"
