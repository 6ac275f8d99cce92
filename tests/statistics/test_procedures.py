"""What every procedure declares about itself is true; CERTIFY, which abstains early, states what
full counts do. How often each procedure certifies a radius that is too large: exactly, by sums over
all counts of three classes.

A certificate is false if its radius exceeds that of the theorem for the true probabilities, which
some classifier attains.
"""

import dataclasses
import functools
from functools import partial

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from smoothadv.statistics import (
    ABSTAIN,
    COUNT_COLUMNS,
    PROCEDURES,
    Certificate,
    Draws,
    Procedure,
    Smoothing,
)
from smoothadv.statistics.bounds import (
    certified_radius,
    radius_probability,
    top_k_radius,
    two_sided_radius,
)
from support.crossing import crossing_probability
from support.exact_tails import DIGITS, probability_of_at_most
from support.false_statements import claims, exactly_false
from support.votes import ListedVotes, certify, listed, stated

# A router needs two classifiers.
OF_ONE = [name for name in PROCEDURES if "router" not in name]
every_procedure = pytest.mark.parametrize("name", OF_ONE)
SMOOTHING = Smoothing(0.25, 100, 3000, 1e-3)


@functools.cache
def certificates(name: str) -> list[Certificate]:
    """Of classes of many probabilities, by a procedure: their radii differ, and some abstain."""
    shares = np.concatenate(
        [[0.25] * 5, np.linspace(0.45, 0.99, 40), 1 - np.geomspace(1e-2, 1e-6, 20)]
    )
    generator, draws = np.random.default_rng(0), SMOOTHING.n0 + SMOOTHING.n
    procedure = PROCEDURES[name](SMOOTHING)
    found = [certify(procedure, ListedVotes(listed(p, draws, generator))) for p in shares]
    assert 0 < sum(each.prediction == ABSTAIN for each in found) < len(found) / 2
    return found


@every_procedure
def test_columns_are_the_details_and_only_a_procedure_on_a_grid_returns_few_radii(name):
    procedure = PROCEDURES[name](SMOOTHING)
    found = certificates(name)
    assert all(set(each.details) == set(procedure.columns) for each in found)
    largest = max(each.radius for each in found)
    assert not procedure.fixed_sample or procedure.largest_radius >= largest
    steps = np.array([each.radius / SMOOTHING.sigma * 100 for each in found])
    assert (np.abs(steps - steps.round()) < 1e-9).all() == procedure.on_grid


@every_procedure
def test_the_counts_of_a_row_show_its_radius_and_less_at_a_smaller_alpha(name):
    procedure = PROCEDURES[name](SMOOTHING)
    found = [each for each in certificates(name) if each.prediction != ABSTAIN]
    assert all(each.trials == SMOOTHING.n for each in found) == procedure.fixed_sample
    record = procedure.record() | {"sigma": 0.25, "alpha": 1e-3, "N0": 100, "N": SMOOTHING.n}
    counts = [
        {"successes": each.successes, "trials": each.trials, **each.details} for each in found
    ]
    assert {"successes", "trials"} <= set(procedure.counts(record)) <= set(counts[0])
    radii = [each.radius for each in found]
    assert [procedure.shown(each) for each in counts] == radii
    strict = procedure.recorded({**record, "alpha": 1e-4})
    stricter = [strict.shown(each) for each in counts]
    assert all(less is None or less <= radius for less, radius in zip(stricter, radii))
    assert stricter != radii


@every_procedure
@pytest.mark.parametrize("alpha", [0.5, 0.1, 1e-3, 1e-6])
def test_the_least_number_of_draws_certifies_and_one_less_does_not(name, alpha):
    least = PROCEDURES[name].least_draws(alpha)
    if least is None:
        fields = {field.name for field in dataclasses.fields(PROCEDURES[name])}
        assert fields & {"radii", "alpha_share"}, "it depends on more than alpha"
        return
    at, below = (
        PROCEDURES[name](Smoothing(0.25, 10, max(1, n), alpha)).largest_radius
        for n in (least, least - 1)
    )
    assert at is not None and (below is None or least == 1)


@st.composite
def runs(draw) -> tuple[Smoothing, np.ndarray]:
    """A procedure's settings and the classes of all its draws."""
    smoothing = Smoothing(
        sigma=draw(st.floats(0.1, 1)),
        n0=draw(st.integers(1, 30)),
        n=draw(st.integers(1, 300)),
        alpha=draw(st.floats(1e-6, 0.4)),
        noise_distance=draw(st.just(0.0) | st.floats(1e-9, 0.02)),
    )
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    p = draw(st.sampled_from([0.3, 0.5, 0.6, 0.9, 1.0]))
    return smoothing, listed(p, smoothing.n0 + smoothing.n, generator)


