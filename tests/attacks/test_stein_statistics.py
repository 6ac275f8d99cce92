"""The gradient-free estimator as a random variable: mean, variance, rate, and that nothing is subtracted from it.

SmoothAdv, appendix B.1. Each check rejects what is true with probability 1e-6 over the seeds
(``support.statistical_checks``), and each has a wrong variant beside it that it rejects.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.estimators import Stein
from smoothadv.attacks.pgd import PGD
from smoothadv.attacks.shared.micro_batches import InParts
from support.models import POINT, WEIGHT, ConstantClassifier, Recorder, linear_classifier, probit_classifier
from support.statistical_checks import are_means, is_gaussian_sample

SIGMA, MARGIN, LENGTH = 0.5, 4.0, 5.0
W = np.array(WEIGHT)
T = np.sqrt(1 + SIGMA**2 * LENGTH**2)
Z = MARGIN / (SIGMA * LENGTH)
# The gradients of Phi((w.x + b) / t), of the probit, and of Phi((w.x + b) / (sigma |w|)), of hard decisions.
GRADIENTS = {False: W * norm.pdf(MARGIN / T) / T, True: W / LENGTH * norm.pdf(Z) / SIGMA}
MODELS = {False: probit_classifier, True: linear_classifier}
soft_and_hard = pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])


def samples(estimator, copies: int, repetitions: int, hard: bool, seed: int = 0) -> np.ndarray:
    """Independent estimates of the gradient of G at POINT (the estimators ascend -G): [repetitions, 2]"""
    generator = torch.Generator().manual_seed(seed)
    noise = SIGMA * torch.randn(repetitions, copies, 2, dtype=torch.float64, generator=generator)
    x = torch.tensor([POINT], dtype=torch.float64).expand(repetitions, 2)
    return -estimator(MODELS[hard](), x, torch.ones(repetitions, dtype=torch.int64), noise).gradient.numpy()


def one_copy_variance(hard: bool) -> float:
    """E|F d|^2 / sigma^4 - |grad G|^2: in closed form for hard decisions, by quadrature along w for the probit."""
    if hard:
        second = (2 * norm.cdf(Z) - Z * norm.pdf(Z)) / SIGMA**2
    else:
        nodes, weights = np.polynomial.hermite_e.hermegauss(120)
        squares = norm.cdf(MARGIN + SIGMA * LENGTH * nodes) ** 2
        second = (weights * squares * (nodes**2 + 1)).sum() / weights.sum() / SIGMA**2
    return second - (GRADIENTS[hard] ** 2).sum()


@soft_and_hard
@pytest.mark.parametrize("copies, rows", [(1, 1), (3, 3), (8, 8), (8, 3), (8, 1)])
def test_mean_is_the_gradient_whatever_the_copies_and_their_parts(hard, copies, rows):
    estimator = Stein(SIGMA, hard) if rows == copies else InParts(Stein(SIGMA, hard), rows)
    found = samples(estimator, copies, 60_000, hard)
    assert are_means(found, GRADIENTS[hard])
    assert not are_means(samples(Stein(1.5 * SIGMA, hard), copies, 60_000, hard), GRADIENTS[hard]), "the wrong sigma"


@soft_and_hard
@pytest.mark.parametrize("rows", [None, 7], ids=["whole", "parts"])
def test_squared_error_is_the_variance_over_the_number_of_copies(hard, rows):
    """So the error falls as 1 / sqrt(m), which halving at every fourfold m shows."""
    estimator = Stein(SIGMA, hard) if rows is None else InParts(Stein(SIGMA, hard), rows)
    variance, roots = one_copy_variance(hard), []
    for copies in (4, 16, 64):
        squares = ((samples(estimator, copies, 10_000, hard, seed=copies) - GRADIENTS[hard]) ** 2).sum(1)
        assert are_means(squares * copies, variance)
        assert not are_means(squares * copies, 1.1 * variance), "the check would notice a tenth"
        roots.append(np.sqrt(squares.mean()))
    assert [roots[0] / roots[1], roots[1] / roots[2]] == pytest.approx([2, 2], rel=0.1)


def test_variance_formula_is_that_of_the_table():
    assert one_copy_variance(True) == pytest.approx(6.8025, abs=5e-5)


@soft_and_hard
def test_nothing_is_subtracted_from_the_scores(hard):
    """No baseline: a constant F gives -F times the mean of the noise over sigma^2, not 0."""
    noise = SIGMA * torch.randn(3, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, labels = torch.rand(3, 2, dtype=torch.float64), torch.tensor([0, 1, 2])
    model = ConstantClassifier(1, 3)
    share = np.exp([0.0, 1.0, 0.0]) / np.exp([0.0, 1.0, 0.0]).sum()
    score = torch.tensor([0.0, 1.0, 0.0] if hard else share.tolist(), dtype=torch.float64)
    for estimator in (Stein(SIGMA, hard), InParts(Stein(SIGMA, hard), 2)):
        gradient = estimator(model, x, labels, noise).gradient
        torch.testing.assert_close(gradient, -score[:, None] * noise.mean(1) / SIGMA**2, rtol=1e-6, atol=1e-9)
    assert gradient.abs().max() > 0.1


@soft_and_hard
def test_attack_estimates_with_the_noise_that_its_copies_got(hard):
    """Through the whole attack: one step of a random direction per example, whose mean is along -w.

    Copies that did not get the very draws which weigh them would leave no mean.
    """
    count, step = 4_000, 1e-3
    x = torch.tensor([POINT], dtype=torch.float64).expand(count, 2) / 2 + 0.25
    model = Recorder(MODELS[hard](bias=-(x[0].numpy() @ W).item() + MARGIN))
    attack = SmoothedAttack(PGD(step, 1, step_size=step, estimator=Stein(SIGMA, hard)), SIGMA, 4, batch=1_000)
    directions = ((attack(model, x, torch.ones(count, dtype=torch.int64)) - x) / step).numpy()
    across = directions @ np.array([-4.0, 3.0]) / 5
    assert are_means(across, 0.0), "by symmetry"
    assert not are_means(directions @ W / 5, 0.0) and (directions @ W).mean() < 0
    noise = torch.cat(model.batches)[: 4 * count] - x[0]
    assert is_gaussian_sample(noise.numpy(), SIGMA) and not is_gaussian_sample(noise.numpy(), 1.05 * SIGMA)


def test_wrong_pairing_of_scores_and_noise_has_no_mean():
    """The control of all the above: each copy's score with the next copy's noise."""

    class Shifted(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return probit_classifier()(inputs.roll(1, 0))

    generator = torch.Generator().manual_seed(0)
    noise = SIGMA * torch.randn(60_000, 3, 2, dtype=torch.float64, generator=generator)
    x = torch.tensor([POINT], dtype=torch.float64).expand(60_000, 2)
    found = -Stein(SIGMA)(Shifted(), x, torch.ones(60_000, dtype=torch.int64), noise).gradient.numpy()
    assert are_means(found, 0.0) and not are_means(found, GRADIENTS[False])
