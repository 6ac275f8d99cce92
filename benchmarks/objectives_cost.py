"""Time of an update of each training objective, as a multiple of Gaussian augmentation's, beside
the passes it takes.

    python benchmarks/objectives_cost.py --arch cifar_resnet20 --batch 64

Settings are those of the papers at sigma = 0.5 (scripts/grids/objectives-cifar10.toml), all copies
of the batch in one update, in an epoch in which attacks have their full size; acr-weakness also
before it attacks. All objectives alternate in this process, on random images (see
training_speed.py). Printed are medians over rounds of the ratio within a round, and passes per
image: 1 forward, 2 backward, 2 for the gradient of an image. Votes are not in it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from networks import prepared
from timing import Line, Variant, conditions, measured, parsed, parser_of
from training_speed import updating

from smoothadv.attacks.pgd import PGD
from smoothadv.objectives import OBJECTIVES
from smoothadv.training.execution import Execution
from smoothadv.training.teacher import Teacher

SIGMA, LAST = 0.5, 149
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


class Undecided(Teacher):
    """A teacher with equal shares of votes for all classes."""

    def fields(self, indices: torch.Tensor, part: slice) -> dict[str, object]:
        images = indices[part]
        shares = torch.full((len(images), 10), 0.1, device=next(self.network.parameters()).device)
        return {"teacher": self.network, "targets": shares}


def variant(name: str, options: argparse.Namespace) -> Variant:
    """An update of a copy of the network by an objective."""
    chosen, settings, _, epoch = CASES[name]

    def prepare() -> Callable[[], object]:
        network = copy.deepcopy(prepared(options.arch, options.device, options.updates))
        teacher = Undecided(network)
        objective = OBJECTIVES[chosen](noise_sd=SIGMA, **settings)
        return updating(objective, Execution(), options, epoch=epoch, teacher=teacher)

    line = Line(name, options.usual, "eager", options.batch)
    return Variant(line, prepare, options.batch, "deterministic")


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--arch", default="cifar_resnet20")
    parser.add_argument("--batch", type=int, default=64)
    options = parsed(parser, arguments)
    print(f"{options.arch}, batch {options.batch}, {conditions(options)}\n")
    print("| objective | passes | of Gaussian's | time, of Gaussian's | ms per image |")
    print("|---|---:|---:|---:|---:|")
    for line in measured([variant(name, options) for name in CASES], options):
        passes = CASES[line.case][2]
        times = line.trouble or f"{1 / line.ratio:.1f} | {1000 / line.rate:.1f}"
        print(f"| {line.case} | {passes} | {passes / 3:.1f} | {times} |")


if __name__ == "__main__":
    main()
