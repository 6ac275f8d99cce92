"""Sequential certificates from two bounds: against a plain loop over all hypotheses, and how often
they are false.

Every check on random outcomes rejects a correct procedure with probability at most 1e-6
(``FALSE_ALARM``), and is shown to reject a wrong one.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import signal, special, stats

from smoothadv.statistics import ABSTAIN, Smoothing, error_spending
from smoothadv.statistics.bounds import quantile_loss, radius_probability, two_sided_radius
from smoothadv.statistics.sequential import STEPS, Sequential
from support.crossing import crossing_probability
from support.statistical_checks import too_many
from support.votes import ListedVotes, certify

SMALL = Smoothing(sigma=0.5, n0=50, n=1000, alpha=1e-3)
SHARE = 0.9
POINTS = {
    "three equal": [1 / 3] * 3,
    "two equal": [0.5, 0.5],
    "a hair": [0.4, 0.4, 0.2],
    "ten equal": [0.1] * 10,
    "one rival": [0.6, 0.4],
    "below one half": [0.3] + [0.1] * 7,
    "nearly certain": [0.999, 0.0005, 0.0005],
}


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory):
    """The procedure whose tables are built once, in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOOTHADV_CACHE", str(tmp_path_factory.mktemp("cache")))
        procedure = Sequential(SMALL, radii=(0.25, 0.5))
        assert procedure._tables
        yield procedure


def on_the_edge(radius: float, p_a: float) -> list[float]:
    """Probabilities for which Theorem 1 gives exactly this radius (sigma = 0.5), the rest in small
    parts.
    """
    p_b = float(special.ndtr(special.ndtri(p_a) - 2 * radius / SMALL.sigma))
    return [p_a, p_b] + [(1 - p_a - p_b) / 40] * 40


def radii_of(
    procedure: Sequential, votes: np.ndarray, look: int, tables=None, rivals=slice(1, None)
) -> np.ndarray:
    """``certified`` of many counts [runs, K] of class 0, without the rounding of its last
    digits.
    """
    lower, rival = tables or procedure._tables
    row = np.searchsorted(lower[:, look], votes[:, 0], side="right") - 1
    rival_step = np.searchsorted(
        rival[:, look], votes.sum(axis=1) - votes[:, rivals].max(axis=1), side="right"
    )
    alone, step = (values[row] for values in procedure._hypotheses)
    both = np.where(
        rival_step > step, procedure.smoothing.sigma * (step + rival_step) / (2 * STEPS), -1.0
    )
    return np.where(row >= 0, np.maximum(alone, both), -1.0)


def false_claims(procedure: Sequential, p: list[float], runs: int, **rule) -> int:
    """Runs that certify class 0 beyond Theorem 1's radius at any look: as if the procedure never
    gave up early.
    """
    generator, truth = (
        np.random.default_rng(len(p)),
        (special.ndtri(p[0]) - special.ndtri(max(p[1:]))) / 2,
    )
    votes, before, best = np.zeros((runs, len(p)), np.int64), 0, np.full(runs, -1.0)
    for look, n in enumerate(procedure.looks):
        votes += generator.multinomial(int(n) - before, p, runs)
        before, best = int(n), np.maximum(best, radii_of(procedure, votes, look, **rule))
    return int(((best >= 0) & (best > procedure.smoothing.sigma * truth + 1e-12)).sum())


def test_the_simulation_certifies_what_the_procedure_does(small):
    generator = np.random.default_rng(0)
    for p in POINTS.values():
        for look, n in enumerate(small.looks):
            votes = generator.multinomial(n, p)
            certified = small.certified(votes, 0, look)
            assert max(certified, -1.0) == pytest.approx(
                max(-1.0, radii_of(small, votes[None], look)[0]), abs=1e-12
            )


