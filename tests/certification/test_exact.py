"""CERTIFY's coroutine with early abstention: its statements are those of the full counts."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoothadv.bounds import certified_radius
from smoothadv.certification import ABSTAIN, Draws, Smoothing
from smoothadv.certification.exact import Exact
from support.exact_tails import DIGITS, probability_of_at_most
from support.votes import ListedVotes, certify, listed

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
    radius = certified_radius(successes, smoothing.n, smoothing.sigma, smoothing.alpha, smoothing.noise_distance)
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
    radii = [certified_radius(smoothing.n - misses, smoothing.n, 1.0, level, distance) for misses in missed]
    expected = next((number for number, radius in enumerate(radii, 1) if radius is None), smoothing.n)
    assert (certificate.trials, certificate.successes) == (expected, expected - missed[expected - 1])


@pytest.mark.parametrize("alpha", [0.4, 0.05, 1e-3])
@pytest.mark.parametrize("trials", [100, 1_000])
def test_a_tie_on_the_boundary_of_the_closed_ball_is_certified_no_more_often_than_alpha(trials, alpha):
    """At each radius that can be reported, an image may lie exactly that far from a half-space: there classes tie."""
    radii = {k: certified_radius(k, trials, 1.0, alpha) for k in range(trials - trials // 4, trials + 1)}
    with mpmath.workdps(DIGITS):
        for k, radius in [*radii.items()][:: trials // 12]:
            reaching = probability_of_at_most(trials - k, trials, mpmath.ncdf(-mpmath.mpf(radius)))
            assert alpha * (1 - 1e-6) < reaching <= alpha, "P[R >= distance], for p_A = Phi(distance)"


def test_requests_are_settled_by_one_miss_more_than_certifies():
    voting = Exact(Smoothing(0.25, 100, 100_000, 1e-3)).votes(0)
    assert next(voting) == Draws(100)
    request = voting.send(np.array([10, 45, 45]))
    assert request.count == 100_000
    misses = 100_000 - 50_490
    assert [request.is_settled(np.array([k, 9, 0])) for k in (misses, misses + 1)] == [False, True]


def test_votes_that_decide_late_leave_counts_that_look_whole():
    # The very last draw is one miss too many: all draws were counted, and the answer is an abstention.
    classes = np.full(20, 2)
    classes[-1] = 0
    certificate = certify(Exact(Smoothing(0.25, 10, 10, 1e-3)), ListedVotes(classes))
    assert (certificate.prediction, certificate.successes, certificate.trials) == (ABSTAIN, 9, 10)


def test_largest_radius_is_that_of_successes_alone():
    smoothing = Smoothing(0.25, 10, 1000, 1e-3)
    certificate = certify(Exact(smoothing), ListedVotes(np.full(1010, 2)))
    assert certificate.radius == Exact(smoothing).largest_radius == certified_radius(1000, 1000, 0.25, 1e-3)
    assert Exact(Smoothing(0.25, 10, 9, 1e-3)).largest_radius is None


def test_wrong_settings_are_refused():
    for wrong in [(0, 1, 1, 0.1), (1, 0, 1, 0.1), (1, 1, 0, 0.1), (1, 1, 1, 0.0), (1, 1, 1, 1.0), (1, 1, 1, 0.1, 0.2)]:
        with pytest.raises(ValueError):
            Smoothing(*wrong)
