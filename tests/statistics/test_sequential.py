"""Sequential certificates from two bounds: the levels of both tables, and a plain loop over all
hypotheses.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from smoothadv.statistics import ABSTAIN, Smoothing, error_spending
from smoothadv.statistics.bounds import quantile_loss, radius_probability
from smoothadv.statistics.sequential import STEPS, Sequential
from support.crossing import crossing_probability
from support.votes import ListedVotes, certify

SMALL = Smoothing(sigma=0.5, n0=50, n=1000, alpha=1e-3)
SHARE = 0.9


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory):
    """The procedure whose tables are built once, in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOOTHADV_CACHE", str(tmp_path_factory.mktemp("cache")))
        procedure = Sequential(SMALL, radii=(0.25, 0.5))
        assert procedure._tables
        yield procedure


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


def test_options(small):
    aware = Sequential(SMALL, radii=(0.25, 0.5), label_aware=True)
    assert certify(aware, ListedVotes(np.full(50, 1)), label=2).details == {
        "samples": 50,
        "level": -1,
        "looks": 0,
        "rival": 0,
        "label_aware": 1,
    }
    assert aware.columns == ("samples", "level", "looks", "rival", "label_aware")
    assert small.record() == {**aware.record(), "label_aware": False}
    other = Sequential(dataclasses.replace(SMALL, noise_distance=1e-3), radii=(0.25,))
    assert other.record()["tables_sha256"] != aware.record()["tables_sha256"]
    assert 0 < other.largest_radius <= aware.largest_radius
    # The distance enters each hypothesis, and again where two of them are combined.
    look = len(other.looks) - 1
    votes = np.array([650, 60] + [29] * 10)
    counts = votes[0], SMALL.n - votes[1]
    row, rival = (
        int(np.searchsorted(t[:, look], k, side="right")) for t, k in zip(other._tables, counts)
    )
    step = int(other._hypotheses[1][row - 1])
    loss = quantile_loss(step / STEPS, rival / STEPS, 1e-3)
    assert rival > step and other.certified(*counts, look) == pytest.approx(
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


def test_a_rival_never_takes_away_what_the_bound_on_the_class_certifies():
    """Also where the distance of the noise costs the sum of both bounds more than it gains."""
    procedure = Sequential(dataclasses.replace(SMALL, noise_distance=0.01), radii=(0.25, 0.5))
    (lower, _), (radii, _) = procedure._tables, procedure._hypotheses
    look, sums = len(procedure.looks) - 1, 0
    for own in range(500, SMALL.n + 1, 7):
        alone = radii[np.searchsorted(lower[:, look], own, side="right") - 1]
        found = procedure.certified(own, SMALL.n - (SMALL.n - own) // 3, look)
        assert found >= alone
        sums += found > alone
    assert sums > 0
