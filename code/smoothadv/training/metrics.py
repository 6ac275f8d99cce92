"""Sums over the examples of a training run, on the device: reading them makes the device wait, so it is done rarely."""

from __future__ import annotations

import torch

from smoothadv.objectives import Outcome

_FIELDS = ("loss", "correct", "examples", "unattacked_correct", "unattacked_examples")


class OutcomeSums:
    """Sums over the examples of outcomes: the loss, how many were correct, and how many were before the attack."""

    def __init__(self, device: torch.device, sums: list[float] | None = None) -> None:
        self._sums = torch.zeros(len(_FIELDS), dtype=torch.float64, device=device)
        if sums is not None:
            self._sums += torch.tensor(sums, dtype=torch.float64, device=device)

    def add(self, outcome: Outcome) -> None:
        """Add one outcome."""
        loss = outcome.loss.detach().double() * outcome.examples
        before = torch.zeros_like(loss) if outcome.unattacked_correct is None else outcome.unattacked_correct.double()
        counts = (float(outcome.examples), float(outcome.unattacked_examples))
        self._sums[0] += loss
        self._sums[1] += outcome.correct
        self._sums[2] += counts[0]
        self._sums[3] += before
        self._sums[4] += counts[1]

    def merge(self, other: OutcomeSums) -> None:
        """Add the sums of another."""
        self._sums += other._sums

    @property
    def tensor(self) -> torch.Tensor:
        """The sums, float64 [5], on the device."""
        return self._sums

    def is_finite(self) -> torch.Tensor:
        """Whether the sum of losses is finite, as a bool tensor on the device."""
        return self._sums[0].isfinite()


def means(sums: list[float]) -> dict[str, float]:
    """Loss, accuracy and accuracy before the attack as means over examples; nan where there are none."""
    total = dict(zip(_FIELDS, sums))

    def ratio(numerator: str, denominator: str) -> float:
        return total[numerator] / total[denominator] if total[denominator] else float("nan")

    return {
        "loss": ratio("loss", "examples"),
        "accuracy": ratio("correct", "examples"),
        "unattacked_accuracy": ratio("unattacked_correct", "unattacked_examples"),
    }
