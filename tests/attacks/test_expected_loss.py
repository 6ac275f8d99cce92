"""The expected loss: the mean over copies of -log p (Cohen et al., 2019, appendix G.3), in closed form.

It is not the loss of the expectation, -log of the mean of p (SmoothAdv, eq. 6), and the checks tell them apart.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import norm

from smoothadv.attacks.estimators import Stein, expected_loss, mean_cross_entropy, plug_in, smoothed_loss
from smoothadv.attacks.pgd import PGD
from support.models import POINT, WEIGHT, linear_classifier, probit_classifier
from support.slow_attacks import slow_expected_loss, slow_plug_in, smooth_network

LABEL = torch.tensor([1])
SIGMA = 0.5
W = torch.tensor(WEIGHT, dtype=torch.float64)
X = torch.tensor([POINT], dtype=torch.float64)


def two_copies() -> torch.Tensor:
    """Logits [1, 2, 2] of copies that give class 1 the probabilities 0.9 and 0.1."""
    score = torch.tensor([math.log(9), -math.log(9)], dtype=torch.float64)
    return torch.stack([torch.zeros_like(score), score], dim=1)[None].requires_grad_()


def test_losses_of_two_copies():
    for loss, value, gradient in [
        (mean_cross_entropy, -(math.log(0.9) + math.log(0.1)) / 2, (-0.05, -0.45)),
        (smoothed_loss, math.log(2), (-0.09, -0.09)),
    ]:
        logits = two_copies()
        result = loss(logits, LABEL)
        assert result.item() == pytest.approx(value, abs=1e-12)
        (found,) = torch.autograd.grad(result.sum(), logits)
        assert found[0, :, 1].tolist() == pytest.approx(gradient, abs=1e-12)
    assert -(math.log(0.9) + math.log(0.1)) / 2 == pytest.approx(1.203973, abs=5e-7)


@pytest.mark.parametrize("shape", [(6,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("copies", [1, 2, 7])
def test_it_is_the_mean_of_the_copies_own_gradients(shape, copies):
    generator = torch.Generator().manual_seed(copies)
    model, labels = smooth_network(6, 4, seed=0), torch.tensor([0, 3, 2])
    x = torch.rand(3, *shape, dtype=torch.float64, generator=generator)
    noise = torch.randn(3, copies, *shape, dtype=torch.float64, generator=generator)
    estimate = expected_loss(model, x, labels, noise)
    for estimator, slow in [(expected_loss, slow_expected_loss), (plug_in, slow_plug_in)]:
        expected = torch.stack([slow(model, *each) for each in zip(x, labels.tolist(), noise)])
        same = torch.allclose(estimate.gradient, expected, rtol=1e-10, atol=1e-12)
        assert same == (estimator is expected_loss or copies == 1), "one copy has but one loss"
    assert estimate.gradient.shape == x.shape and estimate.logits.shape == (3, copies, 4)
    assert not estimate.gradient.requires_grad and not estimate.logits.requires_grad


def mirrored_noise(seed: int) -> torch.Tensor:
    """Six draws [1, 6, 2] and their mirror images beside the line along W: sums over them lie on that line."""
    draws = SIGMA * torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    along = (draws @ W / 25)[:, None] * W
    return torch.cat([draws, 2 * along - draws])[None]


@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize(
    "estimator",
    [plug_in, expected_loss, Stein(SIGMA), Stein(SIGMA, True)],
    ids=["plug_in", "expected_loss", "stein", "hard"],
)
def test_every_estimator_moves_straight_away_from_a_linear_classifier(estimator, steps):
    """v = -epsilon w / |w|: also where gradients come from noise, if that is symmetric about w."""
    model, x = linear_classifier(bias=-3.3), torch.full((1, 2), 0.5, dtype=torch.float64)
    for seed in range(3):
        attacked = PGD(0.25, steps, estimator=estimator)(model, x, LABEL, mirrored_noise(seed))
        torch.testing.assert_close(attacked - x, -0.25 * W[None] / 5, rtol=0, atol=1e-12)


def mills_expectation() -> mpmath.mpf:
    """E[phi(s) / Phi(s)] for s ~ N(4, (5 sigma)^2), to 20 digits: minus the gradient's coefficient on w."""
    with mpmath.workdps(25):
        spread = mpmath.mpf(5) * SIGMA

        def integrand(s):
            return mpmath.npdf(s) / mpmath.ncdf(s) * mpmath.npdf(s, 4, spread)

        return mpmath.quad(integrand, [-30, -20, -10, -5, 0, 5, 10, 20, 30])


def test_expected_gradient_of_a_smoothed_probit():
    """By a million points at the midpoints of equally probable parts: accurate to 1e-6 in every coordinate."""
    positions = torch.from_numpy(norm.ppf((np.arange(1_000_000) + 0.5) / 1_000_000))
    noise = (SIGMA * positions[:, None] * W / 5)[None]
    coefficient = float(mills_expectation())
    assert coefficient == pytest.approx(0.1351, abs=5e-5)
    gradient = expected_loss(probit_classifier(), X, LABEL, noise).gradient
    assert gradient[0].tolist() == pytest.approx([-3 * coefficient, -4 * coefficient], abs=1e-6)
    # The loss of the expectation has less than half of that.
    assert plug_in(probit_classifier(), X, LABEL, noise).gradient[0, 0].item() > -1.5 * coefficient
