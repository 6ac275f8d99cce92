"""Certificates of cascades and routers: exact bounds, how often they are false, stages in closed
form, and predictions.

A statement of a certificate is false only if its radius exceeds that of the theorem for the true
probabilities at x, which linear classifiers attain: those of a cascade's stages, or those of the
router and of the stage that was chosen.
"""

import math
from dataclasses import replace
from itertools import product

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from smoothadv.statistics import ABSTAIN, Certificate, Draws, Procedure, Smoothing
from smoothadv.statistics.bounds import (
    radius_probability,
    threshold_quantile,
    threshold_radius,
    two_sided_radius,
)
from smoothadv.statistics.cascade import (
    DRAWN_AT,
    RIVAL_AT,
    STAGE,
    Cascade,
    SequentialCascade,
    predict_in_cascade,
)
from smoothadv.statistics.router import (
    Router,
    RouterProcedure,
    SequentialRouter,
    predict_by_router,
)
from smoothadv.statistics.two_sided import TwoSided
from support.exact_tails import DIGITS, normal_quantile, probability_of_at_most
from support.false_statements import (
    claims_of,
    exactly_false,
    quantile,
    two_sided_edges,
)
from support.votes import ListedVotes, answered, certify, listed, outcome, stated

ALPHA = 0.05
SIGMAS = {2: (1.0, 0.5), 3: (1.0, 0.5, 0.25)}
both_forms = pytest.mark.parametrize("kind", [Cascade, SequentialCascade])


@given(
    st.integers(1, 3000),
    st.data(),
    st.floats(1e-6, 0.3),
    st.floats(0.001, 0.9),
    st.just(0.0) | st.floats(1e-9, 0.01),
)
def test_the_radius_is_that_of_exact_bounds_and_not_above_it(trials, data, alpha, p0, distance):
    successes = data.draw(st.integers(1, trials))
    radius = threshold_radius(successes, trials, 2.0, alpha, p0, distance)

    def tail(r: float) -> mpmath.mpf:
        """Of a probability with which the threshold is only just exceeded at distance r."""
        edge = mpmath.ncdf(mpmath.mpf(r) / 2 + normal_quantile(mpmath.mpf(p0) + distance))
        return probability_of_at_most(trials - successes, trials, 1 - edge - distance)

    with mpmath.workdps(DIGITS):
        if radius == -np.inf:  # p_lower is not above the distance
            assert distance and probability_of_at_most(
                trials - successes, trials, 1 - mpmath.mpf(distance) * (1 + 1e-9)
            ) > alpha * (1 - 1e-6)
        else:
            assert tail(radius) <= alpha
            assert radius < -4 or alpha < tail(radius + 1e-6), "tight unless it certifies nothing"


@given(
    st.floats(0.001, 0.99).filter(lambda p0: p0 != 0.5),
    st.just(0.0) | st.floats(1e-9, 0.005),
    st.floats(-1, 3),
)
def test_quantiles_and_hypotheses_are_rounded_upwards(p0, distance, radius):
    with mpmath.workdps(DIGITS):
        exact = normal_quantile(mpmath.mpf(p0) + distance)
        above = threshold_quantile(p0, distance)
        assert exact <= above <= exact + mpmath.mpf("1e-12")
        edge = mpmath.ncdf(mpmath.mpf(radius) / mpmath.mpf(0.7) + exact) + distance
        null = radius_probability(radius, 0.7, distance, p0)
        assert min(edge, 1) <= null <= edge + mpmath.mpf("1e-9")


def test_a_cascade_of_one_stage_is_the_two_sided_procedure():
    smoothing, generator = Smoothing(0.25, 20, 400, 0.01), np.random.default_rng(0)
    for p in np.linspace(0.3, 0.99, 20):
        votes = listed(p, 420, generator)
        alone, usual = (
            certify(kind(smoothing), ListedVotes(votes)) for kind in (Cascade, TwoSided)
        )
        assert (alone.prediction, alone.radius) == (usual.prediction, usual.radius)
        assert (alone.successes, alone.trials) == (usual.successes, usual.trials)
        assert alone.details == {STAGE: 1, RIVAL_AT.format(1): usual.details["rival"]}


