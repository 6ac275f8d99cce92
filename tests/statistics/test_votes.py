"""certify_votes and its batches: the certificates that the package finds of the same votes, and
refusals of counts that are none.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoothadv import certify_inputs, certify_votes, predict_votes
from smoothadv.core import Smooth
from smoothadv.noise import GaussianNoise
from smoothadv.statistics import (
    ABSTAIN,
    PROCEDURES,
    Certificate,
    Draws,
    Procedure,
    Smoothing,
)
from smoothadv.statistics.bounds import certified_radius
from smoothadv.statistics.votes import _asking

SIGMA, CLASSES = 0.5, 4
METHODS = {
    "exact": {},
    "two-sided": {},
    "adaptive": {"radii": (0.0, 0.25, 0.5)},
    "sequential": {"radii": (0.0, 0.25, 0.5)},
    "top-k": {"top_k": 2},
}
SIZES = {"n0": 50, "n": 1000, "alpha": 0.001}
IMAGES = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def procedure(method: str, **sizes: float) -> Procedure:
    return PROCEDURES[method](Smoothing(SIGMA, **{**SIZES, **sizes}), **METHODS[method])


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    layer = torch.nn.Linear(16, CLASSES)
    torch.nn.init.normal_(layer.weight, std=0.5)
    return torch.nn.Sequential(torch.nn.Flatten(), layer).requires_grad_(False)


def voting(model: torch.nn.Module, index: int) -> Callable[[int], np.ndarray]:
    """Draws of an image as the package makes them."""
    stream = GaussianNoise(SIGMA, 3).stream(index, "cpu")

    def draw(count: int) -> np.ndarray:
        answers = model(stream.noisy(count, IMAGES[index])).argmax(1)
        return np.bincount(answers.numpy(), minlength=CLASSES)

    return draw


def of_the_package(model: torch.nn.Module, index: int, method: str) -> Certificate:
    smooth, stream = Smooth(model, CLASSES, SIGMA), GaussianNoise(SIGMA, 3).stream(index, "cpu")
    settings = METHODS[method]
    sizes = {**SIZES, "batch_size": 100}
    return smooth.certificate(IMAGES[index], **sizes, stream=stream, method=method, **settings)


def are_equal(one: Certificate, other: Certificate) -> bool:
    """Those of an abstention may have counted further."""
    if (one.prediction, one.radius) != (other.prediction, other.radius):
        return False
    return one.prediction == ABSTAIN or one == other


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [None, 7, 64, 5000])
def test_certificates_are_those_of_the_package(model, method, batch):
    found = [
        certify_votes(voting(model, index), procedure(method), batch=batch)
        for index in range(len(IMAGES))
    ]
    expected = [of_the_package(model, index, method) for index in range(len(IMAGES))]
    assert all(map(are_equal, found, expected))
    assert len({one.radius for one in found}) > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch", "in_flight"), [(64, 1), (64, 3), (1000, 2), (1, 1)])
def test_batches_of_several_inputs_give_the_same(model, method, batch, in_flight):
    if batch == 1:
        expected = [of_the_package(model, index, method) for index in range(2)]
    else:
        expected = [of_the_package(model, index, method) for index in range(len(IMAGES))]
    drawn = {index: voting(model, index) for index in range(len(IMAGES))}
    asked: list[list[tuple[int, int]]] = []
    running = 0

    async def draw(requests: list[tuple[int, int]]) -> list[np.ndarray]:
        nonlocal running
        running += 1
        asked.append(requests)
        assert running <= in_flight
        votes = [drawn[index](count) for index, count in requests]
        for _ in range(len(asked) % 3):  # answers come in another order
            await asyncio.sleep(0)
        running -= 1
        return votes

    made = certify_inputs(draw, len(expected), procedure(method), batch=batch, in_flight=in_flight)
    assert all(map(are_equal, asyncio.run(made), expected))
    assert all(sum(count for _, count in requests) <= batch for requests in asked)
    if batch == 1000:
        assert max(map(len, asked)) > 1, "several inputs share a batch"


@pytest.mark.parametrize(("n", "top_k"), [(500, 1), (500, 2), (10, 1)])
def test_predictions_are_those_of_the_package(model, n, top_k):
    found = [
        predict_votes(voting(model, index), n, 0.001, top_k=top_k, batch=33)
        for index in range(len(IMAGES))
    ]
    if top_k == 1:
        smooth, noise = Smooth(model, CLASSES, SIGMA), GaussianNoise(SIGMA, 3)
        expected = [
            smooth.predict(IMAGES[index], n, 0.001, 100, stream=noise.stream(index, "cpu"))
            for index in range(len(IMAGES))
        ]
        assert [one[0] if one else ABSTAIN for one in found] == expected
    assert any(found) == (n > 10) and all(len(one) in (0, top_k) for one in found)


def test_radius_by_hand():
    answers = iter([[90, 10], [990, 10]])
    found = certify_votes(lambda count: next(answers), procedure("exact", n0=100, n=1000))
    assert (found.prediction, found.successes, found.trials) == (0, 990, 1000)
    assert found.radius == certified_radius(990, 1000, SIGMA, 0.001)


def test_counting_stops_where_an_abstention_is_certain(model):
    """After 501 of 1,000 votes for others, p_A > 1/2 cannot be shown any more."""
    asked: list[int] = []

    def draw(count: int) -> list[int]:
        asked.append(count)
        return [count, 0] if len(asked) == 1 else [0, count]

    found = certify_votes(draw, procedure("exact", n0=100, n=1000), batch=100)
    assert found.prediction == ABSTAIN and asked[0] == 100
    assert 400 <= sum(asked[1:]) < 1000


def test_label_reaches_the_procedure():
    kind = PROCEDURES["exact"]

    class OfTheLabel(kind):
        def candidate(self, selection: np.ndarray, label: int) -> int:
            return label

    made = OfTheLabel(Smoothing(SIGMA, 10, 100, 0.001))
    draw = lambda count: [0, 0, count]  # noqa: E731
    assert certify_votes(draw, made, label=2).prediction == 2

    async def draws(requests):
        return [draw(count) for _, count in requests]

    found = asyncio.run(certify_inputs(draws, 2, made, labels=[2, 1]))
    assert [one.prediction for one in found] == [2, ABSTAIN]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 40))
def test_every_request_is_answered_in_batches(requests, batch):
    """Whatever the sizes: the sums are those that were asked for, of votes in their order."""

    def asks():
        sums = []
        for count in requests:
            sums.append((yield Draws(count)).sum())
        return sums

    generator, drawn = _asking(asks(), batch), 0
    votes = None
    while True:
        try:
            count = generator.send(votes)
        except StopIteration as end:
            assert end.value == requests
            break
        assert 1 <= count <= batch
        drawn += count
        votes = [count, 0]
    assert drawn == sum(requests)


BAD = {
    "too few": ([40, 9], "returned 49 votes: expected 50"),
    "too many": ([40, 11], "returned 51 votes"),
    "negative": ([50, 1, -1], "expected whole numbers"),
    "too many for int64": (np.array([2**64 - 1, 51], np.uint64), "whole numbers from 0 to 50"),
    "too many for any integer": ([2**70, 0], "whole numbers from 0 to 50"),
    "a share": ([49.5, 0.5], "expected whole numbers"),
    "nan": ([np.nan, 50], "expected whole numbers"),
    "flags": (np.ones(50, bool), "expected whole numbers"),
    "one class": ([50], r"shape \[1\]: expected \[K\], with K of at least 2"),
    "a table": ([[25, 25]], r"shape \[1, 2\]"),
    "classes, not counts": (list(range(50)), "returned 1225 votes: expected 50"),
}


@pytest.mark.parametrize("kind", BAD)
def test_counts_that_are_none_are_refused(kind):
    votes, words = BAD[kind]
    with pytest.raises(ValueError, match=rf"draw\(50\).*{words}"):
        certify_votes(lambda count: votes, procedure("exact"))


def test_other_refusals():
    changing = iter([[50, 0], [500, 500, 0]])
    with pytest.raises(ValueError, match=r"shape \[3\]: expected \[2\], as before"):
        certify_votes(lambda count: next(changing), procedure("exact"))
    fair = partial(certify_votes, lambda count: [count, 0])
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        fair(procedure("exact"), batch=0)
    smoothing = Smoothing(0.5, 50, 1000, 0.001)
    cascade = PROCEDURES["cascade"](smoothing, sigmas=(0.5, 0.25), threshold=0.7)
    with pytest.raises(ValueError, match="of several classifiers"):
        certify_votes(lambda count: [count // 2, count - count // 2], cascade)

    async def short(requests):
        return []

    for draw, options, words in (
        (short, {}, "asked for 1 inputs and returned 0"),
        (short, {"in_flight": 0}, "in_flight must be at least 1, got 0"),
        (short, {"batch": 0}, "batch must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            asyncio.run(certify_inputs(draw, 1, procedure("exact"), **options))


def test_a_draw_that_fails_ends_the_batches():
    async def draw(requests):
        raise OSError("the service is away")

    with pytest.raises(OSError, match="the service is away"):
        asyncio.run(certify_inputs(draw, 20, procedure("exact"), in_flight=3))