# The radius of each fixed sample: of successes, rivals, trials, sigma, alpha, share, distance.
PLAIN = {
    "exact": lambda successes, rivals, trials, *levels: certified_radius(
        successes, trials, levels[0], levels[1], levels[3]
    ),
    "two-sided": lambda successes, rivals, *more: two_sided_radius(successes, rivals[0], *more),
    "top-k": top_k_radius,
}


def test_a_procedure_without_a_decision_is_named():
    with pytest.raises(NotImplementedError, match="^Procedure has no decide of its own$"):
        certify(Procedure(Smoothing(0.25, 5, 50, 0.01)), ListedVotes(np.zeros(60, dtype=int)))


def test_the_plain_radii_are_of_all_fixed_samples():
    fixed = {name for name in PROCEDURES if PROCEDURES[name].fixed_sample}
    # By this, the rules for rows know that a certificate has all N draws.
    gridless = {name for name in PROCEDURES if "radii" not in PROCEDURES[name].recorded_names()}
    assert {*PLAIN, "cascade", "router"} == fixed == gridless, (
        "those of stages have tests of their own"
    )


@pytest.mark.parametrize(
    ("name", "k"), [("exact", 1), ("two-sided", 1), ("top-k", 2), ("top-k", 3)]
)
@settings(max_examples=25)
@given(run=runs())
def test_counting_stops_where_nothing_can_be_certified_and_else_is_full(name, k, run):
    smoothing, classes = run
    n0, n = smoothing.n0, smoothing.n
    votes, further = ListedVotes(classes), {"top_k": k} if name == "top-k" else {}
    certificate = certify(PROCEDURES[name](smoothing, **further), votes)
    leading = np.argsort(-np.bincount(classes[:n0], minlength=4), kind="stable")[:k]
    selected = 2 if 2 in leading else int(leading[0])
    counts = (classes[n0:, None] == np.arange(4)).cumsum(axis=0)

    def rivals(of: np.ndarray) -> list[int]:
        return sorted(np.delete(of, selected).tolist(), reverse=True)

    @functools.cache  # most votes are for the class selected
    def radius_beside(*others: int) -> float | None:
        """With all further votes for the class selected."""
        levels = smoothing.sigma, smoothing.alpha, 0.9, smoothing.noise_distance
        return PLAIN[name](n - sum(others), list(others[:k]), n, *levels)

    def radius(of: np.ndarray) -> float | None:
        return radius_beside(*rivals(of))

    used = next((number for number in range(1, n + 1) if radius(counts[number - 1]) is None), n)
    assert votes.used - n0 == certificate.trials == used
    assert certificate.successes == counts[used - 1, selected]
    found = radius(counts[-1])
    stated = (ABSTAIN, 0.0) if found is None else (selected, found)
    assert (certificate.prediction, certificate.radius) == stated
    details = [*certificate.details.values()]
    assert details == rivals(counts[used - 1])[:k] * (name != "exact")


@pytest.mark.parametrize("name", [name for name in OF_ONE if PROCEDURES[name].fixed_sample])
@pytest.mark.parametrize(("missing", "prediction"), [(0, 2), (1, ABSTAIN)])
def test_fewer_votes_than_were_asked_for_certify_nothing(name, missing, prediction):

    def votes(request: Draws) -> np.ndarray:
        return np.array([0, 0, request.count - missing * (request.count == SMOOTHING.n), 0])

    found = stated(PROCEDURES[name](SMOOTHING), votes, label=2)
    assert (found.prediction, found.trials) == (prediction, SMOOTHING.n - missing)


@pytest.mark.parametrize("alpha", [0.4, 0.05, 1e-3])
@pytest.mark.parametrize("trials", [100, 1_000])
def test_a_tie_on_the_boundary_is_certified_no_more_often_than_alpha(trials, alpha):
    """At each radius that can be reported, an image may lie exactly that far from a half-space:
    there classes tie.
    """
    radii = {
        k: certified_radius(k, trials, 1.0, alpha) for k in range(trials - trials // 4, trials + 1)
    }
    with mpmath.workdps(DIGITS):
        for k, radius in [*radii.items()][:: trials // 12]:
            reaching = probability_of_at_most(trials - k, trials, mpmath.ncdf(-mpmath.mpf(radius)))
            assert alpha * (1 - 1e-6) < reaching <= alpha, (
                "P[R >= distance], for p_A = Phi(distance)"
            )


# False statements


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
