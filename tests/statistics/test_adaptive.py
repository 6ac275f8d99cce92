"""Adaptive certification, run as a coroutine, against a plain loop, with and without options."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from smoothadv.statistics import ABSTAIN, Smoothing
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.on_grid import PAPER_RADII
from smoothadv.statistics.sequential import Sequential
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
