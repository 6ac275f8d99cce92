"""What an objective makes of a given batch."""

from torch import nn

from smoothadv.objectives import Batch, FirstLogits, Objective, Outcome


def outcome_of(
    objective: Objective, model: nn.Module, batch: Batch, attacked: nn.Module | None = None
) -> Outcome:
    """Attack the batch, with ``attacked`` in place of the model, and the loss of the result."""
    attacked = model if attacked is None else attacked
    with FirstLogits(attacked) as first:
        moved = objective.attacked(attacked, batch)
    return first.counted_in(objective.loss(model, batch, moved), batch.labels)
