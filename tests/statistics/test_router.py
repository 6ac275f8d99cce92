"""Certificates of routers: how often they are false, rows, predictions.

A statement is false only if its radius exceeds the theorem's for the router's probabilities at x,
or for those of the stage that was chosen.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy import stats

from smoothadv.statistics import ABSTAIN, Draws, Smoothing
from smoothadv.statistics.bounds import two_sided_radius
from smoothadv.statistics.cascade import STAGE
from smoothadv.statistics.router import (
    Router,
    RouterProcedure,
    SequentialRouter,
    predict_by_router,
)
from support.false_statements import (
    claims_of,
    exactly_false,
    quantile,
    two_sided_edges,
)
from support.votes import answered, outcome, stated

ALPHA = 0.05
# Of two stages, and of the router.
SIGMAS = (1.0, 0.5, 0.8)
both_forms = pytest.mark.parametrize("kind", [Router, SequentialRouter])


def of_kind(kind: type[RouterProcedure], n: int, alpha: float = ALPHA) -> RouterProcedure:
    further = {} if kind is Router else {"radii": (0.1, 0.25, 0.5)}
    return kind(Smoothing(1.0, 30, n, alpha), sigmas=SIGMAS, **further)


@both_forms
def test_a_false_statement_is_no_more_probable_than_alpha(kind):
    """Exactly: the classifiers' draws are independent, and a statement is false if both bounds
    exceed the smaller radius of the theorem.
    """
    procedure, rates = of_kind(kind, 60 if kind is Router else 80), []
    router = claims_of(procedure.bounds[2])
    for stage, radius in product((0, 1), (0.1, 0.25)):
        own = claims_of(procedure.bounds[stage])
        of_router = [exactly_false(router, p, radius) for p in two_sided_edges(radius, SIGMAS[2])]
        of_stage = [exactly_false(own, p, radius) for p in two_sided_edges(radius, SIGMAS[stage])]
        # The other bound holds by far, or is at its edge, too.
        rates += [*of_router, *of_stage, *(a * b for a, b in product(of_router, of_stage))]
    assert len(rates) == 32 and max(rates) <= ALPHA, max(rates)
    assert max(rates) > ALPHA / 5, "the level is used"


def test_controls_exceed_alpha():
    """The same sums find a router that is left out, and a stage chosen by the votes that
    estimate.
    """
    procedure = of_kind(Router, 150)
    stages = [claims_of(procedure.bounds[stage]) for stage in (0, 1)]
    sure = [0.999, 0.001, 0.0]
    assert exactly_false(stages[0], sure, 0.1) > ALPHA, "the router changes its choice at 0.1"
    either = [
        exactly_false(own, two_sided_edges(0.25, sigma)[0], 0.25)
        for own, sigma in zip(stages, SIGMAS)
    ]
    assert 1 - (1 - either[0]) * (1 - either[1]) > 1.4 * ALPHA, "the better of two stages"


def prediction_of(routed: np.ndarray, votes: np.ndarray, alpha: float) -> list[int]:
    """What PREDICT answers with these votes of the router and of the stage that it chooses."""
    of_stage = {2: routed, int(routed.argmax()): votes}
    voting = predict_by_router(int(routed.sum()), alpha, 2)
    return outcome(voting, lambda request: of_stage[request.stage])


def test_predictions_ask_the_stage_of_the_router():
    sure = np.array([2, 98, 0])
    assert prediction_of(np.array([3, 97]), sure, 0.01) == [1]
    assert prediction_of(np.array([52, 48]), sure, 0.01) == []
    assert prediction_of(np.array([3, 97]), np.array([50, 50, 0]), 0.01) == []


def test_predictions_are_seldom_wrong():
    """Exactly: with a router and a stage that are undecided, each goes wrong with probability at
    most alpha / 2, and uses a part of it.
    """
    n, alpha = 60, 0.2
    counts = [np.array([own, n - own]) for own in range(n + 1)]
    chances = stats.binom.pmf(range(n + 1), n, 0.5)
    sure = np.array([n, 0])
    of_router = [prediction_of(each, sure, alpha) for each in counts]
    for found in (of_router, [prediction_of(sure, each, alpha) for each in counts]):
        assert alpha / 20 < sum(c for c, answer in zip(chances, found) if answer) <= alpha / 2


def test_the_smaller_radius_counts_though_the_other_bound_is_sure_at_once():
    """The stage's first look certifies more than the router's last one."""
    route, stage = [0.62, 0.38], [1.0, 0.0, 0.0]
    found = answered(of_kind(SequentialRouter, 400), [stage, stage, route])
    assert found.prediction == 0 and 0 < found.radius <= 0.8 * quantile(0.62)


DISTANCES = (0.01, 0.02, 0.03)


@pytest.mark.parametrize(("stage", "place"), [(0, 0), (0, 2), (1, 1), (1, 2)])
def test_each_bound_has_the_distance_of_its_own_noise(stage, place):
    """The bound of one place decides; of each other place the votes leave no doubt."""
    smoothing, n = Smoothing(1.0, 30, 1000, 1e-3, 0.005), 1000
    procedure = Router(smoothing, sigmas=SIGMAS, noise_distances=DISTANCES)
    sure = [[1.0, 0.0, 0.0]] * 2 + [[1.0 - stage, float(stage)]]
    shares = list(sure)
    shares[place] = [0.7, 0.3, 0.0] if place < 2 else [0.7 - 0.4 * stage, 0.3 + 0.4 * stage]
    found = answered(procedure, shares, sure)
    expected = two_sided_radius(700, 300, n, SIGMAS[place], 1e-3, 0.9, DISTANCES[place])
    counts = {"successes": found.successes, "trials": n, **found.details}
    assert (found.prediction, found.details[STAGE]) == (0, stage + 1)
    assert found.radius == expected == procedure.shown(counts) > 0


def test_samples_are_all_draws_and_those_of_another_class_stop():
    procedure = replace(of_kind(SequentialRouter, 400), label_aware=True)
    p, asked = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0]], []
    found = answered(procedure, p, asked=asked)
    assert found.details["samples"] == sum(each.count for each in asked)
    assert (found.prediction, found.details["label_aware"], found.details[STAGE]) == (0, 0, 1)
    asked.clear()
    skipped = answered(procedure, [*p[:2], [0.0, 1.0]], asked=asked)
    assert (skipped.prediction, skipped.details["label_aware"]) == (ABSTAIN, 1)
    assert len(asked) == 2 and skipped.details["samples"] == 60


def theorem(p: list[list[float]], k: int, c: int) -> float:
    """The largest radius that a certificate of class c at stage k may state; negative if none."""
    radii = []
    for shares, own, sigma in ((p[2], k, SIGMAS[2]), (p[k], c, SIGMAS[k])):
        radii.append(sigma * (quantile(shares[own]) - quantile(max(np.delete(shares, own)))) / 2)
    return min(radii)


@pytest.mark.parametrize("route", [[0.9, 0.1], [0.02, 0.98]])
def test_radii_are_nearly_those_of_the_theorem(route):
    """Never above it, but with probability 1e-4 per run."""
    p = [[0.9, 0.06, 0.04], [0.99, 0.005, 0.005], route]
    procedure = Router(Smoothing(1.0, 1000, 400_000, 1e-4), sigmas=SIGMAS)
    generator = np.random.default_rng(0)

    def votes(request: Draws) -> np.ndarray:
        return generator.multinomial(request.count, p[request.stage])

    found = [stated(procedure, votes, label=-1) for _ in range(15)]
    best, stage = theorem(p, int(np.argmax(route)), 0), 1 + int(np.argmax(route))
    assert {(each.prediction, each.details[STAGE]) for each in found} == {(0, stage)}
    radii = np.array([each.radius for each in found])
    assert (radii <= best).all() and np.median(radii) >= best * 0.95, (radii, best)


def test_each_sequential_bound_has_the_distance_of_its_own_noise():
    smoothing = Smoothing(1.0, 30, 1000, 1e-3, 0.005)
    procedure = SequentialRouter(smoothing, sigmas=SIGMAS, noise_distances=DISTANCES)
    levels = [each.smoothing for each in procedure.bounds.values()]
    found = [(each.sigma, each.noise_distance) for each in levels]
    assert found == list(zip(SIGMAS, DISTANCES))
    assert SequentialRouter(smoothing, sigmas=SIGMAS).noise_distances == (0.005,) * 3
