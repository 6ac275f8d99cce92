"""Attacks on smoothed classifiers: their noise, and that an example's result is a function of its
index alone.

``SmoothedAttack`` is compared with the plain attack on the noise it should draw, and with PGD done
one copy at a time. Batches are checked bit for bit, with a model that answers differently in every
shape of batch.
"""

import functools
import random

import pytest
import torch
from torch import nn

from smoothadv.attacks import ATTACKS, SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Stein, expected_loss
from smoothadv.attacks.pgd import PGD
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
INDICES = [10, 3, 77, 4, 1000, 12, 5]


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
    for rows in (
        everyone,
        everyone[::-1],
        *(chance.sample(everyone, count) for count in (2, 3, 5)),
    ):
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
