"""Estimators on single draws, and the state of an attacked model; test_oracles_to_six_digits.py has
their averages.

The expected loss is the mean over copies of -log p (Cohen et al., 2019, appendix G.3), not the loss
of the expectation, -log of the mean of p (SmoothAdv, eq. 6): the checks tell them apart. beta is an
inverse temperature (its appendix B).
"""

import math

import pytest
import torch

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import (
    PlugIn,
    frozen,
    plug_in,
    smoothed_loss,
    stein_gradient,
)
from smoothadv.attacks.geometry import unit
from smoothadv.attacks.micro_batches import InParts
from smoothadv.attacks.pgd import PGD
from smoothadv.base.settings import settings_record
from support.models import network_with_state
from support.slow_attacks import slow_plug_in, smooth_network

SIGMA = 0.5
LABEL = torch.tensor([1])


@pytest.mark.parametrize("gap", [46.0, 50.0, 1e3, 1e6])
def test_loss_has_a_gradient_however_improbable_the_label_is(gap):
    logits = torch.tensor([[[gap, 0.0], [gap + 1, 0.0]]], requires_grad=True)
    loss = smoothed_loss(logits, LABEL)
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


LABELS, COPIES = torch.tensor([0, 3, 2]), 7
GENERATOR = torch.Generator().manual_seed(5)
POINTS = torch.rand(3, 6, dtype=torch.float64, generator=GENERATOR)
NOISE = 0.5 * torch.randn(3, COPIES, 6, dtype=torch.float64, generator=GENERATOR)
MODEL = smooth_network(6, 4, seed=0)


@pytest.mark.parametrize("beta", [0.01, 0.5, 4.0, 16.0, 100.0])
def test_direction_is_that_of_a_model_whose_logits_are_multiplied(beta):
    slow = [
        slow_plug_in(lambda x: beta * MODEL(x), *each)
        for each in zip(POINTS, LABELS.tolist(), NOISE)
    ]
    assert (
        unit(plug_in(MODEL, POINTS, LABELS, NOISE).gradient) - unit(torch.stack(slow))
    ).abs().max() > 1e-3
    for estimator in (PlugIn(beta), InParts(PlugIn(beta), 3)):
        estimate = estimator(MODEL, POINTS, LABELS, NOISE)
        torch.testing.assert_close(
            unit(estimate.gradient), unit(torch.stack(slow)), rtol=0, atol=1e-9
        )
        torch.testing.assert_close(
            estimate.logits.flatten(0, 1), MODEL((POINTS[:, None] + NOISE).flatten(0, 1))
        )


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
        closest = copies[1] if beta > 100 else slopes @ copies
        expected = closest / closest.norm()
        assert (unit(found.gradient.double())[0] - expected).abs().max() < 4 * torch.finfo(
            dtype
        ).eps


@pytest.mark.parametrize("attack", [PGD, DDN])
@pytest.mark.parametrize("target", [None, 1, "runner-up", "least-likely", "random", "every"])
def test_all_attacks_and_targets_take_it_and_restarts_compete_by_its_objective(attack, target):
    inputs = POINTS.reshape(3, 1, 2, 3)

    def found(estimator, model=MODEL):
        made = SmoothedAttack(
            attack(0.5, 4, estimator=estimator), 0.3, 6, restarts=4, target=target, batch=4
        )
        return made(model, inputs, LABELS, targets=made.choose_targets(MODEL, inputs, LABELS))

    sharp = found(PlugIn(8.0))
    torch.testing.assert_close(sharp, found(plug_in, lambda x: 8 * MODEL(x)), rtol=0, atol=1e-9)
    assert attack is DDN or not torch.equal(sharp, found(plug_in))
    assert found(PlugIn(1e308)).isfinite().all()


def test_manifests_tell_it_where_it_is_not_1_the_papers_attack():
    assert settings_record(PGD(0.5, 4, estimator=PlugIn(4.0)))["estimator"] == {
        "name": "PlugIn",
        "beta": 4.0,
    }
