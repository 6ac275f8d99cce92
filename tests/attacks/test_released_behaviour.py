"""Options that repeat what the released attacks did, each against a plain formula; without them none of it happens.

PGD steps at random where the gradient is zero. DDN starts at norm epsilon, anneals past the last step, and rounds its
iterates and its result to grey levels, which takes the result out of the ball.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import nn

from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Estimate
from smoothadv.attacks.pgd import PGD
from support.models import ConstantClassifier, Recorder, linear_classifier
from support.slow_ddn import slow_ddn_batch
from support.statistical_checks import are_means, is_binomial_count

EPSILON = 0.05
GREY = 128 / 255


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def interior(examples: int, *shape: int) -> torch.Tensor:
    """Images so grey that no perturbation of norm EPSILON touches a limit."""
    return 0.3 + 0.4 * torch.rand(examples, *shape, dtype=torch.float64, generator=seeded(7))


def norms(v: torch.Tensor) -> torch.Tensor:
    return v.flatten(1).norm(dim=1)


class HalfFlat(nn.Module):
    """Class 1 for all; confidence depends on ten pixels where the first of them is bright, on none elsewhere."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        score = inputs.flatten(1)[:, 0].sub(0.5).relu() * inputs.flatten(1)[:, :10].sum(1)
        return torch.stack([torch.zeros_like(score), 1 + score], dim=1)


