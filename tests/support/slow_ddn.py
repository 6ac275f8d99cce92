"""DDN one example at a time, as its pseudo-code says and with no work saved: what the package's
must equal.

Rony et al., CVPR 2019, on the smoothed classifier (Salman et al., 2019): every iterate gets a pass
and a gradient, whether anything comes of them or not. Nothing of the package under test is used.
"""

import math
from collections import Counter
from collections.abc import Callable

import torch

from support.slow_attacks import slow_plug_in


def majority(logits: torch.Tensor) -> int:
    """The class that most of the copies [m, K] are given; the smallest of those that tie."""
    votes = Counter(logits.argmax(1).tolist())
    most = max(votes.values())
    return min(label for label, count in votes.items() if count == most)


def copies_of(point: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """An example [...] with each of its draws [m, ...]."""
    return torch.stack([point + draw for draw in noise])


def slow_ddn(
    model: Callable,
    x: torch.Tensor,
    label: int,
    noise: torch.Tensor,
    epsilon: float,
    steps: int,
    *,
    initial_norm: float = 1.0,
    gamma: float = 0.05,
    targeted: bool = False,
) -> torch.Tensor:
    """The adversarial example for one x [...] with noise [m, ...]."""
    v, norm = torch.zeros_like(x), initial_norm
    worst = torch.maximum(x, 1 - x).norm().item()
    best, best_norm = torch.zeros_like(x), worst
    for k in range(steps):
        obeyed = majority(model(copies_of(x + v, noise)).detach()) == label
        adversarial = obeyed if targeted else not obeyed
        if adversarial and v.norm().item() < best_norm:
            best, best_norm = v, v.norm().item()
        gradient = slow_plug_in(model, x + v, label, noise)
        step = 0.01 + 0.495 * (1 + math.cos(math.pi * k / max(1, steps - 1)))
        if gradient.norm() > 0:
            v = v + (-1 if targeted else 1) * step * gradient / gradient.norm()
        norm = min(norm * (1 - gamma if adversarial else 1 + gamma), worst)
        if v.norm() > 0:
            v = norm * v / v.norm()
        v = torch.clamp(x + v, 0, 1) - x
    if best.norm() > epsilon:
        best = best * (epsilon / best.norm())
    return x + best


def slow_ddn_batch(
    model: Callable, x: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor, *args, **kwargs
):
    """``slow_ddn`` of each example: [B, ...]"""
    return torch.stack(
        [slow_ddn(model, *example, *args, **kwargs) for example in zip(x, labels.tolist(), noise)]
    )