def theorem(p: list[list[float]], k: int, c: int, p0: float, sigmas: tuple[float, ...]) -> float:
    """The largest radius that a certificate of class c and stage k (from 0) may state for the
    probabilities at each stage; negative if none.
    """
    radii = [
        sigma * (quantile(p0) - quantile(max(np.delete(shares, c))))
        for sigma, shares in zip(sigmas[:k], p)
    ]
    if k < len(sigmas) - 1:
        return min([*radii, sigmas[k] * (quantile(p[k][c]) - quantile(p0))])
    return min([*radii, sigmas[k] * (quantile(p[k][c]) - quantile(max(np.delete(p[k], c)))) / 2])


def at_edge(radius: float, sigma: float, p0: float, of_rivals: bool) -> list[list[float]]:
    """Probabilities of three classes with which the bound of a stage allows just this radius for
    class 0: one rival alone, two equal ones, or a tie of all that is left.
    """
    if of_rivals:
        q = float(special.ndtr(quantile(p0) - radius / sigma))
        pairs = [[1 - q, q, 0.0], [0.0, q, 1 - q]] if q >= 0.5 else [[1 - q, q, 0.0]]
        return [*pairs, [1 - 2 * q, q, q]] if q <= 0.5 else pairs
    p = float(special.ndtr(quantile(p0) + radius / sigma))
    return [[p, 1 - p, 0.0], [p, (1 - p) / 2, (1 - p) / 2]]


@both_forms
@pytest.mark.parametrize(("p0", "number"), [(0.7, 2), (0.5, 2), (0.7, 3)])
def test_a_false_statement_is_no_more_probable_than_alpha(kind, p0, number):
    """Exactly: the stages' draws are independent, and a statement is false if all bounds exceed the
    radius of the theorem.
    """
    n, sigmas = (60 if kind is Cascade else 80), SIGMAS[number]
    further = {} if kind is Cascade else {"radii": (0.1, 0.25, 0.5)}
    procedure = kind(Smoothing(1.0, 10, n, ALPHA), threshold=p0, sigmas=sigmas, **further)
    rates = []
    for last in range(number):
        of_bounds = [claims_of(procedure.bounds[stage, stage < last]) for stage in range(last + 1)]
        for radius in (0.1, 0.25):
            edges = [at_edge(radius, each, p0, True) for each in sigmas[:last]]
            own = sigmas[last]
            if last < number - 1:
                edges.append(at_edge(radius, own, p0, False))
            else:
                edges.append(two_sided_edges(radius, own))
            alone = [
                [exactly_false(of, p, radius) for p in some] for of, some in zip(of_bounds, edges)
            ]
            rates += [rate for some in alone for rate in some]  # the other bounds hold by far
            rates += map(math.prod, product(*alone))  # or just
    assert len(rates) > 20 and max(rates) <= ALPHA, max(rates)
    assert max(rates) > ALPHA / 5, "the level is used"


def test_controls_exceed_alpha():
    """The same sums find what is wrong: the stage chosen by the votes that estimate, rivals chosen
    after a look, and a stage that is left out.
    """
    procedure = Cascade(Smoothing(1.0, 10, 105, ALPHA), sigmas=SIGMAS[2])
    radius, z0 = 0.25, quantile(0.7)
    first, second = at_edge(radius, 1.0, 0.7, False)[0], two_sided_edges(radius, 0.5)[0]
    of_first, of_last = (claims_of(procedure.bounds[stage, False]) for stage in (0, 1))
    either = exactly_false(of_first, first, radius), exactly_false(of_last, second, radius)
    q = float(special.ndtr(z0 - radius))
    assert first[1] < q, "the rivals of the first stage hold"
    assert 1 - (1 - either[0]) * (1 - either[1]) > 1.5 * ALPHA, "the better of two certificates"
    tie = at_edge(0.6, 1.0, 0.7, True)[-1]
    assert tie[1] == tie[2]
    weaker = claims_of(procedure.bounds[0, True], weakest=True)
    assert exactly_false(weaker, tie, 0.6) > 1.4 * ALPHA, "the weaker of two equal rivals"
    sure = [0.999, 0.001, 0.0]
    alone = exactly_false(of_last, sure, radius)
    assert alone > ALPHA, "a certificate of the last stage alone, where the first one decides"


