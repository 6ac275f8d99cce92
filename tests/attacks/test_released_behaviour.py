"""An option repeats what the released PGD did, against a plain formula: it steps at random where
the gradient is zero. Without the option it does not.
"""

import pytest
import torch
from torch import nn

from smoothadv.attacks.pgd import PGD
from support.models import ConstantClassifier

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