@pytest.mark.parametrize(
    "p", [*POINTS.values(), on_the_edge(0.25, 0.6), on_the_edge(0.25, 0.45), on_the_edge(0.5, 0.7)]
)
def test_false_claims_are_no_more_frequent_than_alpha(small, p):
    assert not too_many(false_claims(small, p, 20_000), 20_000, SMALL.alpha)


@pytest.fixture(scope="module")
def tiny() -> tuple[list[int], list[np.ndarray]]:
    """Looks up to 150 draws, and what the procedure certifies at each, by class 0's count and the
    rival's: [n+1, n+1].

    Theorem 1's radius in units of sigma = 1 at alpha = .05; -1 for no radius and for impossible
    counts.
    """
    procedure = Sequential(Smoothing(1.0, 10, 150, 0.05), radii=(0.25, 0.5))
    tables = []
    for look, n in enumerate(procedure.looks.tolist()):
        certified = np.full((n + 1, n + 1), -1.0)
        for own in range(n + 1):
            for rival in range(n + 1 - own):
                # With three classes, the strongest rival has at least half of the other draws.
                votes = np.array([own, max(rival, n - own - rival), min(rival, n - own - rival)])
                certified[own, rival] = max(-1.0, procedure.certified(votes, 0, look))
        tables.append(certified)
    return procedure.looks.tolist(), tables


def exactly_false(
    tiny: tuple[list[int], list[np.ndarray]], p: list[float], slack: float = 0.0
) -> float:
    """The probability that three classes ``p`` get a radius above Theorem 1's, plus ``slack``, at
    some look.

    No draw is random here: all counts of the three classes are followed from look to look.
    """
    truth = (special.ndtri(p[0]) - special.ndtri(max(p[1:]))) / 2 + slack
    alive, before, wrong = np.ones((1, 1)), 0, 0.0
    for n, certified in zip(*tiny):
        own, rival = np.meshgrid(*[np.arange(n - before + 1)] * 2, indexing="ij")
        counts = np.stack([own, rival, n - before - own - rival], axis=-1)
        more = np.where(
            counts[..., 2] >= 0, stats.multinomial.pmf(np.maximum(counts, 0), n - before, p), 0.0
        )
        alive, before = signal.convolve2d(alive, more), n
        false = (certified >= 0) & (certified > truth + 1e-12)
        wrong += float(alive[false].sum())
        alive = np.where(false, 0.0, alive)
    assert wrong + alive.sum() == pytest.approx(1, abs=1e-9)
    return wrong


def test_the_exact_probability_of_a_false_claim_is_at_most_alpha(tiny):
    """At ties, and where Theorem 1 gives a radius to decide, from hardly a rival to two equal
    ones.
    """
    edges = [[1 / 3] * 3, [0.4, 0.4, 0.2], [0.45, 0.45, 0.1], [0.5, 0.5, 0.0], [0.2, 0.4, 0.4]]
    for radius in (0.1, 0.25, 0.5):
        for p_a in np.linspace(0.4, 0.85, 10).tolist():
            p_b = float(special.ndtr(special.ndtri(p_a) - 2 * radius))
            if p_b <= 1 - p_a <= 2 * p_b:
                edges.append([p_a, p_b, max(0.0, 1 - p_a - p_b)])
    found = [exactly_false(tiny, p) for p in edges]
    assert len(found) > 10 and max(found) <= 0.05, dict(zip(map(tuple, edges), found))
    assert max(found) > 0.01, "the level is used"
    assert max(exactly_false(tiny, p, slack=-0.2) for p in edges[5:]) > 0.05, (
        "a radius that is too large by .2 is found"
    )


