"""Attacked images per second, as ratios to the released code, which attacks one image at a time in
all its copies.

    python benchmarks/attack_speed.py --arch cifar_resnet20

Both attack the same random images with the same noise, alternating in this process. Printed are
medians over rounds of the ratio within a round, and the largest difference between the two results.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import plain_training
import torch
from timing import conditions, in_turns, parsed, parser_of, print_rates
from training_speed import SIGMA, settled

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.voting.classifier import default_attack_batch, optimized_for_inference

EPSILON = 0.5


def variants(
    network: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    copies: int,
    options: argparse.Namespace,
) -> dict[str, Callable[[], torch.Tensor]]:
    """The functions to time, by name, the plain attack first. Each returns the adversarial
    images.
    """
    plain = plain_training.pgd(EPSILON, options.steps)
    attacked = optimized_for_inference(network, options.device, images[0])
    batch = options.batch or default_attack_batch(
        attacked, tuple(images.shape[1:]), options.device, copies
    )
    ours = SmoothedAttack(PGD(EPSILON, options.steps), SIGMA, copies, batch=batch)
    noise = ours._noise(images, range(len(images)))
    eager = copy.deepcopy(network).eval()

    def attack_plainly() -> torch.Tensor:
        rows = [
            plain(eager, images[i : i + 1], labels[i : i + 1], noise[i : i + 1])
            for i in range(len(images))
        ]
        return torch.cat(rows).detach()

    return {
        "plain": attack_plainly,
        "ours": lambda: ours(attacked, images, labels, range(len(images))),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--arch", default="cifar_resnet20")
    parser.add_argument("--examples", type=int, default=192)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--batch",
        type=int,
        default=None,
        help="noisy images per pass (None: the default of the device)",
    )
    options = parsed(parser)
    print(f"{options.arch}, T={options.steps}, {conditions(options)}")
    network = settled(options.arch, options.device).eval()
    for copies in options.copies:
        count = max(1, options.examples // copies)
        images = torch.rand(count, 3, 32, 32, device=options.device)
        labels = torch.randint(10, (count,), device=options.device)
        runs = variants(network, images, labels, copies, options)
        found = {name: run() for name, run in runs.items()}
        difference = float((found["ours"] - found["plain"]).abs().max())
        times = in_turns(runs, options)
        print_rates(times, "plain", count, "images/s", before=f"m={copies:<4d} ", width=6)
        print(f"m={copies:<4d} largest difference of a pixel {difference:.1e}")


if __name__ == "__main__":
    main()
