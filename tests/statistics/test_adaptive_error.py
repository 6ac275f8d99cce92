"""How often adaptive certification makes a false statement, by simulation of the whole procedure.

The simulation is the procedure's loop for many runs at once, over the procedure's own tables; one
test compares it with the coroutine run by run. Every check on random outcomes rejects a correct
procedure with probability at most 1e-6 (``FALSE_ALARM``), and is shown to reject a wrong one.
"""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from smoothadv.statistics import Draws, Smoothing
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.error_spending import success_upper_bound
from support.statistical_checks import too_many
from support.votes import certify

PROBABILITIES = [0.5, 0.5049, 0.6, 0.9, 0.99, 0.999, 0.9999, 0.99999]
ALPHA, N0 = 1e-3, 100


@pytest.fixture(scope="module")
def plain() -> Adaptive:
    return Adaptive(Smoothing(sigma=0.5, n0=N0, n=125_000, alpha=ALPHA))


@pytest.fixture(scope="module")
def ladder() -> Adaptive:
    """All that could add errors: nearly 550 rows, futility, the grid's stops."""
    return Adaptive(Smoothing(sigma=0.5, n0=N0, n=125_000, alpha=ALPHA), ladder=True)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Of every run: votes for the class in the selection and up to each look [runs, K], row
    reached, looks taken.
    """

    selected: np.ndarray
    successes: np.ndarray
    row: np.ndarray
    looks: np.ndarray


def simulate(procedure: Adaptive, p: float, number: int, seed: int) -> Runs:
    """``number`` runs on a class of probability ``p``, which the selection is assumed to find."""
    decisions, looks, efficacy = (
        np.searchsorted(procedure._grid, procedure.radii),
        procedure.looks,
        procedure._efficacy,
    )
    generator, n_max, last = np.random.default_rng(seed), looks[-1], len(looks) - 1
    upper = np.array([success_upper_bound(s, N0, 0.01) for s in range(N0 + 1)])
    selected = generator.binomial(N0, p, number)
    runs = Runs(
        selected,
        np.zeros((number, last + 1), np.int64),
        np.full(number, -1),
        np.zeros(number, np.int64),
    )
    going = np.flatnonzero(n_max * upper[selected] >= efficacy[0, -1])
    count = np.zeros(number, np.int64)
    for look, draws in enumerate(np.diff(looks, prepend=0)):
        count[going] += generator.binomial(draws, p, len(going))
        # Boundaries ascend with the rows, so that the number of those reached is the place of the
        # count among them.
        reached = np.searchsorted(efficacy[:, look], count[going], side="right") - 1
        runs.row[going] = np.maximum(runs.row[going], reached)
        runs.looks[going], runs.successes[going, look] = look + 1, count[going]
        following = np.searchsorted(decisions, runs.row[going], side="right")
        row = decisions[np.minimum(following, len(decisions) - 1)]
        decided = (following == len(decisions)) | (efficacy[row, -1] > n_max)
        going = going[
            ~(decided | (count[going] <= procedure._futility[row, look]) | (look == last))
        ]
    return runs


def false_statements(procedure: Adaptive, p: float, number: int, seed: int) -> int:
    """How many runs reject a hypothesis "p <= t" that is true: their class or their radius is
    wrong.
    """
    row = simulate(procedure, p, number, seed).row
    return int(((row >= 0) & (nulls_of(procedure)[row] >= p)).sum())


def nulls_of(procedure: Adaptive) -> np.ndarray:
    return np.array([*map(procedure.null, procedure._grid)])


def with_tables(procedure: Adaptive, **tables: np.ndarray) -> Adaptive:
    """The procedure with other boundaries."""
    other = dataclasses.replace(procedure)
    vars(other).update(tables)
    return other


class RecordedVotes:
    """Answers the coroutine's requests with the votes of a simulated run."""

    def __init__(self, runs: Runs, run: int) -> None:
        steps = np.diff(runs.successes[run], prepend=0)
        self.answers = iter([runs.selected[run], *steps])

    def answer(self, request: Draws) -> np.ndarray:
        successes = next(self.answers)
        others = request.count - successes
        # The other votes are split, so that the class is selected even with less than half of the
        # votes.
        return np.array([others // 3, others // 3, successes, others - 2 * (others // 3)])


@pytest.mark.parametrize("p", [0.4, 0.52, *PROBABILITIES])
def test_simulation_is_the_coroutine_run_by_run(ladder, p):
    number = 20
    runs = simulate(ladder, p, number, seed=0)
    for run in range(number):
        certificate = certify(ladder, RecordedVotes(runs, run))
        row, looks = runs.row[run], runs.looks[run]
        assert certificate.details["looks"] == looks
        deciding = list(ladder.looks).index(certificate.trials) if looks else -1
        assert deciding < looks and certificate.successes == (
            runs.successes[run, deciding] if looks else 0
        )
        assert row < 0 or certificate.successes >= ladder._efficacy[row, deciding], (
            "the counts show the radius"
        )
        assert certificate.radius == (ladder._grid[row] if row >= 0 else 0.0)
        assert (certificate.prediction == 2) == (row >= 0)


def test_true_radius_is_exceeded_no_more_often_than_alpha(ladder):
    number = 100_000
    counts = [false_statements(ladder, p, number, seed) for seed, p in enumerate(PROBABILITIES)]
    assert not any(too_many(count, number, ALPHA) for count in counts)
    assert sum(counts) > 50, "hardly any errors: these runs would not show too many"


def test_error_stays_below_alpha_where_it_is_largest(plain):
    """It is largest at the null hypotheses themselves, and without giving up early, which hides
    errors.
    """
    number = 20_000
    patient = with_tables(plain, _futility=np.full_like(plain._futility, -1))
    counts = [false_statements(patient, t, number, 1) for t in nulls_of(plain)[:8]]
    assert not any(too_many(count, number, ALPHA) for count in counts)
    assert sum(counts) > 20, "hardly any errors: these runs would not show too many"


def test_error_check_rejects_a_fixed_bound_looked_at_many_times(plain):
    nulls = nulls_of(plain)
    peeking = [stats.binom.isf(ALPHA, plain.looks, t).astype(int) + 1 for t in nulls[:8]]
    peeking = with_tables(plain, _efficacy=np.vstack([peeking, plain._efficacy[8:]]))
    assert too_many(false_statements(peeking, 0.5, 20_000, 0), 20_000, ALPHA)
    assert too_many(false_statements(peeking, nulls[4], 20_000, 0), 20_000, ALPHA)


def test_error_check_rejects_lowered_boundaries(ladder):
    # By 0.7 standard deviations of the count.
    nulls = nulls_of(ladder)[:, None]
    shift = 0.7 * np.sqrt(ladder.looks * nulls * (1 - nulls))
    lowered = with_tables(ladder, _efficacy=ladder._efficacy - shift.astype(int))
    assert too_many(false_statements(lowered, 0.5, 20_000, 0), 20_000, ALPHA)