def test_the_check_rejects_wrong_rules(small):
    nulls = special.ndtr(small._hypotheses[0] / SMALL.sigma)
    rivals = special.ndtr(np.arange(1, len(small._tables[1]) + 1) / STEPS)
    levels = SHARE * SMALL.alpha, (1 - SHARE) * SMALL.alpha
    peeking = tuple(
        np.array([stats.binom.isf(level, small.looks, t) + 1 for t in each])
        for each, level in zip((nulls, rivals), levels)
    )
    runs = 50_000
    assert too_many(
        false_claims(small, POINTS["two equal"], runs, tables=peeking), runs, SMALL.alpha
    )
    # Without the other rivals, of which any may be the strongest.
    assert too_many(
        false_claims(small, [0.3, 0.02] + [0.085] * 8, runs, rivals=slice(1, 2)), runs, SMALL.alpha
    )


def test_each_row_is_rejected_with_no_more_than_its_level(small):
    lower, rival = small._tables
    nulls = [radius_probability(float(radius), SMALL.sigma) for radius in small._hypotheses[0]]
    rivals = [
        radius_probability(SMALL.sigma * step / STEPS, SMALL.sigma)
        for step in range(1, len(rival) + 1)
    ]
    levels = SHARE * SMALL.alpha, (1 - SHARE) * SMALL.alpha
    for table, each, level in zip((lower, rival), (nulls, rivals), levels):
        assert (np.diff(table, axis=0) >= 0).all(), (
            "a rejection includes those of smaller hypotheses"
        )
        rates = [crossing_probability(t, small.looks, row) for t, row in zip(each[::7], table[::7])]
        assert max(rates) <= level and max(rates) > 0.9 * level
    uneven = Sequential(
        dataclasses.replace(SMALL, sigma=0.37), radii=(0.07, 0.25, 0.2499999999925, 1e20)
    )
    for each in (small, uneven):
        radii, steps = each._hypotheses
        below = radii / each.smoothing.sigma * STEPS - steps
        assert (below[:-1] > -1e-12).all() and (below[:-1] < 1).all() and len(below) > 200
    assert steps[np.searchsorted(radii, 0.25)] == 33


def plain_loop(procedure: Sequential, classes: np.ndarray) -> tuple[int, float, int]:
    """Class, radius and draws at which it was certified, hypothesis by hypothesis, all looks,
    without giving up.
    """
    selection, rest = classes[: procedure.smoothing.n0], classes[procedure.smoothing.n0 :]
    candidate, best, deciding = int(np.bincount(selection, minlength=4).argmax()), -1.0, 0
    lower, rival = procedure._tables
    sigma = Fraction(procedure.smoothing.sigma)
    for look, n in enumerate(procedure.looks.tolist()):
        votes = np.bincount(rest[:n], minlength=4)
        others = n - np.delete(votes, candidate).max()
        for row, radius in enumerate(procedure._hypotheses[0].tolist()):
            if votes[candidate] >= lower[row, look]:
                step = math.floor(Fraction(radius) / sigma * STEPS + Fraction(1, 10**9))
                rival_step = max(
                    [j + 1 for j in range(len(rival)) if others >= rival[j, look]], default=0
                )
                radius = max(radius, float(sigma * (step + max(step, rival_step)) / (2 * STEPS)))
                if radius > best and radius >= 0:
                    best, deciding = radius, n
    return candidate, best, deciding


@pytest.mark.parametrize(
    "p",
    [
        [0.3, 0.05, 0.6, 0.05],
        [0.2, 0.2, 0.4, 0.2],
        [0.0, 0.01, 0.99, 0.0],
        [0.25] * 4,
        [0, 0, 1, 0],
    ],
)
def test_certificates_are_those_of_a_plain_loop_until_it_gives_up(small, p):
    generator, certified = np.random.default_rng(5), 0
    for _ in range(4):
        classes = generator.choice(4, size=SMALL.n0 + SMALL.n, p=p)
        certificate, votes = None, ListedVotes(classes)
        certificate = certify(small, votes)
        stopped = votes.used - SMALL.n0
        cut = dataclasses.replace(
            small
        )  # the plain loop sees no look after the one at which the procedure stopped
        vars(cut).update(looks=small.looks[small.looks <= stopped], _tables=small._tables)
        candidate, radius, deciding = plain_loop(cut, classes)
        counts = np.bincount(classes[SMALL.n0 : SMALL.n0 + deciding], minlength=4)
        assert certificate.prediction == (candidate if radius >= 0 else ABSTAIN)
        assert certificate.radius == pytest.approx(max(radius, 0.0), rel=1e-15)
        assert certificate.details["samples"] == votes.used
        assert certificate.details["looks"] == len(cut.looks)
        assert certificate.details["level"] == sum(r <= radius for r in (0.0, 0.25, 0.5)) - 1
        if radius >= 0:
            certified += 1
            assert (certificate.successes, certificate.trials) == (counts[candidate], deciding)
            assert certificate.details["rival"] == np.delete(counts, candidate).max()
    assert certified or max(p) == 0.25


