"""Adaptive certification, run as a coroutine, against a plain loop, with and without options;
sequential certificates from two bounds: the levels of both tables, and a plain loop over all
hypotheses.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from smoothadv.statistics import ABSTAIN, Smoothing, error_spending
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.bounds import quantile_loss, radius_probability
from smoothadv.statistics.on_grid import PAPER_RADII
from smoothadv.statistics.sequential import STEPS, Sequential
from support.crossing import crossing_probability
from support.votes import ListedVotes, certify, listed

SMALL = Smoothing(sigma=0.5, n0=50, n=3000, alpha=1e-3)
PROBABILITIES = [0.3, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0]


def plain_loop(tables: Adaptive, classes: np.ndarray) -> tuple[int, int, int, int, int]:
    """Class, level, draws, looks and the draws that decided, step by step: as it is published, one
    row at a time.
    """
    smoothing = tables.smoothing
    selection, rest = classes[: smoothing.n0], classes[smoothing.n0 :]
    candidate = int(np.bincount(selection).argmax())
    selected = int((selection == candidate).sum())
    rows, last = range(len(tables.radii)), len(tables.looks) - 1
    upper = (
        1.0
        if selected == smoothing.n0
        else stats.beta.ppf(0.99, selected + 1, smoothing.n0 - selected)
    )
    if smoothing.n * upper < tables._efficacy[0, last]:
        return candidate, -1, smoothing.n0, 0, 0
    level = -1
    for look, n in enumerate(tables.looks):
        successes = int((rest[:n] == candidate).sum())
        before, level = (
            level,
            max(level, sum(successes >= tables._efficacy[j, look] for j in rows) - 1),
        )
        if level > before or level < 0:
            deciding = int(n)
        following = level + 1
        if following not in rows or tables._efficacy[following, last] > smoothing.n or look == last:
            break
        if successes <= tables._futility[following, look]:
            break
    return candidate, level, smoothing.n0 + int(n), look + 1, deciding


@pytest.mark.parametrize(
    ("smoothing", "radii"),
    [
        (SMALL, list(PAPER_RADII)),
        (dataclasses.replace(SMALL, sigma=0.12, n=400, alpha=0.05), [0.0, 0.1, 0.2, 0.3]),
        (dataclasses.replace(SMALL, sigma=1.0, n0=1, n=77), [0.0]),
        (dataclasses.replace(SMALL, noise_distance=1e-3), [0.0, 0.5, 1.0]),
    ],
)
def test_every_decision_is_that_of_the_plain_loop(smoothing, radii):
    generator, procedure = np.random.default_rng(1), Adaptive(smoothing, radii=tuple(radii))
    levels, decided_before_the_end = set(), 0
    for p in [*PROBABILITIES, *generator.uniform(0.5, 1, 88)]:
        classes = listed(p, smoothing.n0 + smoothing.n, generator)
        candidate, level, samples, looks, trials = plain_loop(procedure, classes)
        votes = ListedVotes(classes)
        certificate = certify(procedure, votes)
        assert certificate.details == {"samples": samples, "level": level, "looks": looks}
        assert votes.used == samples
        successes = (classes[smoothing.n0 : smoothing.n0 + trials] == candidate).sum()
        assert (certificate.successes, certificate.trials) == (successes, trials)
        assert certificate.prediction == (candidate if level >= 0 else ABSTAIN)
        assert certificate.radius == (radii[level] if level >= 0 else 0.0)
        levels.add(level)
        decided_before_the_end += smoothing.n0 + trials < samples
    assert len(levels) >= min(3, len(radii) + 1), "the runs exercise hardly anything"
    assert decided_before_the_end or len(radii) == 1


def test_nothing_is_certified_where_no_count_can():
    procedure = Adaptive(dataclasses.replace(SMALL, n=9))
    assert procedure.largest_radius is None
    assert certify(procedure, ListedVotes(np.full(59, 2))).prediction == ABSTAIN


def test_radii_may_come_in_any_order_and_zero_is_always_among_them():
    assert Adaptive(SMALL, radii=(1.0, 0.5, 1)) == Adaptive(SMALL, radii=(0.5, 0.0, 1.0))
    assert Adaptive(SMALL, radii=[1, 0.5]).radii == (0.0, 0.5, 1.0)
    assert Adaptive(SMALL).radii == PAPER_RADII and hash(Adaptive(SMALL)) == hash(
        Adaptive(SMALL, radii=PAPER_RADII)
    )


@pytest.mark.parametrize("kind", [Adaptive, Sequential])
@pytest.mark.parametrize(
    ("words", "alpha", "radius"),
    [
        ("alpha must be at least 1e-09", math.nextafter(1e-9, 0), 0.5),
        *(
            ("expected a number of at least 0", 1e-9, radius)
            for radius in (-1e-9, math.inf, math.nan)
        ),
    ],
)
def test_impossible_radii_and_levels_are_refused(kind, words, alpha, radius):
    assert kind(dataclasses.replace(SMALL, alpha=1e-9), radii=(0.5,)).columns
    with pytest.raises(ValueError, match=words):
        kind(dataclasses.replace(SMALL, alpha=alpha), radii=(radius,))


@pytest.mark.parametrize("radii", [PAPER_RADII, (0.3,)])
def test_ladder_refines_radii_and_changes_no_draw(radii):
    generator, finer = np.random.default_rng(2), 0
    plain, ladder = Adaptive(SMALL, radii=radii), Adaptive(SMALL, radii=radii, ladder=True)
    for p in [*PROBABILITIES, *generator.uniform(0.5, 1, 60)]:
        classes = listed(p, 3050, generator)
        one, other = (certify(procedure, ListedVotes(classes)) for procedure in (plain, ladder))
        assert (one.details, one.prediction) == (
            other.details,
            other.prediction,
        ) and one.trials <= other.trials
        # Finer, but never as far as the next radius of the grid: that one was not certified.
        above = [radius for radius in plain.radii if radius > one.radius]
        assert one.radius <= other.radius < min(above, default=np.inf) or one.prediction == ABSTAIN
        finer += other.radius > one.radius
    assert finer > 20


def test_rungs_are_a_hundredth_of_sigma_apart_and_reach_what_can_be_certified():
    ladder = Adaptive(SMALL, radii=(0.0,), ladder=True)
    generator = np.random.default_rng(3)
    runs = [ListedVotes(listed(p, 3050, generator)) for p in np.linspace(0.6, 1, 30)]
    radii = {certify(ladder, votes).radius for votes in runs}
    assert len(radii) > 3 and all(
        abs(200 * radius - round(200 * radius)) < 1e-9 for radius in radii
    )
    assert ladder.largest_radius == max(radii)


def test_label_awareness_skips_wrong_classes_and_marks_them():
    generator, skipped = np.random.default_rng(4), 0
    aware, blind = Adaptive(SMALL, label_aware=True), Adaptive(SMALL)
    for p in [*PROBABILITIES, *generator.uniform(0.1, 1, 40)]:
        classes = listed(p, 3050, generator)
        selected = int(np.bincount(classes[:50]).argmax())
        one, other = (
            certify(procedure, ListedVotes(classes), label=2) for procedure in (aware, blind)
        )
        if selected == 2:
            assert one == dataclasses.replace(other, details={**other.details, "label_aware": 0})
        else:
            assert (one.prediction, one.radius, one.trials) == (ABSTAIN, 0.0, 0)
            assert one.details == {"samples": 50, "level": -1, "looks": 0, "label_aware": 1}
            skipped += 1
        assert [one.prediction == 2 and one.radius >= r for r in PAPER_RADII] == [
            other.prediction == 2 and other.radius >= r for r in PAPER_RADII
        ]
    assert 5 <= skipped <= 40


# Sequential certificates


SEQUENTIAL = Smoothing(sigma=0.5, n0=50, n=1000, alpha=1e-3)
SHARE = 0.9


@pytest.fixture(scope="module")
def small() -> Sequential:
    """The procedure whose tables are built once."""
    return Sequential(SEQUENTIAL, radii=(0.25, 0.5))


def test_each_row_is_rejected_with_no_more_than_its_level(small):
    lower, rival = small._tables
    nulls = [radius_probability(float(radius), SEQUENTIAL.sigma) for radius in small._hypotheses[0]]
    rivals = [
        radius_probability(SEQUENTIAL.sigma * step / STEPS, SEQUENTIAL.sigma)
        for step in range(1, len(rival) + 1)
    ]
    levels = SHARE * SEQUENTIAL.alpha, (1 - SHARE) * SEQUENTIAL.alpha
    for table, each, level in zip((lower, rival), (nulls, rivals), levels):
        assert (np.diff(table, axis=0) >= 0).all(), (
            "a rejection includes those of smaller hypotheses"
        )
        rates = [crossing_probability(t, small.looks, row) for t, row in zip(each[::7], table[::7])]
        assert max(rates) <= level and max(rates) > 0.9 * level
    uneven = Sequential(
        dataclasses.replace(SEQUENTIAL, sigma=0.37), radii=(0.07, 0.25, 0.2499999999925, 1e20)
    )
    for each in (small, uneven):
        radii, steps = each._hypotheses
        below = radii / each.smoothing.sigma * STEPS - steps
        assert (below[:-1] > -1e-12).all() and (below[:-1] < 1).all() and len(below) > 200
    assert steps[np.searchsorted(radii, 0.25)] == 33


def loop_over_hypotheses(procedure: Sequential, classes: np.ndarray) -> tuple[int, float, int]:
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
        classes = generator.choice(4, size=SEQUENTIAL.n0 + SEQUENTIAL.n, p=p)
        certificate, votes = None, ListedVotes(classes)
        certificate = certify(small, votes)
        stopped = votes.used - SEQUENTIAL.n0
        cut = dataclasses.replace(
            small
        )  # the plain loop sees no look after the one at which the procedure stopped
        vars(cut).update(looks=small.looks[small.looks <= stopped], _tables=small._tables)
        candidate, radius, deciding = loop_over_hypotheses(cut, classes)
        counts = np.bincount(classes[SEQUENTIAL.n0 : SEQUENTIAL.n0 + deciding], minlength=4)
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


def test_options_of_sequential_certificates(small):
    aware = Sequential(SEQUENTIAL, radii=(0.25, 0.5), label_aware=True)
    assert certify(aware, ListedVotes(np.full(50, 1)), label=2).details == {
        "samples": 50,
        "level": -1,
        "looks": 0,
        "rival": 0,
        "label_aware": 1,
    }
    assert aware.columns == ("samples", "level", "looks", "rival", "label_aware")
    assert small.record() == {**aware.record(), "label_aware": False}
    other = Sequential(dataclasses.replace(SEQUENTIAL, noise_distance=1e-3), radii=(0.25,))
    assert other.record()["tables_sha256"] != aware.record()["tables_sha256"]
    assert 0 < other.largest_radius <= aware.largest_radius
    # The distance enters each hypothesis, and again where two of them are combined.
    look = len(other.looks) - 1
    votes = np.array([650, 60] + [29] * 10)
    counts = votes[0], SEQUENTIAL.n - votes[1]
    row, rival = (
        int(np.searchsorted(t[:, look], k, side="right")) for t, k in zip(other._tables, counts)
    )
    step = int(other._hypotheses[1][row - 1])
    loss = quantile_loss(step / STEPS, rival / STEPS, 1e-3)
    assert rival > step and other.certified(*counts, look) == pytest.approx(
        0.5 * ((step + rival) / 100 - loss), abs=1e-12
    )
    t, looks = (
        radius_probability(1.0, SEQUENTIAL.sigma),
        Sequential(SEQUENTIAL, radii=(1.0,), alpha_share=0.5).looks,
    )
    passing = (
        n
        for n in range(10, 1000, 10)
        if t**n <= error_spending.spending(n, 1000, SEQUENTIAL.alpha / 2, 0.9)
    )
    assert next(passing) in looks, "the first at which successes alone certify the radius"


def test_a_rival_never_takes_away_what_the_bound_on_the_class_certifies():
    """Also where the distance of the noise costs the sum of both bounds more than it gains."""
    procedure = Sequential(dataclasses.replace(SEQUENTIAL, noise_distance=0.01), radii=(0.25, 0.5))
    (lower, _), (radii, _) = procedure._tables, procedure._hypotheses
    look, sums = len(procedure.looks) - 1, 0
    for own in range(500, SEQUENTIAL.n + 1, 7):
        alone = radii[np.searchsorted(lower[:, look], own, side="right") - 1]
        found = procedure.certified(own, SEQUENTIAL.n - (SEQUENTIAL.n - own) // 3, look)
        assert found >= alone
        sums += found > alone
    assert sums > 0
