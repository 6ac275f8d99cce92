"""The plug-in gradient at an inverse temperature beta of the softmax (SmoothAdv, appendix B)."""

import math

import pytest
import torch

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import PlugIn, plug_in, smoothed_loss
from smoothadv.attacks.pgd import PGD
from smoothadv.attacks.shared.geometry import unit
from smoothadv.attacks.shared.micro_batches import InParts
from smoothadv.settings import settings_record
from support.slow_attacks import slow_plug_in, smooth_network

LABELS, COPIES = torch.tensor([0, 3, 2]), 7
GENERATOR = torch.Generator().manual_seed(5)
POINTS = torch.rand(3, 6, dtype=torch.float64, generator=GENERATOR)
NOISE = 0.5 * torch.randn(3, COPIES, 6, dtype=torch.float64, generator=GENERATOR)
MODEL = smooth_network(6, 4, seed=0)


@pytest.mark.parametrize("beta", [0.01, 0.5, 4.0, 16.0, 100.0])
def test_direction_is_that_of_a_model_whose_logits_are_multiplied(beta):
    slow = [slow_plug_in(lambda x: beta * MODEL(x), *each) for each in zip(POINTS, LABELS.tolist(), NOISE)]
    assert (unit(plug_in(MODEL, POINTS, LABELS, NOISE).gradient) - unit(torch.stack(slow))).abs().max() > 1e-3
    for estimator in (PlugIn(beta), InParts(PlugIn(beta), 3)):
        estimate = estimator(MODEL, POINTS, LABELS, NOISE)
        torch.testing.assert_close(unit(estimate.gradient), unit(torch.stack(slow)), rtol=0, atol=1e-9)
        torch.testing.assert_close(estimate.logits.flatten(0, 1), MODEL((POINTS[:, None] + NOISE).flatten(0, 1)))


def two_classes(x: torch.Tensor) -> torch.Tensor:
    """Class 1 within the unit circle: the score 1 - |x|^2 has the gradient -2 x."""
    return torch.stack([torch.zeros_like(x[:, 0]), 1 - x.square().sum(1)], dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beta", [1e-300, 0.3, 3.0, 1e4, 1e30, 1e290])
def test_gradient_of_two_classes_in_closed_form_at_any_size_of_beta(beta, dtype):
    """The sum of 2 x_i s(beta z_i) s(-beta z_i), s the sigmoid: in the limit 2 x of the copy next to the boundary."""
    copies = torch.tensor([[0.5, 0.25], [1.0, 0.5], [-0.5, -0.5], [0.25, -1.5]], dtype=torch.float64)
    scores = 1 - copies.square().sum(1)  # 0.6875, -0.25, 0.5, -1.3125: exact in all dtypes
    slopes = (scores.abs() * -beta - 2 * torch.log1p(torch.exp(scores.abs() * -beta))).clamp(min=-1e300).softmax(0)
    zeros, label = torch.zeros(1, 2, dtype=dtype), torch.tensor([1])
    for rows in (4, 1):
        found = InParts(PlugIn(beta), rows)(two_classes, zeros, label, copies[None].to(dtype))
        assert found.gradient.dtype == dtype
        closest = copies[1] if beta > 100 else slopes @ copies
        expected = closest / closest.norm()
        assert (unit(found.gradient.double())[0] - expected).abs().max() < 4 * torch.finfo(dtype).eps


def test_objective_tends_to_the_share_of_votes():
    logits = 5 * torch.randn(3, 1000, 4, generator=torch.Generator().manual_seed(1))
    votes = (logits.argmax(-1) == LABELS[:, None]).double().mean(1)
    errors = []
    for beta in (0.1, 1.0, 10.0, 100.0, 1e300):
        errors.append((smoothed_loss(PlugIn(beta).sharpened(logits), LABELS).neg().exp() - votes).abs().max().item())
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.01 and errors[-1] < 1e-12


@pytest.mark.parametrize("attack", [PGD, DDN])
@pytest.mark.parametrize("target", [None, 1, "runner-up", "least-likely", "random", "every"])
def test_all_attacks_and_targets_take_it_and_restarts_compete_by_its_objective(attack, target):
    inputs = POINTS.reshape(3, 1, 2, 3)

    def found(estimator, model=MODEL):
        made = SmoothedAttack(attack(0.5, 4, estimator=estimator), 0.3, 6, restarts=4, target=target, batch=4)
        return made(model, inputs, LABELS, targets=made.choose_targets(MODEL, inputs, LABELS))

    sharp = found(PlugIn(8.0))
    torch.testing.assert_close(sharp, found(plug_in, lambda x: 8 * MODEL(x)), rtol=0, atol=1e-9)
    assert attack is DDN or not torch.equal(sharp, found(plug_in))
    assert found(PlugIn(1e308)).isfinite().all()


def test_manifests_tell_it_where_it_is_not_1_the_papers_attack():
    assert settings_record(PGD(0.5, 4, estimator=PlugIn(4.0)))["estimator"] == {"name": "PlugIn", "beta": 4.0}


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf, math.nan])
def test_other_numbers_are_refused(beta):
    with pytest.raises(ValueError, match="beta: found .*, expected a finite number above 0"):
        PlugIn(beta)
