"""Estimators on single draws, and the state of an attacked model; test_oracles_to_six_digits.py has their averages."""

import math

import pytest
import torch

from smoothadv.attacks.estimators import frozen, smoothed_loss, stein_gradient
from support.models import POINT, WEIGHT, network_with_state

SIGMA = 0.5
W = torch.tensor(WEIGHT, dtype=torch.float64)
X = torch.tensor([POINT], dtype=torch.float64)
LABEL = torch.tensor([1])


def gaussian(examples: int, copies: int, seed: int) -> torch.Tensor:
    shape = (examples, copies, 2)
    return SIGMA * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_loss_of_one_copy_is_cross_entropy():
    logits = torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 1])
    torch.testing.assert_close(
        smoothed_loss(logits, labels), torch.nn.functional.cross_entropy(logits[:, 0], labels, reduction="none")
    )


@pytest.mark.parametrize("gap", [46.0, 50.0, 1e3, 1e6])
def test_loss_has_a_gradient_however_improbable_the_label_is(gap):
    logits = torch.tensor([[[gap, 0.0], [gap + 1, 0.0]]], requires_grad=True)
    loss = smoothed_loss(logits, LABEL)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    # Copies of label probability exp(-gap) and exp(-gap - 1), hence weights 1 / (1 + 1/e) and 1 / (1 + e).
    weights = [1 / (1 + math.exp(-1)), 1 / (1 + math.e)]
    assert loss.item() == pytest.approx(gap - math.log((1 + math.exp(-1)) / 2), rel=1e-5)
    assert gradient[0, :, 1].tolist() == pytest.approx([-weight for weight in weights], rel=1e-3)


def test_stein_gradient_treats_each_example_by_itself_in_any_shape():
    generator = torch.Generator().manual_seed(0)
    scores, noise = torch.rand(3, 4, generator=generator), torch.randn(3, 4, 2, 5, 6, generator=generator)
    expected = torch.stack([sum(scores[b, i] * noise[b, i] for i in range(4)) / (4 * SIGMA**2) for b in range(3)])
    torch.testing.assert_close(stein_gradient(scores, noise, SIGMA), expected)


def state_of(model: torch.nn.Module) -> list[bool]:
    return [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()]


def model_in_mixed_state() -> torch.nn.Module:
    """Modules in different modes, one of them under two parents, and parameters with different flags."""
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


def test_frozen_takes_what_is_no_module():
    with frozen(lambda inputs: inputs):
        pass


@pytest.mark.parametrize("hard", [False, True])
def test_gradients_from_noise_are_sums_in_full_precision_under_autocast(hard):
    """Autocast is for convolutions: a sum over draws in bfloat16 would be wrong in its third digit."""
    noise = 0.25 * torch.randn(2, 50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    scores = torch.rand(2, 50, generator=torch.Generator().manual_seed(1))
    scores = scores.round() if hard else scores
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradient = stein_gradient(scores, noise, 0.25)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, stein_gradient(scores, noise, 0.25))
    coarse = stein_gradient(scores.bfloat16(), noise.bfloat16(), 0.25).float()
    assert (coarse - gradient).abs().max() > 1e-3 * gradient.abs().max(), "the test would notice it"
