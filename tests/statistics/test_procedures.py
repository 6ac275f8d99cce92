"""What every procedure declares about itself is true; CERTIFY, which abstains early, states what
full counts do.
"""

import dataclasses

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoothadv.statistics import ABSTAIN, PROCEDURES, Certificate, Draws, Procedure, Smoothing
from smoothadv.statistics.bounds import certified_radius
from smoothadv.statistics.exact import Exact
from support.exact_tails import DIGITS, probability_of_at_most
from support.votes import ListedVotes, certify, listed

every_procedure = pytest.mark.parametrize("name", list(PROCEDURES))
SMOOTHING = Smoothing(0.25, 100, 20_000, 1e-3)


def certificates(procedure: Procedure) -> list[Certificate]:
    """Certificates for classes of many probabilities: their radii differ, and some abstain."""
    shares = np.concatenate(
        [[0.25] * 5, np.linspace(0.45, 0.99, 40), 1 - np.geomspace(1e-2, 1e-6, 20)]
    )
    generator, draws = np.random.default_rng(0), SMOOTHING.n0 + SMOOTHING.n
    found = [certify(procedure, ListedVotes(listed(p, draws, generator))) for p in shares]
    assert 0 < sum(each.prediction == ABSTAIN for each in found) < len(found) / 2
    return found


def test_the_names_say_which_procedure_is_which():
    assert {
        name: (PROCEDURES[name].on_grid, PROCEDURES[name].fixed_sample)
        for name in ("exact", "adaptive")
    } == {
        "exact": (False, True),
        "adaptive": (True, False),
    }


@every_procedure
def test_only_a_procedure_on_a_grid_returns_few_radii(name):
    found = certificates(PROCEDURES[name](SMOOTHING))
    steps = np.array([each.radius / SMOOTHING.sigma * 100 for each in found])
    assert (np.abs(steps - steps.round()) < 1e-9).all() == PROCEDURES[name].on_grid


@every_procedure
def test_only_a_fixed_sample_makes_all_radii_a_function_of_the_counts(name):
    procedure = PROCEDURES[name](SMOOTHING)
    found = [each for each in certificates(procedure) if each.prediction != ABSTAIN]
    assert all(each.trials == SMOOTHING.n for each in found) == procedure.fixed_sample
    record = {**dataclasses.asdict(procedure), "sigma": 0.25, "alpha": 1e-3}
    counts = [
        {"successes": each.successes, "trials": each.trials, **each.details} for each in found
    ]
    assert {"successes", "trials"} <= set(procedure.counts(record)) <= set(counts[0])
    recomputed = [procedure.radius_from(each, record) for each in counts]
    assert (recomputed == [each.radius for each in found]) == procedure.fixed_sample
    stricter = [procedure.radius_from(each, {**record, "alpha": 1e-4}) for each in counts]
    assert all(
        less is None or less < radius
        for less, radius in zip(stricter, recomputed)
        if radius is not None
    )


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


@every_procedure
def test_columns_are_the_details_of_every_certificate(name):
    procedure = PROCEDURES[name](SMOOTHING)
    assert all(set(each.details) == set(procedure.columns) for each in certificates(procedure))


@every_procedure
def test_procedures_are_frozen_and_derive_from_the_base_class(name):
    procedure = PROCEDURES[name](SMOOTHING)
    assert isinstance(procedure, Procedure) and procedure.default_n >= 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        procedure.smoothing = SMOOTHING


many = settings(deadline=None, derandomize=True, max_examples=300)


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


def from_full_counts(smoothing: Smoothing, classes: np.ndarray) -> tuple[int, float, int]:
    """Class, radius and number of successes where every draw is counted."""
    selected = np.bincount(classes[: smoothing.n0], minlength=4).argmax()
    successes = int((classes[smoothing.n0 :] == selected).sum())
    radius = certified_radius(
        successes, smoothing.n, smoothing.sigma, smoothing.alpha, smoothing.noise_distance
    )
    return (ABSTAIN, 0.0, successes) if radius is None else (int(selected), radius, successes)


@many
@given(runs())
def test_decisions_are_those_of_the_full_counts(run):
    smoothing, classes = run
    stated, votes = Exact(smoothing), ListedVotes(classes)
    certificate = certify(stated, votes)
    prediction, radius, successes = from_full_counts(smoothing, classes)
    assert (certificate.prediction, certificate.radius) == (prediction, radius)
    assert votes.used == smoothing.n0 + certificate.trials
    if prediction != ABSTAIN:
        assert (certificate.successes, certificate.trials) == (successes, smoothing.n)


@many
@given(runs())
def test_counts_are_cut_at_the_first_miss_too_many(run):
    smoothing, classes = run
    votes = ListedVotes(classes)
    certificate = certify(Exact(smoothing), votes)
    candidate = np.bincount(classes[: smoothing.n0], minlength=4).argmax()
    missed = np.cumsum(classes[smoothing.n0 :] != candidate)
    level, distance = smoothing.alpha, smoothing.noise_distance
    radii = [
        certified_radius(smoothing.n - misses, smoothing.n, 1.0, level, distance)
        for misses in missed
    ]
    expected = next(
        (number for number, radius in enumerate(radii, 1) if radius is None), smoothing.n
    )
    assert (certificate.trials, certificate.successes) == (
        expected,
        expected - missed[expected - 1],
    )


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


def test_requests_are_settled_by_one_miss_more_than_certifies():
    voting = Exact(Smoothing(0.25, 100, 100_000, 1e-3)).votes(0)
    assert next(voting) == Draws(100)
    request = voting.send(np.array([10, 45, 45]))
    assert request.count == 100_000
    misses = 100_000 - 50_490
    assert [request.is_settled(np.array([k, 9, 0])) for k in (misses, misses + 1)] == [False, True]


@pytest.mark.parametrize("name", [name for name in PROCEDURES if PROCEDURES[name].fixed_sample])
@pytest.mark.parametrize(("missing", "prediction"), [(0, 2), (1, ABSTAIN)])
def test_fewer_votes_than_were_asked_for_certify_nothing(name, missing, prediction):
    voting = PROCEDURES[name](SMOOTHING).votes(2)
    _, request = next(voting), voting.send(np.array([0, 0, 100, 0]))
    with pytest.raises(StopIteration) as end:
        voting.send(np.array([0, 0, request.count - missing, 0]))
    assert (end.value.value.prediction, end.value.value.trials) == (
        prediction,
        SMOOTHING.n - missing,
    )


def test_largest_radius_is_that_of_successes_alone():
    smoothing = Smoothing(0.25, 10, 1000, 1e-3)
    certificate = certify(Exact(smoothing), ListedVotes(np.full(1010, 2)))
    assert (
        certificate.radius
        == Exact(smoothing).largest_radius
        == certified_radius(1000, 1000, 0.25, 1e-3)
    )
    assert Exact(Smoothing(0.25, 10, 9, 1e-3)).largest_radius is None


@pytest.mark.parametrize(
    "settings",
    [
        *((0, 1, 1, 0.1), (1, 0, 1, 0.1), (1, 1, 0, 0.1), (1, 1, 1, 0.0), (1, 1, 1, 1.0)),
        *((1, 1, 1, 0.1, distance) for distance in (-1e-9, 0.0501, np.nan)),
    ],
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ValueError):
        Smoothing(*settings)
