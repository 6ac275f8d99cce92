"""Gradient estimators and the attacker's loss, against closed forms; the state of an attacked model.

Two ways replace Gaussian noise by few points on which its averages are exact: ``cubature`` matches all moments up to
the third, ``quantiles`` averages any function of w.x. Where noise is random, checks have a false-alarm probability of
1e-6 over the seeds (``support.statistical_checks``).
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from smoothadv.attacks.estimators import Stein, frozen, plug_in, smoothed_loss, stein_gradient
from smoothadv.attacks.pgd import PGD
from support.models import (
    BIAS,
    DISTANCE,
    MARGIN,
    POINT,
    WEIGHT,
    linear_classifier,
    network_with_state,
    probit_classifier,
)
from support.statistical_checks import are_means

SIGMA = 0.5
W = torch.tensor(WEIGHT, dtype=torch.float64)
X = torch.tensor([POINT], dtype=torch.float64)
LABEL = torch.tensor([1])


def gaussian(examples: int, copies: int, seed: int) -> torch.Tensor:
    shape = (examples, copies, 2)
    return SIGMA * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cubature(dimension: int) -> torch.Tensor:
    """2d points whose moments up to the third are those of N(0, SIGMA^2 I): [1, 2d, d]"""
    points = SIGMA * math.sqrt(dimension) * torch.eye(dimension, dtype=torch.float64)
    return torch.cat([points, -points])[None]


def quantiles(count: int) -> torch.Tensor:
    """Noise along W / 5 at the midpoints of ``count`` equally probable parts of the Gaussian: [1, count, 2]"""
    positions = norm.ppf((np.arange(count) + 0.5) / count)
    return (SIGMA * torch.from_numpy(positions)[:, None] * W / 5)[None]


def logits_of(probabilities) -> torch.Tensor:
    """Logits [1, m, 2] that give class 1 these probabilities, leaf of a graph."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    return torch.stack([torch.zeros_like(p), torch.log(p / (1 - p))], dim=1)[None].requires_grad_()


def test_loss_is_the_logarithm_of_the_mean_and_not_the_mean_of_logarithms():
    logits = logits_of([0.9, 0.1])
    loss = smoothed_loss(logits, LABEL)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    # The mean of logarithms would be 1.203973, with the gradient (-0.05, -0.45).
    assert loss.item() == pytest.approx(0.693147, abs=5e-7)
    assert gradient[0, :, 1].tolist() == pytest.approx([-0.09, -0.09])


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


@pytest.mark.parametrize("random", [False, True])
def test_stein_gradient_of_a_linear_function_is_its_weight(random):
    noise = gaussian(1, 400_000, seed=0) if random else cubature(2)
    scores = (X[:, None] + noise) @ W + BIAS
    terms = scores[..., None] * noise / SIGMA**2
    estimate = stein_gradient(scores, noise, SIGMA)
    torch.testing.assert_close(estimate, terms.mean(1))
    if random:
        assert are_means(terms[0].numpy(), W.numpy())
        assert not are_means(terms[0].numpy() * SIGMA, W.numpy())  # divided by sigma only once
    else:
        torch.testing.assert_close(estimate, W[None])


def test_stein_gradient_of_a_quadratic_function_is_exact_on_a_cubature():
    a, b = torch.tensor([[1.0, 0.5], [0.5, -2.0]], dtype=torch.float64), torch.tensor([0.3, -0.7], dtype=torch.float64)
    noise = cubature(2)
    points = X[:, None] + noise
    scores = torch.einsum("bmi,ij,bmj->bm", points, a, points) + points @ b
    torch.testing.assert_close(stein_gradient(scores, noise, SIGMA), torch.tensor([[2.8, -1.7]], dtype=torch.float64))


def test_stein_gradient_treats_each_example_by_itself_in_any_shape():
    generator = torch.Generator().manual_seed(0)
    scores, noise = torch.rand(3, 4, generator=generator), torch.randn(3, 4, 2, 5, 6, generator=generator)
    expected = torch.stack([sum(scores[b, i] * noise[b, i] for i in range(4)) / (4 * SIGMA**2) for b in range(3)])
    torch.testing.assert_close(stein_gradient(scores, noise, SIGMA), expected)


# Phi(w.x + b) averaged over the noise is Phi(4 / t).
T = math.sqrt(1 + SIGMA**2 * 25)


def smoothed_probability(x: torch.Tensor) -> float:
    noise = quantiles(20_000)
    return math.exp(-smoothed_loss(probit_classifier()(x + noise[0])[None], LABEL).item())