def attacked_at_random(steps: int, seed: int, x: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    attack = PGD(epsilon, steps, random_if_flat=True)
    labels = torch.zeros(len(x), dtype=torch.int64)
    return attack(ConstantClassifier(0, 2), x, labels, generator=seeded(seed))


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("shape", [(3, 8, 8), (192,)], ids=str)
def test_flat_gradient_moves_to_a_random_point_of_the_sphere(steps, shape):
    x = interior(12, *shape)
    v = attacked_at_random(steps, 1, x) - x
    torch.testing.assert_close(norms(v), torch.full((12,), EPSILON, dtype=torch.float64))
    cosines = torch.corrcoef(v.flatten(1)) - torch.eye(12)
    assert cosines.abs().max() < 0.5, "each example has its own direction: 0.5 is 7 standard errors"


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
    quick = attacked_at_random(steps, 3, x, epsilon)
    torch.testing.assert_close(quick, slow_random_walk(x, steps, epsilon, seed=3), rtol=0, atol=1e-12)
    assert not torch.allclose(quick, slow_random_walk(x, steps, epsilon, seed=4), atol=1e-3)


def test_random_steps_have_no_preferred_direction():
    # Coordinates on the sphere have mean 0 and mean square epsilon^2 / d: a false alarm in 2 of a million seeds.
    x = torch.full((3_000, 48), 0.5, dtype=torch.float64)
    v = (attacked_at_random(1, 2, x, EPSILON) - x).numpy() / EPSILON
    assert are_means(v, 0.0) and are_means(v**2, 1 / 48)
    # The controls: a drift of a tenth of a standard deviation, and one coordinate that is a fifth longer.
    assert not are_means(v + 0.1 / math.sqrt(48), 0.0)
    v[:, 5] *= 1.2
    assert not are_means(v**2, 1 / 48)


def test_random_steps_come_from_the_generator():
    x = interior(4, 3, 4, 4)
    torch.manual_seed(0)
    first = attacked_at_random(3, 5, x)
    torch.manual_seed(1)
    assert torch.equal(attacked_at_random(3, 5, x), first)
    assert not torch.equal(attacked_at_random(3, 6, x), first)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("options", [{}, {"targeted": True}, {"step_size": 0.01}, {"random_start": True}], ids=str)
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


@functools.cache
def conv_net() -> nn.Module:
    """A random network for which no class is the most likely one over all images: else few were near another."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.Softplus(), nn.Flatten(), nn.Linear(64, 3)
        model = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        model[-1].bias -= model(torch.rand(200, 1, 4, 4, dtype=torch.float64, generator=seeded())).mean(0)
    return model


def ddn_and_slow(seed: int, steps: int, epsilon: float, ours: dict, theirs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """What DDN returns and what the slow one does, on five images labelled as they are classified."""
    model = conv_net()
    x = torch.rand(5, 1, 4, 4, dtype=torch.float64, generator=seeded(seed))
    noise = 0.05 * torch.randn(5, 3, 1, 4, 4, dtype=torch.float64, generator=seeded(seed + 1))
    labels = model(x).argmax(1)
    quick = DDN(epsilon, steps, **ours)(model, x, labels, noise)
    return quick, slow_ddn_batch(model, x, labels, noise, epsilon, steps, **theirs)


@pytest.mark.parametrize("initial_norm", [0.1, 1.0])
@pytest.mark.parametrize("epsilon", [0.05, 0.3])
def test_ddn_that_starts_at_epsilon_has_a_first_iterate_of_that_norm(epsilon, initial_norm):
    x, recorder = torch.full((1, 16), 0.5, dtype=torch.float64), Recorder(linear_classifier((1.0,) * 16, 0.0))
    DDN(epsilon, 3, initial_norm=initial_norm, initial_norm_is_epsilon=True)(recorder, x, torch.tensor([1]))
    assert norms(recorder.batches[1] - x).item() == pytest.approx(epsilon * 1.05, rel=1e-12)
    DDN(epsilon, 3, initial_norm=initial_norm)(recorder, x, torch.tensor([1]))
    assert norms(recorder.batches[-2] - x).item() == pytest.approx(initial_norm * 1.05, rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.25, 0.4])
@pytest.mark.parametrize("steps", [2, 6])
def test_ddn_that_starts_at_epsilon_is_ddn_of_that_initial_norm(epsilon, steps):
    quick, slow = ddn_and_slow(3, steps, epsilon, {"initial_norm_is_epsilon": True}, {"initial_norm": epsilon})
    torch.testing.assert_close(quick, slow, rtol=0, atol=1e-10)


class EachStepAnotherPixel:
    """An estimator whose k-th gradient points along pixel k, so that the pixels tell how long each step was."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model, points, labels, noise) -> Estimate:
        gradient = torch.zeros_like(points)
        gradient[:, self.calls] = 3.0
        self.calls += 1
        return Estimate(gradient, model(points).unsqueeze(1))


def step_lengths(steps: int, **options) -> list[float]:
    """The lengths of DDN's steps, from its last iterate, which is a multiple of a sum of them."""
    x = torch.full((1, 16), 0.5, dtype=torch.float64)
    recorder = Recorder(linear_classifier(torch.zeros(16), 1.0))
    # A norm that grows by next to nothing, and stays far below 0.5: each rescaling is known.
    attack = DDN(2.0, steps, estimator=EachStepAnotherPixel(), initial_norm=0.25, gamma=1e-9, **options)
    attack(recorder, x, torch.tensor([1]))
    lengths = []
    for k, (before, after) in enumerate(zip(recorder.batches, recorder.batches[1:])):
        before, after = before[0] - 0.5, after[0] - 0.5
        # after is (before + step e_k) scaled to the norm: the ratio of pixel k to those before tells the step.
        lengths.append(after[k].item() / after[:k].norm().item() * before.norm().item() if k else 1.0)
    return lengths


@pytest.mark.parametrize("steps", [2, 3, 5, 10])
def test_steps_annealed_past_the_end_are_a_cosine_over_one_more(steps):
    def cosine(last: int) -> list[float]:
        return [0.01 + 0.495 * (1 + math.cos(math.pi * k / last)) for k in range(steps)]

    assert step_lengths(steps, anneal_past_end=True) == pytest.approx(cosine(steps)[:-1], rel=1e-6)
    assert step_lengths(steps, anneal_past_end=True, evaluate_last=True) == pytest.approx(cosine(steps), rel=1e-6)
    assert step_lengths(steps, evaluate_last=True) == pytest.approx(cosine(steps - 1), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("evaluate_last", [False, True], ids=["", "last"])
def test_ddn_annealed_past_the_end_is_that_of_the_pseudo_code(steps, evaluate_last):
    shared = {"initial_norm": 0.3, "evaluate_last": evaluate_last}
    quick, slow = ddn_and_slow(3, steps, 0.5, {"anneal_past_end": True, **shared}, {"annealed_over": steps, **shared})
    torch.testing.assert_close(quick, slow, rtol=0, atol=1e-10)
    default, _ = ddn_and_slow(3, steps, 0.5, shared, shared)
    # It makes no difference where only the first step, of length 1 in both, is looked at.
    assert torch.allclose(quick, default, atol=1e-9) == (steps + evaluate_last <= 2)


RELEASED = {"quantization_levels": 16, "result_levels": 16}


@pytest.mark.parametrize("levels", [RELEASED, {"result_levels": 64}, {"quantization_levels": 16}], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 8])
def test_rounded_ddn_is_that_of_the_pseudo_code(levels, steps):
    shared = {"initial_norm": 0.5, **levels}
    quick, slow = ddn_and_slow(5, steps, 0.4, shared, shared)
    torch.testing.assert_close(quick, slow, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_perturbation_is_rounded_so_that_inputs_keep_their_own_levels(dtype):
    """As released: x + round(v). Rounding x + v would move every input, also those without an adversarial example."""
    model, any_levels = (
        linear_classifier(torch.ones(48), -24.0, dtype),
        torch.rand(20, 48, generator=seeded(1)).to(dtype),
    )
    grey = torch.randint(0, 256, (20, 48), generator=seeded(2))
    labels = torch.arange(20) % 2  # half of them are attacked, the others are of another class from the start
    attack = DDN(0.3, 8, initial_norm=0.5, result_levels=256)
    for x in (any_levels, grey.to(dtype) / 255):
        found = attack(model, x, labels)
        moves = (found - x) * 255
        torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4)
        unmoved = (model(x).argmax(1) != labels) & (moves == 0).all(1)
        assert unmoved.any() and (moves != 0).any(1).any()
        assert torch.equal(found[unmoved], x[unmoved])
    assert torch.equal(found, (found * 255).round() / 255), "grey levels become grey levels, to the last bit"
    # What lies 0.6 of a level below white goes to white, and from there by rounding 0.4 beyond.
    bright, towards_white = (
        torch.full((1, 48), 1 - 0.6 / 255, dtype=dtype),
        linear_classifier(torch.ones(48), -47.95, dtype),
    )
    beyond = DDN(1.0, 8, initial_norm=0.1, result_levels=256)(towards_white, bright, torch.tensor([0]))
    assert beyond.max().item() == pytest.approx(1 + 0.4 / 255, abs=1e-6)


def test_everything_released_at_once_is_that_of_the_pseudo_code():
    ours = {"initial_norm_is_epsilon": True, "anneal_past_end": True, **RELEASED}
    for seed in range(3):
        quick, slow = ddn_and_slow(seed, 6, 0.4, ours, {"initial_norm": 0.4, "annealed_over": 6, **RELEASED})
        torch.testing.assert_close(quick, slow, rtol=0, atol=1e-10)


def moved_along_gaussians(examples: int, epsilon: float, **options) -> torch.Tensor:
    """The perturbations [N, 3072] of DDN where every move is adversarial and the gradient is a Gaussian vector."""
    x = torch.full((examples, 3_072), GREY, dtype=torch.float64)
    gradient = torch.randn(x.shape, dtype=torch.float64, generator=seeded(11))

    def model(points: torch.Tensor) -> torch.Tensor:
        moved = ((points - GREY).abs().flatten(1).amax(1) > 1e-9).double()
        return torch.stack([moved, 1 - moved], dim=1)

    def estimator(model, points, labels, noise) -> Estimate:
        return Estimate(gradient, model(points).unsqueeze(1))

    attack = DDN(epsilon, 2, estimator=estimator, **options)
    return attack(model, x, torch.ones(examples, dtype=torch.int64)) - x


def test_rounded_result_leaves_the_known_share_of_pixels_as_they_were():
    # A coordinate of a Gaussian direction of norm epsilon is below half of one of 255 steps with probability
    # 2 Phi(sqrt(d) / (510 epsilon)) - 1. A false alarm in one of a million seeds.
    share = 2 * norm.cdf(math.sqrt(3_072) / (510 * 0.25)) - 1
    assert share == pytest.approx(0.3362, abs=5e-5)
    v = moved_along_gaussians(130, 0.25, result_levels=256)
    untouched = int((v.abs() < 1e-9).sum())
    assert is_binomial_count(untouched, v.numel(), share)
    # The control: a twentieth longer, as if the result were rounded before its projection to the ball.
    longer = moved_along_gaussians(130, 0.25 * 1.05, result_levels=256)
    assert not is_binomial_count(int((longer.abs() < 1e-9).sum()), v.numel(), share)
    # Rounding adds 1/12 of a squared grey level to each coordinate: the result is outside the ball, all of them.
    assert norms(v).mean().item() == pytest.approx(math.hypot(0.25, math.sqrt(3_072 / 12) / 255), rel=2e-3)
    assert norms(v).min() > 0.25 * (1 + 1e-3)


def test_rounding_twice_takes_the_result_farther_out():
    v = moved_along_gaussians(50, 0.25, initial_norm_is_epsilon=True, quantization_levels=256, result_levels=256)
    # The iterate of norm 1.05 epsilon is rounded; scaled down to epsilon, it is rounded to the same grey levels again.
    assert norms(v).mean().item() == pytest.approx(math.hypot(0.25 * 1.05, math.sqrt(3_072 / 12) / 255), rel=2e-3)
    once = moved_along_gaussians(50, 0.25, initial_norm_is_epsilon=True, quantization_levels=256)
    assert norms(once).max() <= 0.25 * (1 + 1e-12)


def test_result_is_outside_the_ball_only_if_it_is_rounded():
    # 0.6 of a grey level for each of 48 pixels: rounded, it is a whole one.
    x = torch.full((1, 48), GREY, dtype=torch.float64)
    epsilon = 0.6 / 255 * math.sqrt(48)
    model, label = linear_classifier((1.0,) * 48, -48 * GREY + 1e-9), torch.tensor([1])
    for levels, expected in [(None, epsilon), (256, epsilon / 0.6)]:
        moved = DDN(epsilon, 2, result_levels=levels)(model, x, label) - x
        assert norms(moved).item() == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 5),
    epsilon=st.floats(1e-3, 3.0),
    levels=st.sampled_from([None, 2, 16, 256]),
    flags=st.fixed_dictionaries({name: st.booleans() for name in ("initial_norm_is_epsilon", "anneal_past_end")}),
)
def test_without_rounding_its_result_ddn_never_leaves_the_ball_nor_the_box(seed, steps, epsilon, levels, flags):
    x = torch.rand(4, 1, 4, 4, dtype=torch.float64, generator=seeded(seed)).round(decimals=1)
    labels = torch.arange(4) % 3
    result = DDN(epsilon, steps, quantization_levels=levels, **flags)(conv_net(), x, labels)
    assert norms(result - x).max() <= epsilon * (1 + 1e-12)
    assert 0 <= result.min() and result.max() <= 1
