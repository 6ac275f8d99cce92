"""Attacked images per second, as ratios to the released code, which attacks one image at a time in
all its copies.

    python benchmarks/attack_speed.py --arch cifar_resnet20
    python benchmarks/attack_speed.py --device cuda --arch cifar_resnet110 --examples 512

Both attack the same random images with the same noise, alternating in this process. Printed are
medians over rounds of the ratio within a round, and the largest difference between the two results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import plain_training
import torch
from networks import SIGMA, prepared
from timing import Line, Variant, parsed, parser_of, report

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.voting.classifier import default_attack_batch, optimized_for_inference

EPSILON = 0.5


def variants(copies: int, options: argparse.Namespace) -> list[Variant]:
    """The plain attack and this package's, in so many copies of each image."""
    count = max(1, options.examples // copies)
    device = options.device
    network = prepared(options.arch, device, options.updates)
    images = torch.rand(count, 3, 32, 32, device=device)
    labels = torch.randint(10, (count,), device=device)
    plain = plain_training.pgd(EPSILON, options.steps)
    attacked = optimized_for_inference(network, device, images[0])
    batch = options.batch or default_attack_batch(attacked, (3, 32, 32), device, copies)
    ours = SmoothedAttack(PGD(EPSILON, options.steps), SIGMA, copies, batch=batch)
    noise = ours._noise(images, range(count))

    def attack_plainly() -> torch.Tensor:
        rows = [
            plain(network, images[i : i + 1], labels[i : i + 1], noise[i : i + 1])
            for i in range(count)
        ]
        return torch.cat(rows).detach()

    def attack() -> torch.Tensor:
        return ours(attacked, images, labels, range(count))

    difference = float((attack() - attack_plainly()).abs().max())
    print(f"m = {copies}: largest difference of a pixel {difference:.1e}")
    runs: dict[str, Callable[[], object]] = {"plain": attack_plainly, "eager": attack}
    case = f"attack {options.arch} T={options.steps} m={copies}"
    return [
        Variant(Line(case, options.usual, mode, copies if mode == "plain" else batch), made, count)
        for mode, made in ((mode, lambda run=run: run) for mode, run in runs.items())
    ]


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--arch", default="cifar_resnet20")
    parser.add_argument("--examples", type=int, default=192, help="noisy images")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--batch",
        type=int,
        default=None,
        help="noisy images per pass (None: the default of the device)",
    )
    options = parsed(parser, arguments)
    for copies in options.copies:
        report(variants(copies, options), options)


if __name__ == "__main__":
    main()
