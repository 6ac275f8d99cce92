"""Attacks and estimators on classifiers whose answers are known, to 1e-6 and better.

Expected values are computed here with 20 digits or are exact recursions. Expectations over noise
are Gaussian quadratures over the estimates themselves: one example per node, weighted afterwards,
so that nothing is random.
"""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Stein, plug_in, smoothed_loss
from smoothadv.attacks.micro_batches import InParts
from smoothadv.attacks.pgd import PGD
from support.models import (
    DISTANCE,
    MARGIN,
    POINT,
    WEIGHT,
    ConstantClassifier,
    Recorder,
    linear_classifier,
    probit_classifier,
)

SIGMA = 0.5
W = torch.tensor(WEIGHT, dtype=torch.float64)
ACROSS = torch.tensor([-4.0, 3.0], dtype=torch.float64)
X = torch.tensor([POINT], dtype=torch.float64)
LABEL = torch.tensor([1])


def close(found, expected, tolerance: float = 1e-9) -> None:
    found = np.asarray(found.tolist() if isinstance(found, torch.Tensor) else found, dtype=float)
    assert np.abs(found - np.asarray(expected, dtype=float)).max() <= tolerance


# Clipping.


def clipped_pgd(steps: int) -> list[float]:
    """x = (.95, .5, .05), gradient along (1, 0, 1), epsilon 1/2, in 30 digits."""
    with mpmath.workdps(30):
        x, step, v = (
            (mpmath.mpf("0.95"), mpmath.mpf("0.05")),
            1 / mpmath.mpf(steps),
            [mpmath.mpf(0)] * 2,
        )
        for _ in range(steps):
            v = [
                min(max(pixel + part + step / mpmath.sqrt(2), 0), 1) - pixel
                for pixel, part in zip(x, v)
            ]
            length = mpmath.sqrt(v[0] ** 2 + v[1] ** 2)
            v = [part * min(1, mpmath.mpf("0.5") / length) for part in v]
        return [float(v[0]), 0.0, float(v[1])]


@pytest.mark.parametrize("steps", [1, 2, 10, 100])
def test_pixels_are_clipped_before_the_ball(steps):
    x = torch.tensor([[0.95, 0.5, 0.05]], dtype=torch.float64)
    model = linear_classifier((-1.0, 0.0, -1.0), 0.0)
    for attack in (PGD(0.5, steps), SmoothedAttack(PGD(0.5, steps), 0.3, 5, batch=2)):
        close((attack(model, x, LABEL) - x)[0], clipped_pgd(steps))
    if steps == 1:
        close(clipped_pgd(1), (0.035267, 0, 0.498755), 5e-7)
    if steps == 100:
        close(clipped_pgd(100), (0.0493, 0, 0.49756), 5e-5)
        # The optimum, which clipping and scaling in turn approach but do not reach.
        assert 1e-4 < abs(clipped_pgd(100)[0] - 0.05) < 1e-3


# The probit Phi(w.x + b), whose smoothed version is Phi((w.x + b) / t).

T = mpmath.sqrt(1 + mpmath.mpf(25) / 4)
SMOOTHED = mpmath.ncdf(4 / T)
SLOPE = mpmath.npdf(4 / T) / T


def along(positions: torch.Tensor) -> torch.Tensor:
    """Noise along W, in sigmas: [...] gives [..., 2]"""
    return SIGMA * positions[..., None] * W / 5


def estimates(estimator, noise: torch.Tensor) -> torch.Tensor:
    """One estimate for each of N draws of m copies [N, m, 2]: [N, 2]"""
    count = len(noise)
    return estimator(probit_classifier(), X.expand(count, 2), LABEL.expand(count), noise).gradient


def test_loss_gradient_and_attack_on_a_smoothed_probit():
    # At the midpoints of equally probable parts: averages are right to 5e-7.
    shares = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    noise = along(torch.special.ndtri(shares))[None]
    estimate = plug_in(probit_classifier(), X, LABEL, noise)
    close(smoothed_loss(estimate.logits, LABEL), float(-mpmath.log(SMOOTHED)), 1e-7)
    close(estimate.gradient[0], [float(-w * SLOPE / SMOOTHED) for w in WEIGHT], 1e-6)
    parts = InParts(plug_in, 70_001)(probit_classifier(), X, LABEL, noise)
    close(parts.gradient[0], estimate.gradient[0], 1e-12)
    attacked = PGD(0.25, 4)(probit_classifier(), X, LABEL, noise)
    close(attacked, X - 0.25 * W / 5, 1e-9)
    probability = smoothed_loss(probit_classifier()(attacked + noise[0])[None], LABEL).neg().exp()
    close(probability, float(mpmath.ncdf((4 - mpmath.mpf("1.25")) / T)), 1e-7)
    close(probability, 0.846450, 6e-7)


