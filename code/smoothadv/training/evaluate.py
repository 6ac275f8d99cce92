"""Evaluates the base classifier on test images during training: for the log, not for model
selection.
"""

import math
from dataclasses import dataclass, replace

import torch

from smoothadv.base.settings import Checked, checked_field, positive_int
from smoothadv.datasets import ImageDataset
from smoothadv.noise import Purpose
from smoothadv.objectives import draw_uniforms
from smoothadv.training.update import Address, Update

COLUMNS = (
    "test_loss",
    "test_accuracy",
    "test_clean_accuracy",
    "test_adversarial_accuracy",
    "test_images",
)


@dataclass(frozen=True)
class EvaluationSchedule(Checked):
    """Evaluate after every ``every``-th epoch and the last one, on ``images`` evenly spaced test
    images (None: all).
    """

    every: int = checked_field(positive_int, 1)
    images: int | None = checked_field(positive_int, 1000)

    def is_due(self, epoch: int, epochs: int) -> bool:
        return (epoch + 1) % self.every == 0 or epoch + 1 == epochs

    def chosen(self, available: int) -> torch.Tensor:
        """The indices, int64, of the images to evaluate on."""
        count = min(available, self.images or available)
        return torch.arange(count) * available // count


@torch.no_grad()
def evaluate(
    update: Update, test_set: ImageDataset, indices: torch.Tensor, batch: int, address: Address
) -> dict[str, float]:
    """Loss and accuracy under one draw of noise, without noise, and under noise and the objective's
    attack: COLUMNS.

    That is of the model that ``update`` trains, in the form that is attacked. The attack has its
    full epsilon from the first epoch on; nan where the objective has none. All randomness is a
    function of ``address``.
    """
    objective, processes, device = update.objective, update.processes, update.device
    model, attacked = update.model.eval(), update.attacked_uncompiled
    batches = [(len(whole), *processes.share(whole)) for whole in indices.split(batch)]
    epsilon = objective.full_epsilon
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    numbers = [number for number, (_, local, _) in enumerate(batches) if len(local)]
    shares = test_set.evaluation_batches([batches[number][1] for number in numbers], device)
    for number, (images, labels) in zip(numbers, shares):
        whole, _, part = batches[number]
        generator = address.generator(device, Purpose.EVALUATION, number)
        # Drawn for the whole batch, so that the noise does not depend on how many processes share
        # the batch.
        noise = objective.draw(images[:1].expand(whole, *images.shape[1:]), generator)[part]
        with update.execution.autocast(device):
            supplied = {} if update.teacher is None else update.teacher.supplies(None)
            seen = replace(objective.batch(images, labels, noise, address.epoch), **supplied)
            found = [*objective.tested(model, seen)]
            if epsilon:
                seen = replace(seen, epsilon=epsilon)
                if objective.uniforms:
                    seen = replace(
                        seen, uniforms=draw_uniforms(whole, objective.uniforms, generator)[part]
                    )
                moved = objective.attacked(attacked, seen, generator)
                found.append((model(moved.images + moved.noise[:, 0]).argmax(1) == labels).sum())
        for position, value in enumerate(found):
            sums[position] += value
    means = [round(value / len(indices), 6) for value in processes.total(sums).tolist()]
    if not epsilon:
        means[3] = math.nan
    return dict(zip(COLUMNS, [*means, len(indices)]))


NOT_EVALUATED: dict[str, float] = dict(zip(COLUMNS, [math.nan] * 4 + [0]))
