"""Attacks on smoothed classifiers: their noise, and that an example's result is a function of its
index alone.

``SmoothedAttack`` is compared with the plain attack on the noise it should draw, and with PGD done
one copy at a time. Batches are checked bit for bit, with a model that answers differently in every
shape of batch. Attacks on cascades and routers keep what changes the answer of all stages.
"""

import functools
import random

import pytest
import torch
from torch import nn

from smoothadv.attacks import ATTACKS, SmoothedAttack, StagedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Stein, expected_loss
from smoothadv.attacks.pgd import PGD
from smoothadv.attacks.smoothed_attack import Examples
from smoothadv.noise import Purpose, derive_generator
from support.fragile_models import ShapeSensitive
from support.models import Recorder, network_with_state
from support.slow_attacks import batch_noise, estimators_and_slow_ones, slow_pgd, smooth_network

SIGMA, CLASSES = 0.25, 4
ESTIMATORS = estimators_and_slow_ones(SIGMA)

estimators = pytest.mark.parametrize("name", ESTIMATORS)


def drawn(
    shape: tuple[int, ...], examples: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64
):
    """Inputs [B, ...] in [0, 1] and labels [B]."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(examples, *shape, dtype=torch.float64, generator=generator).to(dtype)
    return inputs, torch.randint(CLASSES, (examples,), generator=generator)


def network(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> nn.Module:
    return smooth_network(torch.Size(shape).numel(), CLASSES, seed=3, dtype=dtype)


def answers(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Labels [B] that the model gives the inputs: those which an attack has to leave."""
    return model.eval()(inputs).argmax(1)


@pytest.mark.parametrize(
    ("shape", "copies"), list(zip([(6,), (1, 2, 3), (3, 4, 4)], (1, 5, 5))), ids=str
)
@estimators
def test_result_is_that_of_the_pseudo_code_on_the_noise_of_each_index(shape, copies, name):
    inputs, model, indices = drawn(shape)[0], network(shape), [7, 0, 123456, 3]
    labels = answers(model, inputs)
    estimator, slow_gradient = ESTIMATORS[name]
    noise = batch_noise(SIGMA, 11, indices, copies, inputs)
    slow = torch.stack(
        [
            slow_pgd(model, *each, 0.5, 4, slow_gradient)
            for each in zip(inputs, labels.tolist(), noise)
        ]
    )
    for batch in (1, 3, 7, 256):
        attack = SmoothedAttack(
            PGD(0.5, 4, estimator=estimator), SIGMA, copies, seed=11, batch=batch
        )
        torch.testing.assert_close(attack(model, inputs, labels, indices), slow, rtol=0, atol=1e-9)
    elsewhere = SmoothedAttack(PGD(0.5, 4, estimator=estimator), SIGMA, copies, seed=12)
    assert (elsewhere(model, inputs, labels, indices) - slow).abs().max() > 1e-4, "it can fail"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"random_start": True}, {"random_if_flat": True}], ids=str)
@estimators
def test_one_pass_is_the_plain_attack_to_the_last_bit(dtype, options, name):
    inputs, labels = drawn((3, 4, 4), 3, dtype=dtype)
    model, plain = network((3, 4, 4), dtype), PGD(0.5, 3, estimator=ESTIMATORS[name][0], **options)
    generators = [derive_generator("cpu", 5, index, Purpose.ATTACK_CHOICES) for index in range(3)]
    expected = plain(model, inputs, labels, batch_noise(SIGMA, 5, range(3), 6, inputs), generators)
    result = SmoothedAttack(plain, SIGMA, 6, seed=5)(model, inputs, labels)
    assert torch.equal(result, expected) and result.dtype == dtype and not result.requires_grad


