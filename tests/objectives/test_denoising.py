"""Objectives of denoisers: their values in closed form, where gradients go, and what the log says
of a classifier.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.objectives import Batch
from smoothadv.objectives.denoising import DENOISING, DenoisedStability, MeanSquaredError
from support.objectives import outcome_of

SIGMA = 0.25


class Scaled(nn.Module):
    """D(z) = w z."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.weight * images


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval().requires_grad_(False)


def batch(count: int = 6, teacher: nn.Module | None = None) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images, noise = torch.randn(2, count, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return Batch(images, labels, SIGMA * noise.unsqueeze(1), teacher=teacher)


@pytest.mark.parametrize("weight", [0.5, 0.9, 1.0])
def test_squared_error_of_a_scaled_image_is_known(weight):
    """Of pixels ~ N(0, 1): (1 - w)^2 + w^2 sigma^2. The mean of 128,000 squares is within 2 %, 5
    standard errors.
    """
    seen = batch(2000)
    loss = float(outcome_of(MeanSquaredError(SIGMA), Scaled(weight), seen).loss.detach())
    assert loss == pytest.approx((1 - weight) ** 2 + (weight * SIGMA) ** 2, rel=0.02)
    errors = weight * (seen.images + seen.noise[:, 0]).double() - seen.images
    assert loss == pytest.approx(float((errors**2).mean()), rel=1e-5)


def test_stability_is_the_cross_entropy_under_the_class_of_the_clean_image():
    network, model = classifier(), Scaled(0.8)
    seen = batch(6, network)
    outcome = outcome_of(DenoisedStability(SIGMA), model, seen)
    logits = network(0.8 * (seen.images + seen.noise[:, 0]))
    wanted = network(seen.images).argmax(1)
    assert float(outcome.loss.detach()) == pytest.approx(
        float(F.cross_entropy(logits, wanted)), rel=1e-5
    )
    assert (
        int(outcome.correct) == int((logits.argmax(1) == seen.labels).sum())
        and outcome.examples == 6
    )
    outcome.loss.backward()
    assert float(model.weight.grad) != 0, "gradients pass through the classifier"
    assert all(weight.grad is None for weight in network.parameters()), "which stays as it is"


@pytest.mark.parametrize("name", DENOISING)
@pytest.mark.parametrize("with_classifier", [True, False])
def test_accuracies_are_those_behind_the_classifier_or_unknown(name, with_classifier):
    network, model = classifier(), Scaled(0.8)
    seen, objective = batch(90, network if with_classifier else None), DENOISING[name](SIGMA)
    if name == "stability" and not with_classifier:
        with pytest.raises(ValueError, match="needs a classifier"):
            objective.test(model, seen)
        return
    loss, noisy, clean = objective.test(model, seen)
    assert float(loss.detach()) == pytest.approx(
        90 * float(outcome_of(objective, model, seen).loss.detach()), rel=1e-5
    )
    if not with_classifier:
        assert math.isnan(noisy) and math.isnan(clean)
        return
    images = 0.8 * torch.stack([seen.images + seen.noise[:, 0], seen.images])
    expected = [int((network(some).argmax(1) == seen.labels).sum()) for some in images]
    assert [int(noisy), int(clean)] == expected and noisy != clean