def test_giving_up_loses_few_radii_and_saves_draws(small):
    """Against both bounds from all draws at once, whose radii are not on a grid of sigma / 100."""
    generator, lost, draws, runs = np.random.default_rng(6), 0, 0, 0
    for p in (
        [0.3, 0.1, 0.5, 0.1],
        [0.2, 0.2, 0.4, 0.2],
        [0.01, 0.01, 0.97, 0.01],
        [0.24, 0.24, 0.28, 0.24],
    ):
        for _ in range(25):
            classes = generator.choice(4, size=SMALL.n0 + SMALL.n, p=p)
            found, counts = (
                certify(small, ListedVotes(classes)),
                np.bincount(classes[SMALL.n0 :], minlength=4),
            )
            selected = int(np.bincount(classes[: SMALL.n0], minlength=4).argmax())
            of_all = counts[selected], np.delete(counts, selected).max(), SMALL.n
            whole = two_sided_radius(*map(int, of_all), SMALL.sigma, SMALL.alpha, SHARE)
            decided = -1 if whole is None else sum(r <= whole for r in (0.0, 0.25, 0.5)) - 1
            lost += found.details["level"] < decided
            draws, runs = draws + found.details["samples"], runs + 1
    assert lost <= 0.2 * runs and draws < 0.6 * runs * (SMALL.n0 + SMALL.n)


def test_options():
    aware = Sequential(SMALL, radii=(0.25,), label_aware=True)
    certificate = certify(aware, ListedVotes(np.full(50, 1)), label=2)
    assert certificate.details == {
        "samples": 50,
        "level": -1,
        "looks": 0,
        "rival": 0,
        "label_aware": 1,
    }
    assert aware.columns == ("samples", "level", "looks", "rival", "label_aware")
    assert Sequential(SMALL, radii=(0.25,)).settings == {**aware.settings}
    other = Sequential(dataclasses.replace(SMALL, noise_distance=1e-3), radii=(0.25,))
    assert other.settings != aware.settings and 0 < other.largest_radius <= aware.largest_radius
    # The distance enters each hypothesis, and again where two of them are combined.
    look = len(other.looks) - 1
    votes = np.array([650, 60] + [29] * 10)
    counts = votes[0], SMALL.n - votes[1]
    row, rival = (
        int(np.searchsorted(t[:, look], k, side="right")) for t, k in zip(other._tables, counts)
    )
    step = int(other._hypotheses[1][row - 1])
    loss = quantile_loss(step / STEPS, rival / STEPS, 1e-3)
    assert rival > step and other.certified(votes, 0, look) == pytest.approx(
        0.5 * ((step + rival) / 100 - loss), abs=1e-12
    )
    t, looks = (
        radius_probability(1.0, SMALL.sigma),
        Sequential(SMALL, radii=(1.0,), alpha_share=0.5).looks,
    )
    passing = (
        n
        for n in range(10, 1000, 10)
        if t**n <= error_spending.spending(n, 1000, SMALL.alpha / 2, 0.9)
    )
    assert next(passing) in looks, "the first at which successes alone certify the radius"
