"""Attacks on one or several smoothed classifiers, which know how a cascade or a router decides by
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from smoothadv.attacks.estimators import Model
from smoothadv.attacks.smoothed_attack import Examples, SmoothedAttack, best_of


@dataclass(frozen=True)
class StagedAttack(ABC):
    """Attacks each stage, and keeps of each example the result that makes all stages together leave
    the class most clearly.

    ``attacks`` has the attack on each classifier, with its noise: the stages, and last the router,
    if there is one. It is called as a ``SmoothedAttack``, with the models of all.
    """

    routers: ClassVar[int] = 0
    attacks: Sequence[SmoothedAttack]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.attacks) - self.routers

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
        last = self.stages - 1
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
        if not len(inputs):
            return inputs.detach()
        given = Examples(inputs, labels, indices, epsilon, targets)
        found = [*self.candidates(models, given)]
        if len(found) == 1:
            return found[0]
        leads = [self.lead(models, replace(given, inputs=each)) for each in found]
        return best_of(found, leads if targets is not None else [-lead for lead in leads])

    def candidates(self, models: Sequence[Model], given: Examples) -> Iterator[torch.Tensor]:
        """Adversarial inputs, as the inputs, from which the best is taken."""
        for attack, model in zip(self.attacks[: self.stages], models):
            yield attack(model, **vars(given))

    @abstractmethod
    def lead(self, models: Sequence[Model], given: Examples) -> torch.Tensor:
        """By how much the share of votes for a class is above that of any other, float [B], at the
        stage that decides by these shares.
        """

    def _at_stage(
        self, number: int, models: Sequence[Model], given: Examples
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest share of votes, and by how much that of the target, or else of the label, is
        above any other one, float [B] each.
        """
        classes = given.labels if given.targets is None else given.targets
        attack, model = self.attacks[number], models[number]
        shares = attack.shares(model, given.inputs, classes, given.indices)
        own = shares.gather(1, classes[:, None])[:, 0]
        return shares.amax(1), own - shares.scatter(1, classes[:, None], -1.0).amax(1)


@dataclass(frozen=True)
class CascadeAttack(StagedAttack):
    """Attacks a cascade of which ``threshold`` is p0 (``statistics.cascade``). A single classifier
    is a cascade of one stage, which always decides.
    """

    threshold: float = 0.0

    def lead(self, models: Sequence[Model], given: Examples) -> torch.Tensor:
        lead = torch.zeros(len(given.inputs), device=given.inputs.device)
        is_open = torch.ones_like(given.labels, dtype=torch.bool)
        for number in range(self.stages):
            largest, at_stage = self._at_stage(number, models, given)
            decides = is_open & ((largest > self.threshold) | (number == self.stages - 1))
            lead = torch.where(decides, at_stage, lead)
            is_open = is_open & ~decides
        return lead


class RouterAttack(StagedAttack):
    """Attacks the stages of a router (``statistics.router``), and the router, so that it chooses
    each of them.
    """

    routers: ClassVar[int] = 1

    def candidates(self, models: Sequence[Model], given: Examples) -> Iterator[torch.Tensor]:
        yield from super().candidates(models, given)
        chosen = self._chosen(models, given)
        for number in range(self.stages):
            aimed = replace(given, labels=chosen, targets=torch.full_like(chosen, number))
            yield self.attacks[-1](models[-1], **vars(aimed))

    def lead(self, models: Sequence[Model], given: Examples) -> torch.Tensor:
        leads = [self._at_stage(number, models, given)[1] for number in range(self.stages)]
        return torch.stack(leads).gather(0, self._chosen(models, given)[None])[0]

    def _chosen(self, models: Sequence[Model], given: Examples) -> torch.Tensor:
        """The stages that the router chooses, int64 [B]."""
        anything = torch.zeros_like(given.labels)
        shares = self.attacks[-1].shares(models[-1], given.inputs, anything, given.indices)
        return shares.argmax(1)
