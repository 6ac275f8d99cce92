"""certify_votes and its batches: the certificates that the package finds of the same votes, and
refusals of counts that are none.
"""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoothadv import certify_votes, predict_votes
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
from smoothadv.statistics.votes import _answered
from support.refusals import refusal

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
@pytest.mark.parametrize("batch", [None, 33])
def test_certificates_are_those_of_the_package(model, method, batch):
    found = [
        certify_votes(voting(model, index), procedure(method), batch=batch)
        for index in range(len(IMAGES))
    ]
    expected = [of_the_package(model, index, method) for index in range(len(IMAGES))]
    assert all(map(are_equal, found, expected))
    assert len({one.radius for one in found}) > 1


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
    assert [certify_votes(draw, made, label=label).prediction for label in (2, 1)] == [2, ABSTAIN]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 40))
def test_every_request_is_answered_in_batches(requests, batch):
    """Whatever the sizes: the sums are those that were asked for, of votes in their order."""

    def asks():
        sums = []
        for count in requests:
            sums.append((yield Draws(count)).sum())
        return sums

    asked: list[int] = []

    def draw(count: int) -> list[int]:
        asked.append(count)
        return [count, 0]

    assert _answered(asks(), draw, batch) == requests
    assert sum(asked) == sum(requests) and all(1 <= count <= batch for count in asked)


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
    "other classes than before": ([50, 0], r"shape \[3\]: expected \[2\], as before"),
    "classes, not counts": (list(range(50)), "returned 1225 votes: expected 50"),
}


@pytest.mark.parametrize("kind", BAD)
def test_counts_that_are_none_are_refused(kind):
    votes, words = BAD[kind]
    with pytest.raises(ValueError, match=rf"draw\((50|1000)\).*{words}"):
        certify_votes(lambda count: votes if count == 50 else [500, 500, 0], procedure("exact"))


def split(count: int) -> list[int]:
    return [count // 2, count - count // 2]


SMOOTHING = Smoothing(SIGMA, **SIZES)
EXACT = PROCEDURES["exact"](SMOOTHING)
CERTIFY, PREDICT = {"draw": split, "procedure": EXACT}, {"draw": split, "n": 100, "alpha": 0.1}
ARGUMENTS = [
    *((CERTIFY, "draw", value, "a function of a number of draws") for value in (None, [1, 2])),
    *((CERTIFY, "procedure", value, "one like PROCEDURES") for value in ("exact", type(EXACT))),
    *(
        (
            CERTIFY,
            "procedure",
            PROCEDURES[name](SMOOTHING, sigmas=(0.5, 0.25, 0.5)),
            "of a single classifier",
        )
        for name in ("cascade", "router", "sequential-cascade", "sequential-router")
    ),
    (CERTIFY, "procedure", PROCEDURES["top-k"](SMOOTHING, top_k=2), "less than the 2 classes"),
    (CERTIFY, "procedure", PROCEDURES["top-k"](SMOOTHING, top_k=9), "less than the 2 classes"),
    *((CERTIFY, "label", value, "a whole number") for value in (1.0, "cat", None, True)),
    (CERTIFY, "label", 2, "one of 2 classes"),
    *((of, "batch", value, "from 1 to") for of in (CERTIFY, PREDICT) for value in (0, -1, 2.5)),
    (PREDICT, "draw", 3, "a function of a number of draws"),
    *((PREDICT, "n", value, "a whole number from 1") for value in (0, -3, 10.5, 2**60, "many")),
    *((PREDICT, "alpha", value, "between 0 and 1") for value in (0, 1, 2, -0.1, np.nan, "x")),
    *((PREDICT, "top_k", value, "a whole number from 1") for value in (0, -1, 1.5)),
    *((PREDICT, "top_k", value, "less than the 2 classes") for value in (2, 3, 10**9)),
]


@pytest.mark.parametrize(("usual", "argument", "value", "words"), ARGUMENTS)
def test_arguments_out_of_range_are_named(usual, argument, value, words):
    function = certify_votes if usual is CERTIFY else predict_votes
    message = refusal(function, **{**usual, argument: value})
    name = "top_k" if "classes" in words and argument == "procedure" else argument
    assert message.startswith(f"{name}: found") and words in message, message


def test_every_argument_of_votes_is_refused_in_some_test():
    for usual, function in ((CERTIFY, certify_votes), (PREDICT, predict_votes)):
        tried = {name for of, name, *_ in ARGUMENTS if of is usual}
        assert tried == set(inspect.signature(function).parameters)