# Bit-identity. Every attack, estimator and option at least once; batches that hold parts of one
# example, one, several.
SITUATIONS = [
    (PGD(0.5, 3), {"num_noise_vec": 3, "batch": 8}),
    (PGD(0.5, 3, random_start=True), {"num_noise_vec": 3, "batch": 8, "restarts": 2}),
    (PGD(0.5, 2, random_if_flat=True), {"num_noise_vec": 5, "batch": 3, "target": "random"}),
    (PGD(0.5, 2, estimator=expected_loss), {"num_noise_vec": 5, "batch": 4, "target": "every"}),
    (PGD(0.5, 2, estimator=Stein(SIGMA)), {"num_noise_vec": 7, "batch": 64, "target": "runner-up"}),
    (
        PGD(0.5, 2, estimator=Stein(SIGMA, hard=True)),
        {"num_noise_vec": 7, "batch": 15, "restarts": 3},
    ),
    (DDN(0.5, 4), {"num_noise_vec": 2, "batch": 5, "restarts": 2}),
    (DDN(0.5, 4, estimator=Stein(SIGMA)), {"num_noise_vec": 6, "batch": 4}),
    (DDN(0.5, 4, initial_norm=5.0), {"num_noise_vec": 3, "batch": 256, "target": "least-likely"}),
    (DDN(0.5, 3), {"num_noise_vec": 1, "batch": 1, "target": "every", "restarts": 2}),
    (PGD(0.5, 3), {"num_noise_vec": 1, "batch": 3, "target": 2}),
    (DDN(0.5, 4), {"sigma": 0.0, "num_noise_vec": 1, "batch": 4}),
]
INDICES = [10, 3, 77, 4, 1000]


@functools.cache
def convolutional() -> ShapeSensitive:
    """In float32, where sums depend on their order, behind what makes any other shape of batch
    unmistakable.
    """
    with torch.random.fork_rng():
        torch.manual_seed(1)
        conv = (
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, stride=2),
            nn.ReLU(),
        )
        return ShapeSensitive(nn.Sequential(*conv, nn.Flatten(), nn.Linear(54, CLASSES))).eval()


def batch_of(rows, situation: int, memory_format: torch.memory_format) -> torch.Tensor:
    """The results for these examples, in this order."""
    inputs, labels = drawn((2, 8, 8), len(INDICES), dtype=torch.float32)
    inputs = inputs.contiguous(memory_format=memory_format)
    attack, options = SITUATIONS[situation]
    attack, model = (
        SmoothedAttack(attack, **{"sigma": SIGMA, "seed": 4, **options}),
        convolutional(),
    )
    epsilon = torch.linspace(0.1, 0.9, len(INDICES))
    indices = [INDICES[row] for row in rows]
    return attack(model, inputs[rows], labels[rows], indices, epsilon=epsilon[rows])


@pytest.mark.parametrize(
    ("situation", "memory_format"),
    [
        *((situation, torch.contiguous_format) for situation in range(len(SITUATIONS))),
        *[(situation, torch.channels_last) for situation in (0, 3, 4, 6)],
    ],
)
def test_each_result_is_the_same_bits_whatever_else_is_in_the_batch(situation, memory_format):
    """channels_last is how accelerators like their images: padding must not change the format of a
    pass.
    """
    everyone, chance = list(range(len(INDICES))), random.Random(situation)
    expected = torch.cat([batch_of([row], situation, memory_format) for row in everyone])
    assert (expected != drawn((2, 8, 8), len(INDICES), dtype=torch.float32)[0]).any()
    for rows in (everyone, *(chance.sample(everyone, count) for count in (2, 5))):
        assert torch.equal(batch_of(rows, situation, memory_format), expected[rows])


@pytest.mark.parametrize("restarts, target", [(1, None), (2, None), (2, "every"), (1, "runner-up")])
@pytest.mark.parametrize("name", list(ATTACKS))
def test_model_and_arguments_are_left_as_they_were(name, restarts, target):
    model = nn.Sequential(network_with_state(), nn.Dropout()).train()
    recorder = Recorder(model)
    model[0][0].eval()
    model[0][3].bias.requires_grad_(False)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    inputs, labels = torch.rand(3, 1, 4, 4).requires_grad_(), torch.tensor([0, 1, 2])
    epsilon = torch.tensor([0.0, 0.5, 1.0])
    before = [tensor.detach().clone() for tensor in (inputs, labels, epsilon)]
    versions = [tensor._version for tensor in (inputs, labels, epsilon)]
    global_state = torch.random.get_rng_state()

    attack = SmoothedAttack(
        ATTACKS[name](0.5, 3), SIGMA, 3, restarts=restarts, target=target, batch=4
    )
    result = attack(recorder, inputs, labels, [1, 2, 3], epsilon=epsilon)

    assert recorder.modes and not any(recorder.modes), "it is attacked in eval mode"
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in [*model.parameters(), inputs])
    assert [tensor._version for tensor in (inputs, labels, epsilon)] == versions
    assert all(torch.equal(tensor, old) for tensor, old in zip((inputs, labels, epsilon), before))
    assert torch.equal(torch.random.get_rng_state(), global_state), "global randomness is not ours"
    assert not result.requires_grad
    result.zero_()
    assert torch.equal(inputs, before[0]), "the result is the caller's own"


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
GREY = torch.full((3, 1, 2, 2), 0.5)
ALWAYS_0, ALWAYS_1 = Plane(50.0), Plane(-50.0)
ZEROS = torch.zeros(3, dtype=torch.int64)