def linear(margins: list[float], sigmas: tuple[float, ...], p0: float) -> tuple[list, float]:
    """Two classes, by the sign of the distance of x to a plane of stage j, all planes parallel:
    probabilities at each stage for x at these signed distances, and the radius within which the
    cascade is class 0.

    Moving by r against the planes makes the margins smaller by r: the first stage with a class
    above p0 decides. The cascade changes at the smallest r at which it returns class 1, or ties.
    """
    shares = [float(special.ndtr(m / each)) for m, each in zip(margins, sigmas)]

    def decides(r: float) -> int:
        for margin, each in zip(margins[:-1], sigmas):
            z = (margin - r) / each
            if abs(z) > quantile(p0):
                return int(z < 0)
        return int(margins[-1] - r <= 0)

    wrong = [r for r in np.linspace(0, 3, 30001) if decides(r) == 1]
    return [[p, 1 - p, 0.0] for p in shares], float(wrong[0]) if wrong else 3.0


def repeated(procedure: Procedure, p: list[list[float]], runs: int) -> list[Certificate]:
    """The certificates of so many runs, whose votes at each stage have these probabilities."""
    generator = np.random.default_rng(0)

    def votes(request: Draws) -> np.ndarray:
        return generator.multinomial(request.count, p[request.stage])

    return [stated(procedure, votes, label=-1) for _ in range(runs)]


@both_forms
@pytest.mark.parametrize(
    "margins",
    [[1.5, 0.9, 0.6], [0.3, 1.2, 0.7], [0.1, 0.2, 0.8], [0.9, 0.3, 0.4], [-0.2, 0.5, 0.4]],
)
def test_linear_stages_have_nearly_their_true_radius(kind, margins):
    """Never above it, but with probability 1e-4 per run, and in the median within 5 % of what the
    certificate of this stage can state, or two steps of the grid.
    """
    sigmas = SIGMAS[3]
    p, true = linear(margins, sigmas, 0.7)
    steps = {} if kind is Cascade else {"radii": tuple(np.arange(1, 40) / 40)}
    n, least = (400_000, 1e-9) if kind is Cascade else (15_000, 0.05)
    procedure = kind(Smoothing(1.0, 1000, n, 1e-4), sigmas=sigmas, **steps)
    found = repeated(procedure, p, 9)
    assert {each.prediction for each in found} == {0}
    radii = np.array([each.radius for each in found])
    best = np.array([theorem(p, each.details[STAGE] - 1, 0, 0.7, sigmas) for each in found])
    assert (radii <= true).all() and (best <= true + 1e-3).all()
    assert np.median(radii - best * 0.95) >= -least, (radii, best)


DISTANCES = (0.01, 0.02, 0.03)


@pytest.mark.parametrize(("last", "place"), [(k, j) for k in range(3) for j in range(k + 1)])
def test_each_bound_has_the_distance_of_its_own_noise(last, place):
    """The bound of one place decides; of each other place the votes leave no doubt."""
    smoothing, p0, n = Smoothing(1.0, 30, 1000, 1e-3, 0.005), 0.7, 1000
    procedure = Cascade(smoothing, sigmas=SIGMAS[3], noise_distances=DISTANCES)
    tie, sure = [0.3, 0.4, 0.3], [1.0, 0.0, 0.0]
    own, rival = (400, 600) if place < last else (850, 150)
    shares = [[own / n, rival / n, 0.0] if k == place else sure for k in range(3)]
    found = answered(procedure, shares, [sure if k == last else tie for k in range(3)])
    sigma, distance = SIGMAS[3][place], DISTANCES[place]
    if place < last:
        expected = threshold_radius(n - rival, n, sigma, 1e-3, 1 - p0, distance)
    elif last < 2:
        expected = threshold_radius(own, n, sigma, 1e-3, p0, distance)
    else:
        expected = two_sided_radius(own, rival, n, sigma, 1e-3, 0.9, distance)
    counts = {"successes": found.successes, "trials": n, **found.details}
    assert (found.prediction, found.details[STAGE]) == (0, last + 1)
    assert found.radius == expected == procedure.shown(counts) > 0
    recorded = {**procedure.record(), "sigma": 1.0, "N0": 30, "N": n, "alpha": 1e-3}
    exact = Cascade.recorded(recorded).shown(counts)
    assert exact > found.radius, "as a log without --sound records"


