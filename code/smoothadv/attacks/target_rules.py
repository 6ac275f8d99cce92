"""Rules that choose the class at which a targeted attack aims."""

from collections.abc import Callable, Sequence

import torch

TargetRule = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Generator]], torch.Tensor]
"""Probabilities [B, K], labels int64 [B] and a generator for each example give the targets, int64 [B]."""


def _random(probabilities: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """A class other than the label, uniformly distributed, from the generator of each example."""
    classes = probabilities.shape[1]
    shifts = [int(torch.randint(1, classes, (1,), generator=generator, device="cpu")) for generator in generators]
    return (labels + torch.tensor(shifts, device=labels.device)) % classes


TARGET_RULES: dict[str, TargetRule] = {  # the most and the least probable class other than the label, or any such class
    "runner-up": lambda probabilities, labels, _: probabilities.scatter(1, labels[:, None], -1.0).argmax(1),
    "least-likely": lambda probabilities, labels, _: probabilities.scatter(1, labels[:, None], 2.0).argmin(1),
    "random": _random,
}
EVERY = "every"
"""Aim at each class in turn, and keep the attack after which the label is least probable."""
KNOWN_TARGETS = (*TARGET_RULES, EVERY)
