"""Which class a targeted attack wants, where it is told by a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TargetRule = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Generator]], torch.Tensor]


def runner_up(probabilities: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """The most probable class but the label: probabilities [B, K] and labels [B] give int64 [B]."""
    return probabilities.scatter(1, labels[:, None], -1.0).argmax(1)


def least_likely(
    probabilities: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """The least probable class but the label."""
    return probabilities.scatter(1, labels[:, None], 2.0).argmin(1)


def random_class(
    probabilities: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """Any class but the label, equally probably, from each example's own generator."""
    classes = probabilities.shape[1]
    shifts = [int(torch.randint(1, classes, (1,), generator=generator, device="cpu")) for generator in generators]
    return (labels + torch.tensor(shifts, device=labels.device)) % classes


TARGET_RULES: dict[str, TargetRule] = {
    "runner-up": runner_up,
    "least-likely": least_likely,
    "random": random_class,
}
EVERY = "every"
"""Each class in turn: the attack that goes furthest from the label is kept."""
KNOWN_TARGETS = (*TARGET_RULES, EVERY)
