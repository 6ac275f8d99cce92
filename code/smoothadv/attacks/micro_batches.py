"""Attacks within a memory budget: gradients over many noisy copies, from passes over a few, all of
one shape.

Kernels may round differently for another shape, and in another row of the same shape (matrix
products do, on some CPUs). Therefore all passes over the model have the same shape, padded where
too few copies are left, and each example has a fixed place in its pass: an adversarial example does
not depend on the examples that are attacked beside it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.architectures.logits import explained, logits_in
from smoothadv.attacks.estimators import Estimate, GradientEstimator, Model


def rows_per_pass(copies: int, batch: int) -> int:
    """The number of noisy copies in a pass: at most ``batch``, of examples with ``copies`` each.

    A pass holds whole examples where at least one fits; otherwise a part of one example, of parts
    as equal as possible.
    """
    return (
        batch // copies * copies
        if copies <= batch
        else math.ceil(copies / math.ceil(copies / batch))
    )


def places_in_pass(waiting: Mapping[int, int], places: int) -> list[int | None]:
    """For each place of a pass, a row of ``waiting``, which is {row: index of the example}.

    It is the first row whose index has that place; None where there is no such row. Indices with
    any common difference are spread evenly over the places, by the fractional part of index /
    golden ratio, in 64 bits (Knuth, The Art of Computer Programming, section 6.4).
    """
    placed: dict[int, int] = {}
    for row, index in waiting.items():
        place = (int(index) * 0x9E3779B97F4A7C15 % 2**64) * places >> 64
        placed.setdefault(place, row)
    return [placed.get(place) for place in range(places)]


class FixedShape(nn.Module):
    """Computes ``model`` in batches of exactly ``rows`` inputs: splits larger batches and pads
    smaller ones.

    ValueError where the model has fewer than ``classes`` classes.
    """

    def __init__(self, model: Model, rows: int, classes: int = 1) -> None:
        super().__init__()
        self.model, self.rows, self.classes = model, rows, classes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._padded(part) for part in inputs.split(self.rows)])

    def _padded(self, part: torch.Tensor) -> torch.Tensor:
        # Always contiguous, since for another memory format other kernels may be chosen; copies,
        # since the model may overwrite its input, and return one memory in every pass.
        missing = self.rows - len(part)
        if missing:
            part = torch.cat([part, part[:1].detach().expand(missing, *part.shape[1:])])
        with explained(self.model, part[0].detach()):
            logits = logits_in(self.model(part.clone(memory_format=torch.contiguous_format)))
        if logits.shape[-1] < self.classes:
            raise ValueError(f"there is no class {self.classes - 1} among {logits.shape[-1]}")
        return logits[: self.rows - missing].clone()


@dataclass(frozen=True)
class InParts:
    """The estimate of ``estimator``, from passes over at most ``rows`` noisy copies of each
    example.
    """

    estimator: GradientEstimator
    rows: int

    def __call__(
        self, model: Model, points: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> Estimate:
        parts = [
            self.estimator(model, points, labels, part) for part in noise.split(self.rows, dim=1)
        ]
        return parts[0] if len(parts) == 1 else combined(parts)


def combined(parts: list[Estimate]) -> Estimate:
    """The estimate over all copies, from the estimates over disjoint parts of them."""
    log_weights = torch.stack(
        [
            torch.full_like(part.gradient.flatten(1)[:, 0], math.log(part.logits.shape[1]))
            if part.log_weight is None
            else part.log_weight()
            for part in parts
        ]
    )
    weights = torch.softmax(log_weights, dim=0).to(parts[0].gradient.dtype)
    gradients = torch.stack([part.gradient for part in parts])
    gradient = (weights.reshape(*weights.shape, *[1] * (gradients.dim() - 2)) * gradients).sum(0)
    logits = torch.cat([part.logits for part in parts], dim=1)
    return Estimate(gradient, logits, lambda: torch.logsumexp(log_weights, dim=0))
