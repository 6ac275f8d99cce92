"""Estimators on single draws and in parts of the copies, the batches that a model sees, and the
state of an attacked model; then attacks and estimators on classifiers whose answers are known, to
1e-6 and better.

The expected loss is the mean over copies of -log p (Cohen et al., 2019, appendix G.3), not the loss
of the expectation, -log of the mean of p (SmoothAdv, eq. 6): the checks tell them apart. beta is an
inverse temperature (its appendix B).
"""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smoothadv.architectures.logits import frozen
from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import (
    PlugIn,
    Stein,
    plug_in,
    smoothed_loss,
    stein_gradient,
)
from smoothadv.attacks.geometry import unit
from smoothadv.attacks.micro_batches import InParts, places_in_pass, rows_per_pass
from smoothadv.attacks.pgd import PGD
from smoothadv.base.settings import settings_record
from support.models import (
    DISTANCE,
    MARGIN,
    POINT,
    WEIGHT,
    ConstantClassifier,
    Recorder,
    linear_classifier,
    network_with_state,
    probit_classifier,
)
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
            attack(0.5, 4, estimator=estimator), 0.3, 6, restarts=2, target=target, batch=4
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
        for number, size in enumerate(list(itertools.product([1, 3, 5], [1, 2, 8, 17])))
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
