"""Images per second of SmoothAdv updates, as ratios to the released code's updates of the same
network.

    python benchmarks/training_speed.py --arch cifar_resnet110 --compile

All variants alternate in this process, on random images and with a learning rate of almost 0, so
that the network does not change; its batch normalization has the statistics of noisy images. Three
labels in ten are wrong, so that the image counts as adversarial from the start; there DDN can save
work. Printed are medians over rounds of the ratio within a round. With m copies the plain update
does what the released code does with --train-multi-noise: m updates on B / m images in m copies
each. Ours have the deterministic kernels that training asks for.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable

import plain_training
import torch
from networks import SIGMA, description_of, prepared
from timing import Line, Variant, parsed, parser_of, report

from smoothadv.attacks import ATTACKS
from smoothadv.base.distributed import Processes
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.noise import training_noise
from smoothadv.objectives import OBJECTIVES, Objective
from smoothadv.training.execution import Execution
from smoothadv.training.graphed import GraphedUpdate
from smoothadv.training.schedule import Schedule, optimizer_of
from smoothadv.training.teacher import Teacher
from smoothadv.training.update import Address, Update

EPSILON = 0.5
CASES = {
    "PGD T=2 m=1": ("PGD", 2, 1),
    "PGD T=4 m=4": ("PGD", 4, 4),
    "PGD T=10 m=8": ("PGD", 10, 8),
    "DDN T=4 m=1": ("DDN", 4, 1),
}
"""Attack, steps T and noisy copies m of SmoothAdv's updates."""
PLAIN = {"PGD": plain_training.pgd, "DDN": plain_training.ddn}
MODES = {"eager": (), "compiled": ("compile",), "graph": ("graph",)}
MODES["compiled-graph"] = ("compile", "graph")
PRECISIONS = ("fp32", "tf32", "bf16")


def batch_of(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, channels last as datasets give them, and labels of which about 30 % differ from the
    network's prediction on the noisy image.
    """
    size = options.batch
    device = options.device
    images = torch.rand(size, *description_of(options.arch).image_shape, device=device)
    network = prepared(options.arch, device, options.updates)
    with torch.no_grad():
        predicted = network(images + SIGMA * torch.randn_like(images)).argmax(1)
    wrong = torch.arange(size, device=device) % 10 < 3
    labels = torch.where(wrong, (predicted + 1) % 10, predicted)
    return images.contiguous(memory_format=torch.channels_last), labels


def updating(
    objective: Objective,
    execution: Execution,
    options: argparse.Namespace,
    mode: str = "eager",
    epoch: int = 0,
    teacher: Teacher | None = None,
) -> Callable[[], object]:
    """A function that updates a copy of the network on one batch. In a mode of CUDA graphs it
    raises the warning of an update that cannot be one.
    """
    images, labels = batch_of(options)
    size = options.batch
    device = options.device
    network = copy.deepcopy(prepared(options.arch, device, options.updates))
    model = execution.prepare(network, device)
    optimizer = optimizer_of(Schedule(size, 1, 1e-12, 1), model, device)
    settings = execution, Processes(), device, images[:2], size, teacher
    update = Update(model, objective, optimizer, *settings)
    if "graph" in MODES[mode]:
        update.compute = GraphedUpdate(update)
    steps = iter(range(1_000_000))
    indices = torch.arange(size)

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DoubtfulWarning)
            update(images, labels, indices, Address(0, epoch, next(steps)))

    return run


def plain(name: str, precision: str, options: argparse.Namespace) -> Variant:
    """The released update."""
    method, steps, copies = CASES[name]
    size = options.batch

    def prepare() -> Callable[[], object]:
        images, labels = (values.contiguous() for values in batch_of(options))
        model = copy.deepcopy(prepared(options.arch, options.device, options.updates))
        attack = PLAIN[method](EPSILON, steps)
        optimizer = torch.optim.SGD(model.parameters(), 1e-12, momentum=0.9, weight_decay=1e-4)
        part = size // copies

        def run() -> None:
            for start in range(0, part * copies, part):
                some = images[start : start + part]
                right = labels[start : start + part]
                noise = training_noise(some, copies, SIGMA, None)
                plain_training.update(model, optimizer, some, right, noise, attack)

        return run

    return Variant(Line(f"train {options.arch} {name}", precision, "plain", size), prepare, size)


def ours(name: str, precision: str, mode: str, options: argparse.Namespace) -> Variant:
    """This package's update in a precision and a mode."""
    method, steps, copies = CASES[name]

    def prepare() -> Callable[[], object]:
        execution = Execution(
            "fp32" if precision == "tf32" else precision, "compile" in MODES[mode]
        )
        attack = ATTACKS[method](EPSILON, steps)
        objective = OBJECTIVES["smoothadv"](attack, SIGMA, copies, warmup=0)
        return updating(objective, execution, options, mode)

    line = Line(f"train {options.arch} {name}", precision, mode, options.batch)
    return Variant(line, prepare, options.batch, "deterministic")


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--arch", default="cifar_resnet110")
    parser.add_argument("--batch", type=int, default=64)
    cases = [name for name in CASES if name != "PGD T=10 m=8"]
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=cases)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["fp32"])
    options = parsed(parser, arguments)
    for case in options.cases:
        variants = [plain(case, options.usual, options)]
        for precision in options.precision:
            for mode in ["eager"] + ["compiled"] * options.compile:
                variants.append(ours(case, precision, mode, options))
        report(variants, options)


if __name__ == "__main__":
    main()
