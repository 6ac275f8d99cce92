"""Estimators on single draws and in parts of the copies, the batches that a model sees, and the
state of an attacked model; test_oracles_to_six_digits.py has the averages of estimators.

The expected loss is the mean over copies of -log p (Cohen et al., 2019, appendix G.3), not the loss
of the expectation, -log of the mean of p (SmoothAdv, eq. 6): the checks tell them apart. beta is an
inverse temperature (its appendix B).
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import (
    PlugIn,
    Stein,
    frozen,
    plug_in,
    smoothed_loss,
    stein_gradient,
)
from smoothadv.attacks.geometry import unit
from smoothadv.attacks.micro_batches import InParts, places_in_pass, rows_per_pass
from smoothadv.attacks.pgd import PGD
from smoothadv.base.settings import settings_record
from support.models import Recorder, network_with_state
from support.slow_attacks import estimators_and_slow_ones, smooth_network

SIGMA, CLASSES, DIMENSION = 0.5, 3, 5
ESTIMATORS = estimators_and_slow_ones(SIGMA)


@pytest.mark.parametrize("gap", [46.0, 50.0, 1e3, 1e6])
def test_loss_has_a_gradient_however_improbable_the_label_is(gap):
    logits = torch.tensor([[[gap, 0.0], [gap + 1, 0.0]]], requires_grad=True)
    loss = smoothed_loss(logits, torch.tensor([1]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    # Copies of label probability exp(-gap) and exp(-gap - 1), hence weights 1 / (1 + 1/e) and 1 /
    # (1 + e).
    weights = [1 / (1 + math.exp(-1)), 1 / (1 + math.e)]
    assert loss.item() == pytest.approx(gap - math.log((1 + math.exp(-1)) / 2), rel=1e-5)
    assert gradient[0, :, 1].tolist() == pytest.approx([-weight for weight in weights], rel=1e-3)


def state_of(model: torch.nn.Module) -> list[bool]:
    return [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()]


def model_in_mixed_state() -> torch.nn.Module:
    """Modules in different modes, one of them under two parents, and parameters with different
    flags.
    """
    shared = torch.nn.Dropout()
    heads = torch.nn.Sequential(shared), torch.nn.Sequential(shared)
    model = torch.nn.Sequential(network_with_state(), *heads).train()
    shared.eval()
    model[0][0].eval()
    model[0][0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_restores_every_mode_and_flag(fails):
    model = model_in_mixed_state()
    before = state_of(model)
    assert len(set(before)) == 2
    try:
        with frozen(model):
            assert not any(state_of(model))
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    assert state_of(model) == before


@pytest.mark.parametrize("hard", [False, True])
def test_gradients_from_noise_are_sums_in_full_precision_under_autocast(hard):
    """Autocast is for convolutions: a sum over draws in bfloat16 would be wrong in its third
    digit.
    """
    noise = 0.25 * torch.randn(2, 50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    scores = torch.rand(2, 50, generator=torch.Generator().manual_seed(1))
    scores = scores.round() if hard else scores
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradient = stein_gradient(scores, noise, 0.25)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, stein_gradient(scores, noise, 0.25))
    coarse = stein_gradient(scores.bfloat16(), noise.bfloat16(), 0.25).float()
    assert (coarse - gradient).abs().max() > 1e-3 * gradient.abs().max(), "the test would notice it"


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


def two_classes(x: torch.Tensor) -> torch.Tensor:
    """Class 1 within the unit circle: the score 1 - |x|^2 has the gradient -2 x."""
    return torch.stack([torch.zeros_like(x[:, 0]), 1 - x.square().sum(1)], dim=1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("beta", [1e-300, 0.3, 3.0, 1e4, 1e30, 1e290])
def test_gradient_of_two_classes_in_closed_form_at_any_size_of_beta(beta, dtype):
    """The sum of 2 x_i s(beta z_i) s(-beta z_i), s the sigmoid: in the limit 2 x of the copy next
    to the boundary.
    """
    copies = torch.tensor(
        [[0.5, 0.25], [1.0, 0.5], [-0.5, -0.5], [0.25, -1.5]], dtype=torch.float64
    )
    scores = 1 - copies.square().sum(1)  # 0.6875, -0.25, 0.5, -1.3125: exact in all dtypes
    slopes = (
        (scores.abs() * -beta - 2 * torch.log1p(torch.exp(scores.abs() * -beta)))
        .clamp(min=-1e300)
        .softmax(0)
    )
    zeros, label = torch.zeros(1, 2, dtype=dtype), torch.tensor([1])
    for rows in (4, 1):
        found = InParts(PlugIn(beta), rows)(two_classes, zeros, label, copies[None].to(dtype))
        assert found.gradient.dtype == dtype
        torch.testing.assert_close(found.logits[0].double(), two_classes(copies))
        closest = copies[1] if beta > 100 else slopes @ copies
        expected = closest / closest.norm()
        assert (unit(found.gradient.double())[0] - expected).abs().max() < 4 * torch.finfo(
            dtype
        ).eps


@pytest.mark.parametrize("attack", [PGD, DDN])
@pytest.mark.parametrize("target", [None, "runner-up", "every"])
def test_all_attacks_and_targets_take_it_and_restarts_compete_by_its_objective(attack, target):
    network, inputs, labels, _ = situation(3, 1, 0)

    def found(estimator, model=network):
        made = SmoothedAttack(
            attack(0.5, 4, estimator=estimator), 0.3, 6, restarts=4, target=target, batch=4
        )
        return made(model, inputs, labels, targets=made.choose_targets(network, inputs, labels))

    sharp = found(PlugIn(8.0))
    torch.testing.assert_close(sharp, found(plug_in, lambda x: 8 * network(x)), rtol=0, atol=1e-9)
    assert attack is DDN or not torch.equal(sharp, found(plug_in))
    assert found(PlugIn(1e308)).isfinite().all()


def test_manifests_tell_it_where_it_is_not_1_the_papers_attack():
    assert settings_record(PGD(0.5, 4, estimator=PlugIn(4.0)))["estimator"] == {
        "name": "PlugIn",
        "beta": 4.0,
    }


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


GOALS = list(
    itertools.product(
        [{}, {"restarts": 2}, {"target": "every"}, {"target": "runner-up", "restarts": 2}],
        [PGD(0.5, 2), DDN(0.5, 4), DDN(0.5, 3, estimator=Stein(0.25))],
    )
)


# Of 144 combinations 24, among which any two of the values meet.
@pytest.mark.parametrize(
    ("copies", "batch", "options", "attack"),
    [
        (*size, *GOALS[(5 * number + shift) % len(GOALS)])
        for number, size in enumerate(list(itertools.product([1, 3, 8], [1, 2, 8, 17])))
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
