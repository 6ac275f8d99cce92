"""Attacks on one or several smoothed classifiers, which know how a cascade or a router decides by
them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from smoothadv.attacks.estimators import Model
from smoothadv.attacks.smoothed_attack import Examples, SmoothedAttack, best_of


@dataclass(frozen=True)
class StagedAttack:
    """Attacks each stage, and keeps of each example the result that makes the stage that decides
    leave the class most clearly.

    ``attacks`` has the attack on each classifier, with its noise: the stages of a cascade of which
    ``threshold`` is p0 (``statistics.cascade``); with ``routes`` the stages of a router
    (``statistics.router``) and last the router, which is attacked, too, so that it chooses each of
    them. A single classifier is a cascade of one stage. It is called as a ``SmoothedAttack``, with
    the models of all.
    """

    attacks: Sequence[SmoothedAttack]
    threshold: float = 0.0
    routes: bool = False

    @property
    def stages(self) -> Sequence[SmoothedAttack]:
        """The attacks on the stages."""
        return self.attacks[:-1] if self.routes else self.attacks

    @property
    def batch(self) -> int:
        return min(each.batch for each in self.attacks)

    @property
    def examples_per_pass(self) -> int:
        return self.attacks[0].examples_per_pass

    def watch(self, on_smaller: Callable[[int], None]) -> None:
        """Call ``on_smaller`` with the new batch of an attack that had to halve it."""
        for each in self.attacks:
            each.on_smaller_batch = on_smaller

    def choose_targets(
        self,
        models: Sequence[Model],
        inputs: torch.Tensor,
        labels: torch.Tensor,
        indices: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """As ``SmoothedAttack``, by the last stage."""
        last = len(self.stages) - 1
        return self.attacks[last].choose_targets(models[last], inputs, labels, indices)

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
        given = Examples(inputs, labels, indices, epsilon, targets)
        found = [*self._candidates(models, given)]
        if len(found) == 1 or len(inputs) == 0:
            return found[0]
        leads = [self.lead(models, replace(given, inputs=each)) for each in found]
        return best_of(found, [-lead for lead in leads] if targets is None else leads)

    def _candidates(self, models: Sequence[Model], given: Examples) -> Iterator[torch.Tensor]:
        """Adversarial inputs, as the inputs, from which the best is taken."""
        for attack, model in zip(self.stages, models):
            yield attack(model, **vars(given))
        if self.routes and len(given.inputs):
            chosen = self._shares(-1, models, given).argmax(1)
            for number in range(len(self.stages)):
                aimed = replace(given, labels=chosen, targets=torch.full_like(chosen, number))
                yield self.attacks[-1](models[-1], **vars(aimed))

    def lead(self, models: Sequence[Model], given: Examples) -> torch.Tensor:
        """By how much the share of votes for the target, or else for the label, is above that of
        any other class at the stage that decides, float [B].
        """
        classes = (given.labels if given.targets is None else given.targets)[:, None]
        shares = [self._shares(number, models, given) for number in range(len(self.stages))]
        if self.routes:
            deciding = self._shares(-1, models, given).argmax(1)
        else:
            is_clear = torch.stack([each.amax(1) > self.threshold for each in shares])
            is_clear[-1] = True  # the last stage always decides
            deciding = is_clear.int().argmax(0)  # the first of them
        leads = [
            each.gather(1, classes)[:, 0] - each.scatter(1, classes, -1.0).amax(1)
            for each in shares
        ]
        return torch.stack(leads).gather(0, deciding[None])[0]

    def _shares(self, number: int, models: Sequence[Model], given: Examples) -> torch.Tensor:
        """The shares of the votes of a classifier, float [B, K]."""
        return self.attacks[number].shares(models[number], given.inputs, given.indices)
