"""An attack on a cascade of smoothed classifiers, which knows how the cascade decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from smoothadv.attacks.estimators import Model
from smoothadv.attacks.geometry import per_example
from smoothadv.attacks.smoothed_attack import SmoothedAttack


class CascadeAttack:
    """Attacks each stage of a cascade, and keeps of each example the result that makes the cascade
    leave the class most clearly.

    ``attacks`` has the attack on each stage, with the noise of that stage, ``threshold`` is p0 of
    ``statistics.cascade``. It is called as a ``SmoothedAttack``, with the models of all stages.
    """

    def __init__(self, attacks: Sequence[SmoothedAttack], threshold: float) -> None:
        self.attacks, self.threshold = attacks, threshold
        self.attack, self.target = attacks[0].attack, attacks[0].target

    @property
    def batch(self) -> int:
        return min(each.batch for each in self.attacks)

    @property
    def examples_per_pass(self) -> int:
        return self.attacks[0].examples_per_pass

    def watch(self, on_smaller: Callable[[int], None]) -> None:
        """As ``SmoothedAttack.watch``."""
        for each in self.attacks:
            each.watch(on_smaller)

    def choose_targets(
        self,
        models: Sequence[Model],
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """As ``SmoothedAttack``, by the last stage."""
        return self.attacks[-1].choose_targets(models[-1], inputs, labels, indices)

    def __call__(
        self,
        models: Sequence[Model],
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int] | None = None,
        *,
        epsilon: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``SmoothedAttack``."""
        best: torch.Tensor | None = None
        for attack, model in zip(self.attacks, models, strict=True):
            found = attack(model, inputs, labels, indices, epsilon=epsilon, targets=targets)
            lead = self._lead(models, found, labels if targets is None else targets, indices)
            lead = lead if targets is None else -lead
            if best is None:
                best, least = found, lead
            best = torch.where(per_example(lead < least, found), found, best)
            least = torch.minimum(lead, least)
        assert best is not None  # there is a stage
        return best

    def _lead(
        self,
        models: Sequence[Model],
        points: torch.Tensor,
        classes: torch.Tensor,
        indices: Sequence[int] | None,
    ) -> torch.Tensor:
        """By how much the share of votes for a class is above that of any other, float [B], at the
        stage that decides by these shares.
        """
        lead = torch.zeros(len(points), device=points.device)
        is_open = torch.ones_like(classes, dtype=torch.bool)
        for number, (attack, model) in enumerate(zip(self.attacks, models), start=1):
            shares = attack.shares(model, points, classes, indices)
            own = shares.gather(1, classes[:, None])[:, 0]
            rival = shares.scatter(1, classes[:, None], -1.0).amax(1)
            decides = is_open & ((shares.amax(1) > self.threshold) | (number == len(models)))
            lead = torch.where(decides, own - rival, lead)
            is_open = is_open & ~decides
        return lead
