"""What a training run counts, on the device: reading makes the device wait, and is done now and then."""

from __future__ import annotations

import torch

from smoothadv.objectives import Outcome

_FIELDS = ("loss", "correct", "examples", "unattacked_correct", "unattacked_examples")


class Tally:
    """Sums over examples: of the loss, of those classified correctly, and the same before the attack."""

    def __init__(self, device: torch.device, sums: list[float] | None = None) -> None:
        self._sums = torch.zeros(len(_FIELDS), dtype=torch.float64, device=device)
        if sums is not None:
            self._sums += torch.tensor(sums, dtype=torch.float64, device=device)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        loss = outcome.loss.detach().double() * outcome.examples
        before = torch.zeros_like(loss) if outcome.unattacked_correct is None else outcome.unattacked_correct.double()
        counts = (float(outcome.examples), float(outcome.unattacked_examples))
        self._sums[0] += loss
        self._sums[1] += outcome.correct
        self._sums[2] += counts[0]
        self._sums[3] += before
        self._sums[4] += counts[1]

    def merge(self, other: Tally) -> None:
        """Count what another has counted."""
        self._sums += other._sums

    @property
    def sums(self) -> torch.Tensor:
        """The sums, float64 [5], on the device."""
        return self._sums

    def is_finite(self) -> torch.Tensor:
        """Whether the sum of losses is, as a bool on the device."""
        return self._sums[0].isfinite()


def means(sums: list[float]) -> dict[str, float]:
    """Loss, accuracy and accuracy before the attack as means over examples; nan where there were none."""
    total = dict(zip(_FIELDS, sums))

    def ratio(above: str, below: str) -> float:
        return total[above] / total[below] if total[below] else float("nan")

    return {
        "loss": ratio("loss", "examples"),
        "accuracy": ratio("correct", "examples"),
        "unattacked_accuracy": ratio("unattacked_correct", "unattacked_examples"),
    }