def test_each_sequential_bound_has_the_distance_of_its_own_noise():
    smoothing = Smoothing(1.0, 30, 1000, 1e-3, 0.005)
    procedure = SequentialCascade(smoothing, sigmas=SIGMAS[3], noise_distances=DISTANCES)
    assert len(procedure.bounds) == 5
    for (place, of_rivals), bound in procedure.bounds.items():
        p0 = 0.5 if place == 2 else {False: 0.7, True: 1 - 0.7}[of_rivals]
        own = SIGMAS[3][place], DISTANCES[place]
        assert (bound.smoothing.sigma, bound.smoothing.noise_distance) == own
        assert bound.null(0.1) == radius_probability(0.1, *own, p0)
        if place < 2:
            assert bound.successes(5, 7) == (7 if of_rivals else 5)
    assert SequentialCascade(smoothing, sigmas=SIGMAS[3]).noise_distances == (0.005,) * 3


def answers(first: np.ndarray, second: np.ndarray, alpha: float, p0: float) -> list[int]:
    """What PREDICT answers with these votes of two stages."""
    voting = predict_in_cascade(int(first.sum()), alpha, p0, 2)
    return outcome(voting, lambda request: (first, second)[request.stage])


@pytest.mark.parametrize("p0", [0.5, 0.7])
def test_a_stage_of_a_prediction_is_seldom_wrong(p0):
    """Exactly, of three classes: it decides wrongly, or passes over, with probability at most alpha
    / 2, and uses a part of it.
    """
    n, alpha, rates, sure = 60, 0.2, [], 0.0
    counts = [np.array([a, b, n - a - b]) for a in range(n + 1) for b in range(n + 1 - a)]
    later = np.array([0, 0, 0, n])  # what the last stage answers is class 3
    found = [answers(votes, later, alpha, p0) for votes in counts]
    for p in ([p0, 1 - p0, 0.0], [p0 + 1e-6, 0.0, 1 - p0 - 1e-6], [0.5, 0.5, 0.0], [0.4, 0.3, 0.3]):
        right = [0] if p[0] > p0 else [3]
        chances = stats.multinomial.pmf(counts, n, p)
        rates.append(sum(c for c, a in zip(chances, found) if a not in (right, [])))
    clear = stats.multinomial.pmf(counts, n, [0.97, 0.03, 0.0])
    sure = sum(c for c, a in zip(clear, found) if a == [0])
    assert max(rates) <= alpha / 2 and max(rates) > alpha / 40 and sure > 0.9


@pytest.mark.parametrize(
    ("leading", "alpha", "expected"),
    [(90, 0.01, [0]), (60, 0.1, []), (61, 0.1, [0])],  # p-values .057 and .035; the level is .05
)
def test_the_last_stage_of_a_prediction_is_that_of_predict(leading, alpha, expected):
    last = np.array([leading, 100 - leading, 0])
    assert answers(np.array([34, 33, 33]), last, alpha, 0.7) == expected


def test_samples_are_all_draws_and_trials_those_of_the_look_that_decided():
    """With 0.93 of the votes, a radius of 0.5 is certified, and further draws do not reach 0.9."""
    smoothing = Smoothing(1.0, 100, 3000, 1e-3)
    procedure = SequentialCascade(smoothing, radii=(0.5, 0.9), sigmas=SIGMAS[2])
    p, asked = [[0.93, 0.07, 0.0], [0.3, 0.4, 0.3]], []
    found = answered(procedure, p, asked=asked)
    drawn = [sum(each.count for each in asked if each.stage == stage) for stage in (0, 1)]
    assert (found.radius, found.details[STAGE], found.details["samples"]) == (0.5, 1, sum(drawn))
    assert found.trials == found.details[DRAWN_AT.format(1)] < drawn[0] - 100
    asked.clear()
    aware = SequentialCascade(smoothing, label_aware=True, sigmas=SIGMAS[2])
    skipped = answered(aware, [[0.07, 0.93, 0.0], p[1]], asked=asked)
    assert (skipped.prediction, skipped.details["label_aware"]) == (ABSTAIN, 1)
    assert len(asked) == 2 and skipped.details["samples"] == 200


# Routers


# Of two stages, and of the router.
OF_ROUTER = (1.0, 0.5, 0.8)


def of_kind(kind: type[RouterProcedure], n: int, alpha: float = ALPHA) -> RouterProcedure:
    further = {} if kind is Router else {"radii": (0.1, 0.25, 0.5)}
    return kind(Smoothing(1.0, 30, n, alpha), sigmas=OF_ROUTER, **further)


