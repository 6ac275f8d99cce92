"""Time of an update of each training objective, as a multiple of Gaussian augmentation's, beside
the passes it takes.

    python benchmarks/objectives_cost.py --arch cifar_resnet20 --batch 64

Settings are those of the papers at sigma = 0.5 (scripts/grids/objectives-cifar10.toml), all copies
of the batch in one update, in an epoch in which attacks have their full size; acr-weakness also
before it attacks. All objectives alternate in this process, on random images (see
training_speed.py). Printed are medians over rounds of the ratio within a round, its ends, and
passes per image: 1 forward, 2 backward, 2 for the gradient of an image. Votes are not in it.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable

import torch
from timing import conditions, in_turns, parsed, parser_of
from training_speed import batch_of, settled, sgd

from smoothadv.attacks.pgd import PGD
from smoothadv.base.distributed import Processes
from smoothadv.objectives import OBJECTIVES, Objective
from smoothadv.training.execution import Execution
from smoothadv.training.teacher import Teacher
from smoothadv.training.update import Address, Update

SIGMA, LAST, CPU = 0.5, 149, torch.device("cpu")
CASES: dict[str, tuple[str, dict[str, object], int, int]] = {
    "Gaussian": ("gaussian", {}, 3, LAST),
    "Stability": ("stability", {}, 6, LAST),
    "SmoothAdv, m = 8, T = 10": (
        "smoothadv",
        {"attack": PGD(1.0, 10), "num_noise_vec": 8},
        184,
        LAST,
    ),
    "MACER": ("macer", {}, 48, LAST),
    "Consistency": ("consistency", {}, 6, LAST),
    "Consistency + SmoothAdv": (
        "consistency",
        {"attack": PGD(2.0, 10), "regularization": 1.0},
        46,
        LAST,
    ),
    "SmoothMix": ("smoothmix", {"one_step_adversary": True}, 28, LAST),
    "CAT-RS": ("cat-rs", {}, 56, LAST),
    "acr-weakness before its attack": ("acr-weakness", {}, 12, 0),
    "acr-weakness": ("acr-weakness", {}, 60, LAST),
    "Distillation": ("distillation", {}, 4, LAST),
}
"""Of each: the objective, its settings, passes per image, and an epoch. The first is what others
are related to.
"""


def updating(
    objective: Objective, network: torch.nn.Module, size: int, epoch: int
) -> Callable[[], None]:
    """A function that makes an update of a copy of the network."""
    images, labels = batch_of(network, size, CPU)
    images = images.contiguous(memory_format=torch.channels_last)
    execution, teacher = (
        Execution(),
        Teacher(copy.deepcopy(network).eval(), torch.full((1, 10), 0.1)),
    )
    model = execution.prepare(copy.deepcopy(network), CPU)
    update = Update(
        model, objective, sgd(model), execution, Processes(), CPU, images[:2], size, teacher
    )
    steps, first = iter(range(1_000_000)), torch.zeros(size, dtype=torch.int64)

    def run() -> None:
        update(images, labels, size, slice(0, size), Address(0, epoch, next(steps)), 1.0, first)

    return run


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--arch", default="cifar_resnet20")
    parser.add_argument("--batch", type=int, default=64)
    options = parsed(parser)
    network = settled(options.arch, CPU)
    runs = {
        name: updating(
            OBJECTIVES[chosen](noise_sd=SIGMA, **settings), network, options.batch, epoch
        )
        for name, (chosen, settings, _, epoch) in CASES.items()
    }
    load = os.getloadavg()[0]
    rounds = in_turns(runs, options)
    print(
        f"{options.arch}, batch {options.batch}, {conditions(options)}, load {load:.1f} to "
        f"{os.getloadavg()[0]:.1f}\n\n"
        "| objective | passes | of Gaussian's | time, of Gaussian's | ms per image "
        "|\n|---|---:|---:|---:|---:|"
    )
    for name, (_, _, passes, _) in CASES.items():
        ratios = sorted(times[name] / times["Gaussian"] for times in rounds)
        each = 1000 * statistics.median(times[name] for times in rounds) / options.batch
        middle, ends = statistics.median(ratios), f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
        print(f"| {name} | {passes} | {passes / 3:.1f} | {middle:.1f} ({ends}) | {each:.1f} |")


if __name__ == "__main__":
    main()