def test_loss_and_gradient_of_a_smoothed_probit():
    assert smoothed_probability(X) == pytest.approx(0.931303, abs=2e-6)
    noise = quantiles(20_000)
    estimate = plug_in(probit_classifier(), X, LABEL, noise)
    assert smoothed_loss(estimate.logits, LABEL).item() == pytest.approx(0.071171, abs=2e-6)
    assert estimate.gradient[0].tolist() == pytest.approx([-0.158325, -0.211100], abs=2e-6)


def test_pgd_lowers_the_smoothed_probability_as_far_as_epsilon_allows():
    attacked = PGD(0.25, 4)(probit_classifier(), X, LABEL, quantiles(2_000))
    assert smoothed_probability(attacked) == pytest.approx(0.846450, abs=2e-6)


def test_stein_estimates_the_gradient_of_the_smoothed_probability():
    noise = gaussian(200_000, 1, seed=1)
    estimate = Stein(SIGMA)(probit_classifier(), X.expand(200_000, 2), LABEL.expand(200_000), noise)
    gradient = np.array([0.147449, 0.196598])
    assert gradient == pytest.approx(W.numpy() * norm.pdf(4 / T) / T, abs=5e-7)
    # The estimator ascends -G.
    assert are_means(-estimate.gradient.numpy(), gradient)
    assert not are_means(estimate.gradient.numpy(), gradient)


# The plug-in gradient is -a w with a mean that falls towards the limit 0.052775 as the copies grow more.
@pytest.mark.parametrize(
    "copies, examples, coefficient",
    [(1, 200_000, -0.1351), (2, 100_000, -0.0667), (8, 25_000, -0.0552), (64, 4_000, -0.0530)],
)
def test_bias_of_the_plug_in_gradient(copies, examples, coefficient):
    noise = gaussian(examples, copies, seed=copies)
    gradient = plug_in(probit_classifier(), X.expand(examples, 2), LABEL.expand(examples), noise).gradient
    coefficients = (gradient @ W / 25).numpy()
    torch.testing.assert_close(gradient, torch.from_numpy(coefficients)[:, None] * W)
    assert are_means(coefficients, coefficient, rounding=5e-5)
    if copies <= 8:
        assert not are_means(coefficients, -0.052775, rounding=5e-5)


def test_stein_on_hard_decisions():
    count = 400_000
    arguments = linear_classifier(), X.expand(count, 2), LABEL.expand(count), gaussian(count, 1, seed=2)
    samples = -Stein(SIGMA, hard=True)(*arguments).gradient.numpy()
    mean = np.array([0.133105, 0.177473])
    z = DISTANCE / SIGMA
    assert mean == pytest.approx(W.numpy() / 5 * norm.pdf(z) / SIGMA, abs=5e-7)
    assert are_means(samples, mean)
    # The total variance (d p - z phi(z)) / sigma^2 - (phi(z) / sigma)^2 = 6.8025, from squared distances to the mean.
    assert are_means(((samples - mean) ** 2).sum(1), 6.8025, rounding=5e-5)
    # Soft decisions, which spare the noise near the boundary, are something else.
    assert not are_means(-Stein(SIGMA)(*arguments).gradient.numpy(), mean)


def test_hard_decisions_are_those_of_the_label_asked_about():
    noise = gaussian(1, 1_000, seed=3)
    model = linear_classifier()
    decided = (((X[:, None] + noise) @ W + BIAS) > 0).double()
    assert decided.mean().item() == pytest.approx(norm.cdf(MARGIN / (5 * SIGMA)), abs=0.04)  # 5 standard errors
    for label, scores in [(1, decided), (0, 1 - decided)]:
        expected = -torch.einsum("bm,bmi->bi", scores, noise) / (1_000 * SIGMA**2)
        torch.testing.assert_close(Stein(SIGMA, hard=True)(model, X, torch.tensor([label]), noise).gradient, expected)


@pytest.mark.parametrize("estimator", [plug_in, Stein(SIGMA), Stein(SIGMA, hard=True)])
def test_estimates_keep_copies_with_their_example(estimator):
    generator = torch.Generator().manual_seed(5)
    x, noise = torch.rand(3, 1, 4, 4, generator=generator), torch.randn(3, 5, 1, 4, 4, generator=generator)
    model, labels = network_with_state().eval(), torch.tensor([0, 1, 2])
    together = estimator(model, x, labels, noise)
    assert together.gradient.shape == x.shape and together.logits.shape == (3, 5, 3)
    assert not (together.gradient.requires_grad or together.logits.requires_grad)
    for b in range(3):
        alone = estimator(model, x[b : b + 1], labels[b : b + 1], noise[b : b + 1])
        torch.testing.assert_close(together.gradient[b : b + 1], alone.gradient)
        for i in range(5):
            torch.testing.assert_close(together.logits[b, i], model((x[b] + noise[b, i])[None])[0].detach())


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
