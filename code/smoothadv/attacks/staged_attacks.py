"""Attacks on several smoothed classifiers, which know how a cascade or a router decides by them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from smoothadv.attacks.estimators import Model
from smoothadv.attacks.geometry import per_example
from smoothadv.attacks.smoothed_attack import SmoothedAttack


@dataclass(frozen=True)
class _Given:
    """The arguments of a call."""

    models: Sequence[Model]
    inputs: torch.Tensor
    labels: torch.Tensor
    indices: Sequence[int] | None
    epsilon: torch.Tensor | None
    targets: torch.Tensor | None


class StagedAttack(ABC):
    """Attacks each stage, and keeps of each example the result that makes all stages together leave
    the class most clearly.

    ``attacks`` has the attack on each stage, with the noise of that stage. It is called as a
    ``SmoothedAttack``, with the models of all.
    """

    def __init__(self, attacks: Sequence[SmoothedAttack]) -> None:
        self.attacks = attacks
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
        last = len(self.attacks) - 1
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
        given = _Given(models, inputs, labels, indices, epsilon, targets)
        best: torch.Tensor | None = None
        for found in self.candidates(given):
            lead = self.lead(given, found)
            lead = lead if targets is None else -lead
            if best is None:
                best, least = found, lead
            best = torch.where(per_example(lead < least, found), found, best)
            least = torch.minimum(lead, least)
        assert best is not None  # there is a stage
        return best

    def candidates(self, given: _Given) -> Iterator[torch.Tensor]:
        """Adversarial inputs, as the inputs, from which the best is taken."""
        for attack, model in zip(self.attacks, given.models):
            yield attack(
                model,
                given.inputs,
                given.labels,
                given.indices,
                epsilon=given.epsilon,
                targets=given.targets,
            )

    @abstractmethod
    def lead(self, given: _Given, points: torch.Tensor) -> torch.Tensor:
        """By how much the share of votes for a class is above that of any other, float [B], at the
        stage that decides by these shares.
        """

    def _at_stage(
        self, number: int, given: _Given, points: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest share of votes, and by how much that of the target, or else of the label, is
        above any other one, float [B] each.
        """
        classes = given.labels if given.targets is None else given.targets
        shares = self.attacks[number].shares(given.models[number], points, classes, given.indices)
        own = shares.gather(1, classes[:, None])[:, 0]
        return shares.amax(1), own - shares.scatter(1, classes[:, None], -1.0).amax(1)


class CascadeAttack(StagedAttack):
    """Attacks a cascade of which ``threshold`` is p0 (``statistics.cascade``)."""

    def __init__(self, attacks: Sequence[SmoothedAttack], threshold: float) -> None:
        super().__init__(attacks)
        self.threshold = threshold

    def lead(self, given: _Given, points: torch.Tensor) -> torch.Tensor:
        lead = torch.zeros(len(points), device=points.device)
        is_open = torch.ones_like(given.labels, dtype=torch.bool)
        for number in range(len(self.attacks)):
            largest, at_stage = self._at_stage(number, given, points)
            is_last = number == len(self.attacks) - 1
            decides = is_open & ((largest > self.threshold) | is_last)
            lead = torch.where(decides, at_stage, lead)
            is_open = is_open & ~decides
        return lead


class RouterAttack(StagedAttack):
    """Attacks the stages of a router (``statistics.router``), and the router, so that it chooses
    each of them. ``router`` is the attack on the router, whose model is the last one.
    """

    def __init__(self, attacks: Sequence[SmoothedAttack], router: SmoothedAttack) -> None:
        super().__init__(attacks)
        self.router = router

    def watch(self, on_smaller: Callable[[int], None]) -> None:
        super().watch(on_smaller)
        self.router.watch(on_smaller)

    def candidates(self, given: _Given) -> Iterator[torch.Tensor]:
        yield from super().candidates(given)
        chosen = self._chosen(given, given.inputs)
        for number in range(len(self.attacks)):
            yield self.router(
                given.models[-1],
                given.inputs,
                chosen,
                given.indices,
                epsilon=given.epsilon,
                targets=torch.full_like(chosen, number),
            )

    def lead(self, given: _Given, points: torch.Tensor) -> torch.Tensor:
        chosen = self._chosen(given, points)
        leads = [self._at_stage(number, given, points)[1] for number in range(len(self.attacks))]
        return torch.stack(leads).gather(0, chosen[None])[0]

    def _chosen(self, given: _Given, points: torch.Tensor) -> torch.Tensor:
        """The stages that the router chooses, int64 [B]."""
        anything = torch.zeros_like(given.labels)
        return self.router.shares(given.models[-1], points, anything, given.indices).argmax(1)
