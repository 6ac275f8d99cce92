"""Sums over the examples of a training run, on the device: reading them makes the device wait, so it is done rarely."""

import math

import torch

from smoothadv.objectives import Outcome


def no_sums(device: torch.device) -> torch.Tensor:
    """The sums over no examples, float64 [5]: the loss, and how many were correct, of how many; then before the attack.

    An accelerator adds to them without waiting: ``sums += sums_of(outcome)``.
    """
    return torch.zeros(5, dtype=torch.float64, device=device)


def sums_of(outcome: Outcome) -> torch.Tensor:
    """The sums over the examples of one outcome: as ``no_sums``."""
    sums = no_sums(outcome.loss.device)
    sums[0] = outcome.loss.detach().double() * outcome.examples
    sums[1] = outcome.correct
    # Not assigned: that would copy a number from the host, and wait.
    sums[2].add_(outcome.examples)
    sums[4].add_(outcome.unattacked_examples)
    if outcome.unattacked_correct is not None:
        sums[3] = outcome.unattacked_correct
    return sums


def means(sums: list[float]) -> dict[str, float]:
    """Loss, accuracy and accuracy before the attack as means over examples; nan where there are none."""
    loss, correct, examples, *unattacked = sums
    ratios = {"loss": (loss, examples), "accuracy": (correct, examples), "unattacked_accuracy": unattacked}
    return {name: part / whole if whole else math.nan for name, (part, whole) in ratios.items()}