@pytest.mark.parametrize("copies", [1, 2])
def test_stein_gradient_of_soft_decisions_is_unbiased_exactly(copies):
    """Quadrature in both coordinates of each copy; other sigmas and signs are something else."""
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(100))
    weights = weights / weights.sum()
    if copies == 1:
        grid, weights = (
            torch.cartesian_prod(nodes, nodes)[:, None],
            torch.cartesian_prod(weights, weights).prod(1),
        )
        noise = along(grid[..., 0]) + SIGMA * grid[..., 1:] * ACROSS / 5
    else:
        noise, weights = (
            along(torch.cartesian_prod(nodes, nodes)),
            torch.cartesian_prod(weights, weights).prod(1),
        )
    expected = [float(-w * SLOPE) for w in WEIGHT]
    for estimator in (Stein(SIGMA), InParts(Stein(SIGMA), 1)):
        close((weights[:, None] * estimates(estimator, noise)).sum(0), expected)
    wrong = (weights[:, None] * estimates(Stein(1.01 * SIGMA), noise)).sum(0)
    assert (wrong - torch.tensor(expected)).abs().max() > 1e-3


def test_stein_gradient_of_hard_decisions_has_exactly_this_mean_and_variance():
    """The indicator jumps at -1.6 sigma along W: Gauss-Legendre on either side; two nodes across
    give its moments.
    """
    nodes, weights = np.polynomial.legendre.leggauss(80)
    jump, reach = -MARGIN / (5 * SIGMA), 12.0
    pieces = [(-reach, jump), (jump, 0.0), (0.0, reach)]
    z = np.concatenate([(a + b) / 2 + (b - a) / 2 * nodes for a, b in pieces])
    weight = (
        np.concatenate([(b - a) / 2 * weights for a, b in pieces])
        * np.exp(-(z**2) / 2)
        / math.sqrt(2 * math.pi)
    )
    z, weight = torch.from_numpy(np.tile(z, 2)), torch.from_numpy(np.tile(weight, 2) / 2)
    side = torch.cat([torch.ones(len(z) // 2), -torch.ones(len(z) // 2)]).double()
    noise = (along(z) + SIGMA * side[:, None] * ACROSS / 5)[:, None]
    count = len(noise)
    estimator = Stein(SIGMA, hard=True)
    samples = estimator(
        linear_classifier(), X.expand(count, 2), LABEL.expand(count), noise
    ).gradient
    mean = (weight[:, None] * samples).sum(0)
    a = mpmath.mpf(DISTANCE) / SIGMA
    expected = [float(-w * mpmath.npdf(a) / (5 * SIGMA)) for w in WEIGHT]
    close(mean, expected)
    close(expected, (-0.133105, -0.177473), 5e-7)
    variance = (weight * ((samples - mean) ** 2).sum(1)).sum()
    formula = (2 * mpmath.ncdf(a) - a * mpmath.npdf(a)) / SIGMA**2 - (mpmath.npdf(a) / SIGMA) ** 2
    close(variance, float(formula))
    close(variance, 6.8025, 5e-5)


# DDN on a linear classifier: its norms are a recursion.


def ddn_norms(distance: float, initial_norm: float, steps: int) -> tuple[list[float], float]:
    """The norms of the iterates looked at, and the smallest that is beyond the boundary (0 if
    none).
    """
    norms, norm, best = [0.0], initial_norm, math.inf
    for _ in range(steps - 1):
        norm *= 0.95 if norms[-1] > distance else 1.05
        norms.append(norm)
        best = min(best, norm) if norm > distance else best
    return norms, best if best < math.inf else 0.0


@pytest.mark.parametrize(
    "distance, initial_norm", [(0.8, 1.0), (0.3, 0.25), (0.5, 0.5), (0.05, 1.0)]
)
@pytest.mark.parametrize("steps", [2, 3, 10, 60])
def test_ddn_on_a_linear_classifier(distance, initial_norm, steps):
    centre = torch.full((1, 16), 0.5, dtype=torch.float64)
    model = linear_classifier((0.25,) * 16, distance - 2.0)
    norms, best = ddn_norms(distance, initial_norm, steps)
    plain = DDN(1.9, steps, initial_norm=initial_norm)
    for attack in (plain, SmoothedAttack(plain, 0.0)):
        recorder = Recorder(model)
        result = attack(recorder, centre, LABEL)
        close(
            [(point - centre).norm().item() for point in recorder.batches][: len(norms)],
            norms,
        )
        close((result - centre).norm(), best)


# PGD, step by step. As released, it steps at random where the gradient is zero, if it is told to.


@pytest.mark.parametrize(
    "steps, step_size, expected", [(4, None, 0.125), (2, None, 0.25), (4, 0.01, 0.01)]
)
def test_a_step_is_two_epsilon_over_the_number_of_steps_unless_stated(steps, step_size, expected):
    recorder = Recorder(linear_classifier())
    PGD(0.25, steps, step_size=step_size)(recorder, X, LABEL)
    assert len(recorder.batches) == steps
    assert torch.equal(recorder.batches[0], X)
    assert (recorder.batches[1] - X).norm().item() == pytest.approx(expected)


def test_a_gradient_with_a_zero_among_its_numbers_is_not_flat():
    attacked = PGD(0.25, 3, random_if_flat=True)(linear_classifier((3.0, 0.0)), X, LABEL)
    close((attacked - X)[0], (-0.25, 0.0))


EPSILON = 0.05


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def interior(examples: int, *shape: int) -> torch.Tensor:
    """Images so grey that no perturbation of norm EPSILON touches a limit."""
    return 0.3 + 0.4 * torch.rand(examples, *shape, dtype=torch.float64, generator=seeded(7))


def norms(v: torch.Tensor) -> torch.Tensor:
    return v.flatten(1).norm(dim=1)


class HalfFlat(nn.Module):
    """Class 1 for all; confidence depends on ten pixels where the first of them is bright, on none
    elsewhere.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        score = inputs.flatten(1)[:, 0].sub(0.5).relu() * inputs.flatten(1)[:, :10].sum(1)
        return torch.stack([torch.zeros_like(score), 1 + score], dim=1)


def slow_random_walk(x: torch.Tensor, steps: int, epsilon: float, seed: int) -> torch.Tensor:
    """v <- ball(box(v + 2 epsilon / T times a Gaussian vector)), for each example."""
    generator, v = seeded(seed), torch.zeros_like(x)
    for _ in range(steps):
        gaussian = torch.empty_like(x).normal_(generator=generator)
        for b in range(len(x)):
            moved = (x[b] + v[b] + 2 * epsilon / steps * gaussian[b]).clamp(0, 1) - x[b]
            v[b] = moved * min(1.0, epsilon / moved.norm().item())
    return x + v


@pytest.mark.parametrize("epsilon", [EPSILON, 2.0], ids=["interior", "clipped"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_random_step_is_a_gaussian_vector_of_its_own_length(epsilon, steps):
    x = interior(6, 3, 5, 4)
    labels, attack = torch.zeros(6, dtype=torch.int64), PGD(epsilon, steps, random_if_flat=True)
    quick = attack(ConstantClassifier(0, 2), x, labels, generator=seeded(3))
    torch.testing.assert_close(
        quick, slow_random_walk(x, steps, epsilon, seed=3), rtol=0, atol=1e-12
    )
    assert not torch.allclose(quick, slow_random_walk(x, steps, epsilon, seed=4), atol=1e-3)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"targeted": True}, {"step_size": 0.01}, {"random_start": True}], ids=str
)
def test_examples_with_a_gradient_are_attacked_as_without_the_option(steps, options):
    x = interior(12, 3, 4, 4)
    bright = torch.arange(12) % 3 != 0
    x[:, 0, 0, 0] = torch.where(bright, 0.8, 0.2)
    noise = 0.02 * torch.randn(12, 2, 3, 4, 4, dtype=torch.float64, generator=seeded(4))
    plain, random = (
        PGD(EPSILON, steps, random_if_flat=flag, **options)(
            HalfFlat(), x, torch.ones(12, dtype=torch.int64), noise, seeded(8)
        )
        for flag in (False, True)
    )
    assert torch.equal(plain[bright], random[bright])
    assert norms(plain - x)[bright].min() > 0.009
    assert norms(random - plain)[~bright].min() > 0.009
    if "random_start" not in options:
        assert torch.equal(plain[~bright], x[~bright])
