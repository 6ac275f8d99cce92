"""Attacks on cascades and routers: what is kept is what changes the answer of all stages."""

import pytest
import torch

from smoothadv.attacks import SmoothedAttack, StagedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.attacks.smoothed_attack import Examples


class Plane(torch.nn.Module):
    """Class 1 where the sum of all pixels is above ``bias``, else class 0."""

    def __init__(self, bias: float, classes: int = 2) -> None:
        super().__init__()
        self.bias, self.classes = bias, classes

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        score = (images.flatten(1).sum(1, keepdim=True) - self.bias) * 5
        others = torch.full((len(images), self.classes - 2), -100.0)
        return torch.cat([-score, score, others], dim=1)


# Their sum is 2; an attack of size epsilon changes it by up to 2 epsilon.
INPUTS = torch.full((3, 1, 2, 2), 0.5)
ALWAYS_0, ALWAYS_1 = Plane(50.0), Plane(-50.0)
ZEROS = torch.zeros(3, dtype=torch.int64)


def attacks(count: int, sigma: float = 0.05, **options) -> list[SmoothedAttack]:
    attack = PGD(epsilon=0.4, num_steps=10)
    return [SmoothedAttack(attack, sigma, 16, seed=seed, **options) for seed in range(count)]


def sums(found: torch.Tensor) -> list[float]:
    return found.flatten(1).sum(1).tolist()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_router_is_attacked_where_its_stages_cannot_be(sign):
    """Both stages are constant, of other classes: only the router can be moved."""
    router = Plane(2 + 0.4 * sign)
    stages = (ALWAYS_0, ALWAYS_1) if sign > 0 else (ALWAYS_1, ALWAYS_0)
    attack = StagedAttack([*attacks(2), *attacks(1)], routes=True)
    found = attack((*stages, router), INPUTS, ZEROS)
    assert all(sign * (each - 2) > 0.4 for each in sums(found))
    assert (found - INPUTS).flatten(1).norm(dim=1).max() <= 0.4 + 1e-5


def test_a_stage_is_attacked_where_the_router_stays():
    stage, router = Plane(2.4), Plane(50.0)  # which always chooses the first stage
    found = StagedAttack([*attacks(2), *attacks(1)], routes=True)(
        (stage, ALWAYS_1, router), INPUTS, ZEROS
    )
    assert min(sums(found)) > 2.4


def test_targets_of_a_routers_attack_are_classes_of_the_stages():
    """Class 2 is none of the router's."""
    stages, router = (Plane(50.0, classes=3), Plane(-50.0, classes=3)), Plane(2.4)
    targeted = StagedAttack([*attacks(2, target=1), *attacks(1)], routes=True)
    targets = targeted.choose_targets((*stages, router), INPUTS, ZEROS)
    assert targets.tolist() == [1, 1, 1]
    assert min(sums(targeted((*stages, router), INPUTS, ZEROS, targets=targets))) > 2.4
    labels = torch.full((3,), 2)
    assert targeted((*stages, router), INPUTS, labels, targets=targets).shape == INPUTS.shape


def test_a_cascade_is_attacked_at_the_stage_that_decides():
    """The first stage decides for class 0 far below its plane: an attack on the second stage alone
    changes nothing.
    """
    near, far = Plane(2.4), Plane(1.0)
    attack = StagedAttack(attacks(2), threshold=0.7)
    assert min(sums(attack((near, ALWAYS_1), INPUTS, ZEROS))) > 2.4
    # Class 1, which the first stage decides, is out of reach: the attack keeps to its ball.
    assert min(sums(attack((far, near), INPUTS, torch.ones(3, dtype=torch.int64)))) > 1.0


@pytest.mark.parametrize("targets", [None, ZEROS[:0]])
@pytest.mark.parametrize("kind", ["cascade", "router"])
def test_no_examples_have_no_adversarial_examples(kind, targets):
    models = (Plane(2.4), ALWAYS_1, Plane(1.0))
    attack = StagedAttack(attacks(3), 0.7)
    if kind == "router":
        attack = StagedAttack([*attacks(2), *attacks(1)], routes=True)
    for indices in (None, []):
        found = attack(models, INPUTS[:0], ZEROS[:0], indices, targets=targets)
        assert found.shape == INPUTS[:0].shape and found.dtype == INPUTS.dtype


def test_memory_and_batches_are_those_of_all_parts():
    parts, smaller = attacks(3, batch=64), []
    attack = StagedAttack(parts, routes=True)
    attack.watch(smaller.append)
    for each in parts:
        each.on_smaller_batch(7)
    parts[1].batch = 16
    assert smaller == [7, 7, 7] and attack.batch == 16 and attack.examples_per_pass == 4


@pytest.mark.parametrize(("threshold", "moved"), [(0.9, True), (0.6, False)])
def test_an_undecided_stage_of_a_cascade_asks_the_next_one(threshold, moved):
    """The first stage has 3/4 of its votes for class 0, everywhere; the second one is moved, and
    what it says counts only where the first one decides nothing.
    """

    class Undecided(Plane):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            is_other = torch.arange(len(images)) % 4 == 0
            score = torch.where(is_other, -5.0, 5.0) + 0 * images.flatten(1).sum(1)
            return torch.stack([score, torch.zeros(len(images))], 1)

    models = (Undecided(0.0), Plane(2.4))
    attack = StagedAttack(attacks(2), threshold)
    found = attack(models, INPUTS, ZEROS)
    assert (attack.lead(models, Examples(found, ZEROS, None)) < 0).all() == moved