def parts_of(count: int, sigma: float = 0.05, **options) -> list[SmoothedAttack]:
    attack = PGD(epsilon=0.4, num_steps=10)
    return [SmoothedAttack(attack, sigma, 16, seed=seed, **options) for seed in range(count)]


def sums(found: torch.Tensor) -> list[float]:
    return found.flatten(1).sum(1).tolist()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_router_is_attacked_where_its_stages_cannot_be(sign):
    """Both stages are constant, of other classes: only the router can be moved."""
    router = Plane(2 + 0.4 * sign)
    stages = (ALWAYS_0, ALWAYS_1) if sign > 0 else (ALWAYS_1, ALWAYS_0)
    attack = StagedAttack([*parts_of(2), *parts_of(1)], routes=True)
    found = attack((*stages, router), GREY, ZEROS)
    assert all(sign * (each - 2) > 0.4 for each in sums(found))
    assert (found - GREY).flatten(1).norm(dim=1).max() <= 0.4 + 1e-5


def test_a_stage_is_attacked_where_the_router_stays():
    stage, router = Plane(2.4), Plane(50.0)  # which always chooses the first stage
    found = StagedAttack([*parts_of(2), *parts_of(1)], routes=True)(
        (stage, ALWAYS_1, router), GREY, ZEROS
    )
    assert min(sums(found)) > 2.4


def test_targets_of_a_routers_attack_are_classes_of_the_stages():
    """Class 2 is none of the router's."""
    stages, router = (Plane(50.0, classes=3), Plane(-50.0, classes=3)), Plane(2.4)
    targeted = StagedAttack([*parts_of(2, target=1), *parts_of(1)], routes=True)
    targets = targeted.choose_targets((*stages, router), GREY, ZEROS)
    assert targets.tolist() == [1, 1, 1]
    assert min(sums(targeted((*stages, router), GREY, ZEROS, targets=targets))) > 2.4
    labels = torch.full((3,), 2)
    assert targeted((*stages, router), GREY, labels, targets=targets).shape == GREY.shape


def test_a_cascade_is_attacked_at_the_stage_that_decides():
    """The first stage decides for class 0 far below its plane: an attack on the second stage alone
    changes nothing.
    """
    near, far = Plane(2.4), Plane(1.0)
    attack = StagedAttack(parts_of(2), threshold=0.7)
    assert min(sums(attack((near, ALWAYS_1), GREY, ZEROS))) > 2.4
    # Class 1, which the first stage decides, is out of reach: the attack keeps to its ball.
    assert min(sums(attack((far, near), GREY, torch.ones(3, dtype=torch.int64)))) > 1.0


@pytest.mark.parametrize("targets", [None, ZEROS[:0]])
@pytest.mark.parametrize("kind", ["cascade", "router"])
def test_no_examples_have_no_adversarial_examples(kind, targets):
    models = (Plane(2.4), ALWAYS_1, Plane(1.0))
    attack = StagedAttack(parts_of(3), 0.7)
    if kind == "router":
        attack = StagedAttack([*parts_of(2), *parts_of(1)], routes=True)
    for indices in (None, []):
        found = attack(models, GREY[:0], ZEROS[:0], indices, targets=targets)
        assert found.shape == GREY[:0].shape and found.dtype == GREY.dtype


def test_memory_and_batches_are_those_of_all_parts():
    parts, smaller = parts_of(3, batch=64), []
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
    attack = StagedAttack(parts_of(2), threshold)
    found = attack(models, GREY, ZEROS)
    assert (attack.lead(models, Examples(found, ZEROS, None)) < 0).all() == moved
