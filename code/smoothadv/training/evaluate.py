"""How the base classifier does on some of the test images while it is trained: for the log, not for selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.datasets.images import ImageDataset
from smoothadv.noise import Purpose
from smoothadv.objectives import Objective
from smoothadv.training.processes import Processes
from smoothadv.training.update import Address

COLUMNS = ("test_loss", "test_accuracy", "test_clean_accuracy", "test_adversarial_accuracy", "test_images")


@dataclass(frozen=True)
class Evaluation:
    """Look after every ``every``-th epoch and the last one, on ``images`` test images, evenly spaced (None: on all)."""

    every: int = 1
    images: int | None = 1000

    def is_due(self, epoch: int, epochs: int) -> bool:
        return (epoch + 1) % self.every == 0 or epoch + 1 == epochs

    def chosen(self, available: int) -> torch.Tensor:
        """Indices int64 of the images."""
        count = min(available, self.images or available)
        return torch.arange(count) * available // count


@torch.no_grad()
def evaluate(
    model: nn.Module,
    attacked: Callable,
    objective: Objective,
    test_set: ImageDataset,
    indices: torch.Tensor,
    batch: int,
    address: Address,
    processes: Processes,
    device: torch.device,
    precision: AbstractContextManager,
) -> dict[str, float]:
    """Loss and accuracy under one draw of noise, without noise, and under noise and the objective's attack: COLUMNS.

    The attack has its full epsilon from the first epoch on; nan where there is none. ``attacked`` gives the attack's
    logits. All randomness is a function of ``address``. Everything runs within the context ``precision``.
    """
    model.eval()
    batches = [(len(whole), *processes.share(whole)) for whole in indices.split(batch)]
    epsilon = objective.full_epsilon
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    numbers = [number for number, (_, own, _) in enumerate(batches) if len(own)]
    shares = test_set.evaluation_batches([batches[number][1] for number in numbers], device)
    for number, (images, labels) in zip(numbers, shares):
        whole, _, part = batches[number]
        generator = address.generator(device, Purpose.EVALUATION, number)
        # That of the whole batch: it does not depend on how many processes share it.
        noise = objective.draw(images[:1].expand(whole, *images.shape[1:]), generator)[part]
        with precision:
            noisy = model(images + noise[:, 0]).float()
            hits = [noisy, model(images)]
            if epsilon:
                adversarial = objective.adversarial(attacked, images, labels, noise, epsilon, generator)
                hits.append(model(adversarial + noise[:, 0]))
        sums[0] += F.cross_entropy(noisy, labels, reduction="sum")
        for position, logits in enumerate(hits, start=1):
            sums[position] += (logits.argmax(1) == labels).sum()
    means = [round(value / len(indices), 6) for value in processes.total(sums).tolist()]
    if not epsilon:
        means[3] = math.nan
    return dict(zip(COLUMNS, [*means, len(indices)]))


NOT_EVALUATED = dict(zip(COLUMNS, [math.nan] * 4 + [0]))
