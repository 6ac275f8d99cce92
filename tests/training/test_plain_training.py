"""Training is the released code's, step by step: the losses of an implementation as plain as it can
be written.
"""

import pytest
import torch

from smoothadv.architectures import get_architecture
from smoothadv.attacks import ATTACKS
from smoothadv.base.distributed import Processes
from smoothadv.noise import Purpose
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.training.execution import Execution
from smoothadv.training.update import Address, Update, means
from support.plain import plain_module

SIGMA, EPSILON, BATCH, UPDATES, SEED = 0.25, 0.5, 8, 10, 5
CPU = torch.device("cpu")
plain = plain_module("plain_training")


def network() -> torch.nn.Module:
    """In float64: at the kinks of ReLU float32 would turn rounding into other gradients within a
    few steps.
    """
    torch.manual_seed(1)
    return get_architecture("digits_resnet8", "digits").double()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(2)
    images = torch.rand(UPDATES, BATCH, 1, 8, 8, generator=source, dtype=torch.float64)
    # Labels that can be learnt, so that some examples are adversarial at the start and others are
    # not.
    return [(batch, (batch.flatten(1).mean(1) * 40).long() % 10) for batch in images]


def our_losses(attack: str, steps: int, copies: int, model: torch.nn.Module) -> list[float]:
    objective = SmoothAdv(ATTACKS[attack](EPSILON, steps), SIGMA, copies, warmup=0)
    update = Update(
        model, objective, sgd(model), Execution(), Processes(), CPU, torch.rand(2, 1, 8, 8), BATCH
    )
    sums = [
        update(images, labels, torch.arange(BATCH), Address(SEED, 0, step))
        for step, (images, labels) in enumerate(batches())
    ]
    return [means(each.tolist())["loss"] for each in sums]


def plain_losses(attack, copies: int, model: torch.nn.Module) -> list[float]:
    optimizer, losses = sgd(model), []
    for step, (images, labels) in enumerate(batches()):
        generator = Address(SEED, 0, step).generator(CPU, Purpose.OBJECTIVE)
        noise = SIGMA * torch.randn(
            BATCH, copies, 1, 8, 8, dtype=torch.float64, generator=generator
        )
        losses.append(plain.update(model, optimizer, images, labels, noise, attack)["loss"])
    return losses


@pytest.mark.parametrize(
    ("attack", "steps", "copies"), [("PGD", 2, 1), ("PGD", 4, 4), ("DDN", 4, 1), ("DDN", 3, 2)]
)
def test_losses_and_weights_of_ten_updates_are_those_of_the_plain_implementation(
    attack, steps, copies
):
    ours, theirs = network(), network()
    losses = our_losses(attack, steps, copies, ours)
    expected = plain_losses(
        {"PGD": plain.pgd, "DDN": plain.ddn}[attack](EPSILON, steps), copies, theirs
    )
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-7, atol=1e-9)
    assert losses[-1] < losses[0], "it does learn"