@pytest.mark.parametrize("kind", [Router, SequentialRouter])
def test_a_false_statement_of_a_router_is_no_more_probable_than_alpha(kind):
    """Exactly: the classifiers' draws are independent, and a statement is false if both bounds
    exceed the smaller radius of the theorem.
    """
    procedure, rates = of_kind(kind, 60 if kind is Router else 80), []
    router = claims_of(procedure.bounds[2])
    for stage, radius in product((0, 1), (0.1, 0.25)):
        own = claims_of(procedure.bounds[stage])
        of_router = [
            exactly_false(router, p, radius) for p in two_sided_edges(radius, OF_ROUTER[2])
        ]
        of_stage = [
            exactly_false(own, p, radius) for p in two_sided_edges(radius, OF_ROUTER[stage])
        ]
        # The other bound holds by far, or is at its edge, too.
        rates += [*of_router, *of_stage, *(a * b for a, b in product(of_router, of_stage))]
    assert len(rates) == 32 and max(rates) <= ALPHA, max(rates)
    assert max(rates) > ALPHA / 5, "the level is used"


def test_controls_of_routers_exceed_alpha():
    """The same sums find a router that is left out, and a stage chosen by the votes that
    estimate.
    """
    procedure = of_kind(Router, 105)
    stages = [claims_of(procedure.bounds[stage]) for stage in (0, 1)]
    sure = [0.999, 0.001, 0.0]
    assert exactly_false(stages[0], sure, 0.1) > ALPHA, "the router changes its choice at 0.1"
    either = [
        exactly_false(own, two_sided_edges(0.25, sigma)[0], 0.25)
        for own, sigma in zip(stages, OF_ROUTER)
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


@pytest.mark.parametrize(("stage", "place"), [(0, 0), (0, 2), (1, 1), (1, 2)])
def test_each_bound_of_a_router_has_the_distance_of_its_own_noise(stage, place):
    """The bound of one place decides; of each other place the votes leave no doubt."""
    smoothing, n = Smoothing(1.0, 30, 1000, 1e-3, 0.005), 1000
    procedure = Router(smoothing, sigmas=OF_ROUTER, noise_distances=DISTANCES)
    sure = [[1.0, 0.0, 0.0]] * 2 + [[1.0 - stage, float(stage)]]
    shares = list(sure)
    shares[place] = [0.7, 0.3, 0.0] if place < 2 else [0.7 - 0.4 * stage, 0.3 + 0.4 * stage]
    found = answered(procedure, shares, sure)
    expected = two_sided_radius(700, 300, n, OF_ROUTER[place], 1e-3, 0.9, DISTANCES[place])
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


def theorem_of_routers(p: list[list[float]], k: int, c: int) -> float:
    """The largest radius that a certificate of class c at stage k may state; negative if none."""
    radii = []
    for shares, own, sigma in ((p[2], k, OF_ROUTER[2]), (p[k], c, OF_ROUTER[k])):
        radii.append(sigma * (quantile(shares[own]) - quantile(max(np.delete(shares, own)))) / 2)
    return min(radii)


@pytest.mark.parametrize("route", [[0.9, 0.1], [0.02, 0.98]])
def test_radii_are_nearly_those_of_the_theorem(route):
    """Never above it, but with probability 1e-4 per run."""
    p = [[0.9, 0.06, 0.04], [0.99, 0.005, 0.005], route]
    procedure = Router(Smoothing(1.0, 1000, 400_000, 1e-4), sigmas=OF_ROUTER)
    found = repeated(procedure, p, 15)
    best, stage = theorem_of_routers(p, int(np.argmax(route)), 0), 1 + int(np.argmax(route))
    assert {(each.prediction, each.details[STAGE]) for each in found} == {(0, stage)}
    radii = np.array([each.radius for each in found])
    assert (radii <= best).all() and np.median(radii) >= best * 0.95, (radii, best)


def test_each_sequential_bound_of_a_router_has_the_distance_of_its_own_noise():
    smoothing = Smoothing(1.0, 30, 1000, 1e-3, 0.005)
    procedure = SequentialRouter(smoothing, sigmas=OF_ROUTER, noise_distances=DISTANCES)
    levels = [each.smoothing for each in procedure.bounds.values()]
    found = [(each.sigma, each.noise_distance) for each in levels]
    assert found == list(zip(OF_ROUTER, DISTANCES))
    assert SequentialRouter(smoothing, sigmas=OF_ROUTER).noise_distances == (0.005,) * 3
