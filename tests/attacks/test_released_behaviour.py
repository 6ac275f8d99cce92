"""Options that repeat what the released attacks did, each against a plain formula; without them
none of it happens.

PGD steps at random where the gradient is zero. DDN starts at norm epsilon, anneals past the last
step, and rounds its iterates and its result to grey levels, which takes the result out of the ball.
"""

import functools

import pytest
import torch
from torch import nn

from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.pgd import PGD
from support.models import ConstantClassifier, linear_classifier
from support.slow_ddn import slow_ddn_batch

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


@functools.cache
def conv_net() -> nn.Module:
    """A random network for which no class is the most likely one over all images: else few were
    near another.
    """
    with torch.random.fork_rng():
        torch.manual_seed(2)
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.Softplus(), nn.Flatten(), nn.Linear(64, 3)
        model = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        model[-1].bias -= model(
            torch.rand(200, 1, 4, 4, dtype=torch.float64, generator=seeded())
        ).mean(0)
    return model


RELEASED = {"quantization_levels": 16, "result_levels": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_perturbation_is_rounded_so_that_inputs_keep_their_own_levels(dtype):
    """As released: x + round(v). Rounding x + v would move every input, also those without an
    adversarial example.
    """
    model, any_levels = (
        linear_classifier(torch.ones(48), -24.0, dtype),
        torch.rand(20, 48, generator=seeded(1)).to(dtype),
    )
    grey = torch.randint(0, 256, (20, 48), generator=seeded(2))
    labels = (
        torch.arange(20) % 2
    )  # half of them are attacked, the others are of another class from the start
    attack = DDN(0.3, 8, initial_norm=0.5, result_levels=256)
    for x in (any_levels, grey.to(dtype) / 255):
        found = attack(model, x, labels)
        moves = (found - x) * 255
        torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4)
        unmoved = (model(x).argmax(1) != labels) & (moves == 0).all(1)
        assert unmoved.any() and (moves != 0).any(1).any()
        assert torch.equal(found[unmoved], x[unmoved])
    assert torch.equal(found, (found * 255).round() / 255), (
        "grey levels become grey levels, to the last bit"
    )
    # What lies 0.6 of a level below white goes to white, and from there by rounding 0.4 beyond.
    bright, towards_white = (
        torch.full((1, 48), 1 - 0.6 / 255, dtype=dtype),
        linear_classifier(torch.ones(48), -47.95, dtype),
    )
    beyond = DDN(1.0, 8, initial_norm=0.1, result_levels=256)(
        towards_white, bright, torch.tensor([0])
    )
    assert beyond.max().item() == pytest.approx(1 + 0.4 / 255, abs=1e-6)


@pytest.mark.parametrize(
    ("seed", "steps", "epsilon", "ours", "theirs"),
    [
        *(
            (3, steps, epsilon, {"initial_norm_is_epsilon": True}, {"initial_norm": epsilon})
            for steps in (2, 6)
            for epsilon in (0.25, 0.4)
        ),
        *(
            (
                *(3, steps, 0.5),
                {"initial_norm": 0.3, "anneal_past_end": True},
                {"initial_norm": 0.3, "annealed_over": steps},
            )
            for steps in (1, 2, 3, 8)
        ),
        *(
            (5, steps, 0.4, {"initial_norm": 0.5, **levels}, {"initial_norm": 0.5, **levels})
            for steps in (1, 2, 8)
            for levels in (RELEASED, {"result_levels": 64}, {"quantization_levels": 16})
        ),
        *(
            (
                *(seed, 6, 0.4),
                {"initial_norm_is_epsilon": True, "anneal_past_end": True, **RELEASED},
                {"initial_norm": 0.4, "annealed_over": 6, **RELEASED},
            )
            for seed in range(3)
        ),
    ],
)
def test_released_ddn_is_that_of_the_pseudo_code(seed, steps, epsilon, ours, theirs):
    """It starts at epsilon, anneals past the end, rounds, and all at once, on five images labelled
    as they are classified.
    """
    model = conv_net()
    x = torch.rand(5, 1, 4, 4, dtype=torch.float64, generator=seeded(seed))
    noise = 0.05 * torch.randn(5, 3, 1, 4, 4, dtype=torch.float64, generator=seeded(seed + 1))
    labels = model(x).argmax(1)
    quick = DDN(epsilon, steps, **ours)(model, x, labels, noise)
    slow = slow_ddn_batch(model, x, labels, noise, epsilon, steps, **theirs)
    torch.testing.assert_close(quick, slow, rtol=0, atol=1e-10)
