"""Estimates from parts of the copies are those from all of them, and the model sees batches of one
small shape.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Estimate, Stein, noisy_logits
from smoothadv.attacks.micro_batches import (
    InParts,
    places_in_pass,
    rows_per_pass,
)
from smoothadv.attacks.pgd import PGD
from support.models import Recorder
from support.slow_attacks import estimators_and_slow_ones, smooth_network

SIGMA, CLASSES, DIMENSION = 0.5, 3, 5


def mean_margin(model, points, labels, noise) -> Estimate:
    """A user's own estimator, that knows of no parts: the gradient of the mean of the others' best
    logit minus own.
    """
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        logits = noisy_logits(model, points, noise)
        own = logits.gather(-1, labels[:, None, None].expand(-1, logits.shape[1], 1)).squeeze(-1)
        others = logits.scatter(
            -1, labels[:, None, None].expand(-1, logits.shape[1], 1), -math.inf
        ).amax(-1)
        (gradient,) = torch.autograd.grad((others - own).mean(1).sum(), points)
    return Estimate(gradient, logits.detach())


def slow_mean_margin(model, point, label, noise) -> torch.Tensor:
    total = torch.zeros_like(point)
    for draw in noise:
        leaf = (point + draw).requires_grad_()
        logits = model(leaf[None])[0]
        other = max((value, k) for k, value in enumerate(logits.tolist()) if k != label)[1]
        total = total + torch.autograd.grad(logits[other] - logits[label], leaf)[0]
    return total / len(noise)


ESTIMATORS = {**estimators_and_slow_ones(SIGMA), "own": (mean_margin, slow_mean_margin)}


def situation(examples: int, copies: int, seed: int, scale: float = 4.0):
    """A model, points [B, 5], labels [B] and noise [B, m, 5], all float64."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(examples, DIMENSION, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (examples,), generator=generator)
    noise = SIGMA * torch.randn(
        examples, copies, DIMENSION, dtype=torch.float64, generator=generator
    )
    return smooth_network(DIMENSION, CLASSES, seed, scale=scale), points, labels, noise


def are_equal(estimate: torch.Tensor, expected: torch.Tensor) -> bool:
    """Up to 1e-10 of the largest number of each example, or 1e-12: float64 knows logits of some
    hundreds to 1e-13.
    """
    scale = expected.flatten(1).abs().amax(1, keepdim=True).clamp_min(1e-2)
    return bool(((estimate - expected).flatten(1).abs() <= 1e-10 * scale).all())


@given(
    st.sampled_from(list(ESTIMATORS)),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 14),
    st.integers(0, 50),
    st.sampled_from([0.5, 4.0, 300.0]),
)
def test_parts_make_the_whole(name, examples, copies, rows, seed, scale):
    """Also where the softmax is saturated and one part outweighs the others by hundreds of orders
    of magnitude.
    """
    estimator, slow = ESTIMATORS[name]
    model, points, labels, noise = given_ = situation(examples, copies, seed, scale)
    whole, parts = estimator(*given_), InParts(estimator, rows)(*given_)
    assert are_equal(parts.gradient, whole.gradient)
    one_by_one = torch.stack([slow(model, *each) for each in zip(points, labels.tolist(), noise)])
    assert are_equal(parts.gradient, one_by_one)
    torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-10, atol=1e-10)
    if name == "plug_in":
        torch.testing.assert_close(parts.log_weight(), whole.log_weight(), rtol=1e-10, atol=1e-10)


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_pass_holds_whole_examples_or_equal_parts_of_one(copies, batch):
    rows = rows_per_pass(copies, batch)
    assert 1 <= rows <= batch
    if copies <= batch:
        assert rows % copies == 0 and rows + copies > batch
    else:
        passes = -(-copies // rows)
        assert passes == -(-copies // batch), "no more passes than the budget demands"
        assert passes * rows - copies < passes, "nor more padding than equal parts need"


SIZES = list(itertools.product([1, 3, 8], [1, 2, 8, 17]))
OPTIONS = [{}, {"restarts": 2}, {"target": "every"}, {"target": "runner-up", "restarts": 2}]
GOALS = list(
    itertools.product(OPTIONS, [PGD(0.5, 2), DDN(0.5, 4), DDN(0.5, 3, estimator=Stein(0.25))])
)


# Of 144 combinations 24, among which any two of the values meet.
@pytest.mark.parametrize(
    ("copies", "batch", "options", "attack"),
    [
        (*size, *GOALS[(5 * number + shift) % len(GOALS)])
        for number, size in enumerate(SIZES)
        for shift in (0, 3)
    ],
)
def test_model_sees_one_shape_within_the_budget(copies, batch, options, attack):
    """Of examples of which DDN has settled some at the start, and for other examples beside
    them.
    """
    model = smooth_network(DIMENSION, CLASSES, 0, torch.float32)
    inputs = torch.rand(5, DIMENSION, generator=torch.Generator().manual_seed(0))
    labels = model(inputs).argmax(1)
    labels[1:3] = (labels[1:3] + 1) % CLASSES
    recorder, smoothed = (
        Recorder(model),
        SmoothedAttack(attack, 0.25, copies, batch=batch, **options),
    )
    for rows in ([0, 1, 2, 3, 4], [3], [1, 2]):
        smoothed(recorder, inputs[rows], labels[rows], rows)
        smoothed.choose_targets(recorder, inputs[rows], labels[rows], rows)
    assert len({part.shape for part in recorder.batches}) == 1
    assert len(recorder.batches[0]) <= batch
    unnamed = Recorder(model)
    smoothed(unnamed, inputs, labels)
    assert len({part.shape for part in unnamed.batches}) == 1
    assert len(unnamed.batches[0]) <= min(batch, 5 * copies), "no padding beyond what there is"


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=40, unique=True), st.integers(1, 70))
def test_place_in_a_pass_is_a_function_of_the_index(indices, places):
    placed = places_in_pass(dict(enumerate(indices)), places)
    assert len(placed) == places and placed.count(0) == 1, "the first in line is never left out"
    seated = [row for row in placed if row is not None]
    assert len(set(seated)) == len(seated)
    for place, row in enumerate(placed):
        if row is not None:
            alone = places_in_pass({5: indices[row]}, places)
            assert alone.index(5) == place and alone.count(None) == places - 1
