"""What an objective makes of a given batch."""

from torch import nn

from smoothadv.objectives import Batch, BatchLoss, Objective, first_logits


def outcome_of(
    objective: Objective, model: nn.Module, batch: Batch, attacked: nn.Module | None = None
) -> BatchLoss:
    """Attack the batch, with ``attacked`` in place of the model, and the loss of the result."""
    attacked = model if attacked is None else attacked
    with first_logits(attacked) as first:
        moved = objective.attacked(attacked, batch)
    return objective.loss(model, batch, moved).before_attack(first, batch.labels)
