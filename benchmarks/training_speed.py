"""Images per second of SmoothAdv updates, as ratios to the released code's updates of the same
network.

    python benchmarks/training_speed.py --arch cifar_resnet110 --compile

All variants alternate in this process, on random images and with a learning rate of almost 0, so
that the network does not change; its batch normalization gets the statistics of noisy images first.
Three labels in ten are wrong, so that the image counts as adversarial from the start; there DDN can
save work. Printed are medians over rounds of the ratio within a round. With m copies the plain
update does what the released code does with --train-multi-noise: m updates on B / m images in m
copies each.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import plain_training
import torch
from timing import conditions, in_turns, parsed, parser_of, print_rates

from smoothadv.architectures import get_architecture
from smoothadv.attacks import ATTACKS
from smoothadv.base.distributed import Processes
from smoothadv.noise import training_noise
from smoothadv.objectives import OBJECTIVES
from smoothadv.training.execution import CONVOLUTION_DTYPES, Execution
from smoothadv.training.update import Address, Update

SIGMA, EPSILON = 0.25, 0.5
CASES = {"PGD T=2 m=1": ("PGD", 2, 1), "PGD T=4 m=4": ("PGD", 4, 4), "DDN T=4 m=1": ("DDN", 4, 1)}
PLAIN = {"PGD": plain_training.pgd, "DDN": plain_training.ddn}


def settled(arch: str, device: torch.device) -> torch.nn.Module:
    """A network whose batch normalization has the statistics of its inputs."""
    torch.manual_seed(0)
    model = get_architecture(arch, "cifar10").to(device)
    with torch.no_grad():
        for _ in range(30):
            model(
                torch.rand(32, 3, 32, 32, device=device)
                + SIGMA * torch.randn(32, 3, 32, 32, device=device)
            )
    return model


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-12, momentum=0.9, weight_decay=1e-4)


def batch_of(
    model: torch.nn.Module, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and labels of which about 30 % differ from the model's prediction on the noisy
    image.
    """
    images = torch.rand(size, 3, 32, 32, device=device)
    with torch.no_grad():
        predicted = copy.deepcopy(model).eval()(images + SIGMA * torch.randn_like(images)).argmax(1)
    wrong = torch.arange(size, device=device) % 10 < 3
    return images, torch.where(wrong, (predicted + 1) % 10, predicted)


def variants(
    case: str, network: torch.nn.Module, options: argparse.Namespace
) -> dict[str, Callable[[], None]]:
    """The functions to time, by name, the plain update first."""
    name, steps, copies = CASES[case]
    device = options.device
    images, labels = batch_of(network, options.batch, device)
    plain, attack = copy.deepcopy(network), PLAIN[name](EPSILON, steps)
    optimizer = sgd(plain)

    def update_plainly() -> None:
        size = len(images) // copies
        for part in range(copies):
            chosen = slice(part * size, (part + 1) * size)
            noise = training_noise(images[chosen], copies, SIGMA, None)
            plain_training.update(plain, optimizer, images[chosen], labels[chosen], noise, attack)

    runs: dict[str, Callable[[], None]] = {"plain": update_plainly}
    for precision in options.precision:
        for compiled in [False, True][: 1 + options.compile]:
            execution = Execution(precision, compiled)
            model = execution.prepare(copy.deepcopy(network), device)
            objective = OBJECTIVES["smoothadv"](
                ATTACKS[name](EPSILON, steps), SIGMA, copies, warmup=0
            )
            update = Update(
                model,
                objective,
                sgd(model),
                execution,
                Processes(),
                device,
                images[:2],
                len(images),
            )
            runs[f"{precision}{', compiled' if compiled else ''}"] = updating(
                update, images, labels
            )
    return runs


def updating(update: Update, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    images = images.contiguous(memory_format=torch.channels_last)  # as datasets give them
    steps = iter(range(1_000_000))

    def run() -> None:
        update(images, labels, len(images), slice(0, len(images)), Address(0, 0, next(steps)), 1.0)

    return run


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--arch", default="cifar_resnet110")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--precision", nargs="+", choices=list(CONVOLUTION_DTYPES), default=["fp32"]
    )
    options = parsed(parser)
    print(f"{options.arch}, batch {options.batch}, {conditions(options)}")
    network = settled(options.arch, options.device)
    for case in options.cases:
        times = in_turns(variants(case, network, options), options)
        print_rates(times, "plain", options.batch, "images/s", before=f"{case:14s} ", width=18)


if __name__ == "__main__":
    main()
