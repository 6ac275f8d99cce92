"""How often each procedure certifies a radius that is too large: exactly, by sums over all counts
of three classes.

A certificate is false if its radius exceeds that of the theorem for the true probabilities, which
some classifier attains.
"""

from functools import partial

import numpy as np
import pytest
from scipy import optimize, special

from smoothadv.statistics import COUNT_COLUMNS, PROCEDURES, Procedure, Smoothing
from smoothadv.statistics.bounds import radius_probability
from support.crossing import crossing_probability
from support.false_statements import claims, exactly_false

ALPHA = 0.05
# The largest number of draws, and settings.
SETTINGS = {
    "exact": (60, {}),
    "two-sided": (60, {}),
    "top-k": (60, {"top_k": 2}),
    "adaptive": (60, {"radii": (0.25, 0.5), "ladder": True}),
    "sequential": (60, {"radii": (0.25, 0.5)}),
}


def certified(procedure: Procedure, votes: np.ndarray, look: int) -> float:
    """The radius (sigma = 1) that votes certify for class 0; -1 for none."""
    if procedure.on_grid:
        return max(-1.0, procedure.certified(*procedure.counted(votes, 0), look))
    numbers = [int(votes[0]), int(votes.sum()), *procedure.rivals(votes, 0)]
    radius = procedure.shown(dict(zip((*COUNT_COLUMNS, *procedure.columns), numbers)))
    return -1.0 if radius is None else radius


def theorem(name: str, p: list[float]) -> float:
    """The radius of the theorem for class 0 of these probabilities; negative if it does not win, or
    is not among two.
    """
    if name != "top-k":  # Theorem 1 of Cohen et al. (2019)
        return (special.ndtri(p[0]) - special.ndtri(max(p[1:]))) / 2
    if sorted(p)[-3] == 0:  # it is always one of two
        return np.inf
    z, sets = special.ndtri(p[0]), special.ndtri(np.cumsum(sorted(p[1:])[-2:]))

    def lead(r: float) -> float:
        """Theorem 1 of Jia et al. (2020) for k = 2."""
        return special.ndtr(z - r) - (special.ndtr(sets + r) / [1, 2]).min()

    return optimize.brentq(lead, -10, 10, xtol=1e-13)


def edges() -> list[list[float]]:
    """Ties, and where Cohen et al.'s theorem gives a radius to decide, from hardly a rival to two
    equal ones.
    """
    found = [[1 / 3] * 3, [0.4, 0.4, 0.2], [0.45, 0.45, 0.1], [0.5, 0.5, 0.0], [0.2, 0.4, 0.4]]
    for radius in (0.1, 0.25, 0.5):
        p = float(special.ndtr(radius))
        found.append([p, 1 - p, 0.0])
        for p_a in np.linspace(0.4, 0.85, 10).tolist():
            p_b = float(special.ndtr(special.ndtri(p_a) - 2 * radius))
            if p_b <= 1 - p_a <= 2 * p_b:
                found.append([p_a, p_b, max(0.0, 1 - p_a - p_b)])
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_false_statement_is_no_more_probable_than_alpha(name):
    n_max, further = SETTINGS[name]
    procedure = PROCEDURES[name](Smoothing(1.0, 10, n_max, ALPHA), **further)
    looks = procedure.looks.tolist() if procedure.on_grid else [n_max]
    stated = claims(looks, partial(certified, procedure))
    found = [exactly_false(stated, p, theorem(name, p)) for p in edges()]
    assert len(found) > 10 and max(found) <= ALPHA, found
    assert max(found) > ALPHA / 5, "the level is used"
    larger = [exactly_false(stated, p, theorem(name, p) - 0.2) for p in edges()[5:]]
    assert max(larger) > ALPHA, "a radius that is too large by .2 is found"


@pytest.mark.parametrize("distance", [0.0, 1e-3])
def test_each_row_of_an_adaptive_table_is_crossed_with_no_more_than_its_level(distance):
    """A false statement needs the row of one fixed radius to be crossed."""
    smoothing = Smoothing(0.5, 50, 1000, 1e-3, distance)
    procedure = PROCEDURES["adaptive"](smoothing, ladder=True)
    rates = [
        crossing_probability(radius_probability(radius, 0.5, distance), procedure.looks, row)
        for radius, row in zip(procedure._grid[::7], procedure._efficacy[::7])
    ]
    assert 0.9e-3 < max(rates) <= 1e-3
