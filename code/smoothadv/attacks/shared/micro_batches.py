"""Attacks within a memory budget: gradients over many noisy copies from passes of few, all of one shape.

Kernels may round differently with another shape, and in another row of the same shape (matrix products do, on some
CPUs). Every pass over the model has the same shape, padded where too few copies are left, and each example its place
in it, so that an adversarial example does not depend on which others are attacked beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.attacks.estimators import Estimate, GradientEstimator


def rows_per_pass(copies: int, batch: int) -> int:
    """How many noisy copies go into a pass of at most ``batch``, of examples with ``copies`` of them each.

    Whole examples where at least one fits in; otherwise parts of one that are as equal as can be.
    """
    return batch // copies * copies if copies <= batch else math.ceil(copies / math.ceil(copies / batch))


def places_in_pass(waiting: Mapping[int, int], places: int) -> list[int | None]:
    """Which row of those that wait, {row: index of the example}, goes into each place of a pass.

    The first in line of those whose index has that place; None where there is none.
    """
    placed: dict[int, int] = {}
    for row, index in waiting.items():
        placed.setdefault(_place(int(index), places), row)
    return [placed.get(place) for place in range(places)]


def _place(index: int, places: int) -> int:
    """A place from 0 to ``places`` - 1, which indices with any common difference fill evenly.

    The fractional part of index / golden ratio, in 64 bits (Knuth, The Art of Computer Programming, section 6.4).
    """
    return (index * 0x9E3779B97F4A7C15 % 2**64) * places >> 64


class FixedShape(nn.Module):
    """The function of ``model``, which only ever sees batches of ``rows`` inputs: others are split and padded.

    ValueError where it gives logits of fewer than ``classes`` classes.
    """

    def __init__(self, model: Callable, rows: int, classes: int = 1) -> None:
        super().__init__()
        self.model, self.rows, self.classes = model, rows, classes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._padded(part) for part in inputs.split(self.rows)])

    def _padded(self, part: torch.Tensor) -> torch.Tensor:
        # Contiguous, whatever the inputs were: another memory format may choose other kernels.
        missing = self.rows - len(part)
        if missing:
            part = torch.cat([part, part[:1].detach().expand(missing, *part.shape[1:])])
        logits = self.model(part.contiguous())
        if logits.shape[-1] < self.classes:
            raise ValueError(f"there is no class {self.classes - 1} among {logits.shape[-1]}")
        return logits[: self.rows - missing]


@dataclass(frozen=True)
class InParts:
    """The estimate of ``estimator``, computed from at most ``rows`` noisy copies of each example at a time."""

    estimator: GradientEstimator
    rows: int

    def __call__(self, model: Callable, points: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor) -> Estimate:
        parts = [self.estimator(model, points, labels, part) for part in noise.split(self.rows, dim=1)]
        return parts[0] if len(parts) == 1 else combined(parts)


def combined(parts: list[Estimate]) -> Estimate:
    """The estimate over all copies from those over disjoint parts of them."""
    log_weights = torch.stack([_log_weight(part) for part in parts])
    weights = torch.softmax(log_weights, dim=0)
    gradients = torch.stack([part.gradient for part in parts])
    gradient = (weights.reshape(*weights.shape, *[1] * (gradients.dim() - 2)) * gradients).sum(0)
    logits = torch.cat([part.logits for part in parts], dim=1)
    return Estimate(gradient, logits, torch.logsumexp(log_weights, dim=0))


def _log_weight(part: Estimate) -> torch.Tensor:
    if part.log_weight is not None:
        return part.log_weight
    examples, copies = part.logits.shape[:2]
    return torch.full((examples,), math.log(copies), dtype=part.gradient.dtype, device=part.gradient.device)
