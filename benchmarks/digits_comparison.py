"""Trains, certifies and compares four ways of training on digits, and writes the table to
docs/results/digits.md.

    bash scripts/digits_comparison.sh

Gaussian augmentation, Vanilla PGD, Vanilla PGD + noise (SmoothAdv, appendix C.1) and SmoothAdv, all
with the same network, epochs and attack steps, for noise of 0.25 and 0.5. The epsilon of each
method is chosen on training images alone: a fifth of them is held out, a model is trained on the
rest for each candidate, and the largest average certified radius on the held-out images wins. Then
models of three seeds are trained on all training images and certified on all test images.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import comparing
import numpy as np
from comparing import Job, cell, row

SIGMAS = (0.25, 0.5)
EPSILONS = (0.125, 0.25, 0.5, 1.0, 2.0)
RADII = (0.0, 0.25, 0.5, 0.75, 1.0)
EPOCHS = ("--epochs", "60")
PLAIN_IMAGES = ("--crop-padding", "0", "--no-horizontal-flip", "--batch", "128")


@dataclass(frozen=True)
class Method:
    """A way of training: its name in tables and files, and its options."""

    name: str
    file: str
    options: tuple[str, ...] = ()
    attacks: bool = True
    noise: bool = True
    copies: int = 1
    schedule: tuple[str, ...] = EPOCHS

    def job(
        self, folder: Path, sigma: float, epsilon: float | None, seed: int, **more: object
    ) -> Job:
        """The model of an epsilon (None: without an attack) and a seed."""
        words = ["train", "--noise", str(sigma if self.noise else 0.0), *self.schedule]
        name = f"{self.file}_sigma_{sigma}"
        if self.attacks:
            words[0] = "train_pgd"
            name = f"{name}_eps_{epsilon}"
            words += ["--attack", "PGD", "--epsilon", str(epsilon), "--num-steps", "4"]
            words += ["--num-noise-vec", str(self.copies), *self.options]
        words += ["--seed", str(seed), *PLAIN_IMAGES]
        return Job(folder, f"{name}_seed_{seed}", sigma, tuple(words), **more)


GAUSSIAN = Method("Gaussian", "gaussian", attacks=False)
VANILLA = Method("Vanilla PGD", "vanilla", noise=False)
VANILLA_NOISE = Method("Vanilla PGD + noise", "vanilla_noise", ("--base-attack",))
SMOOTHADV = Method("SmoothAdv", "smoothadv")
SMOOTHADV_4 = Method("SmoothAdv, m = 4", "smoothadv_m4", copies=4)
FAST = Method("SmoothAdv, recipe `fast`", "smoothadv_fast", schedule=("--recipe", "fast"))
METHODS = (GAUSSIAN, VANILLA, VANILLA_NOISE, SMOOTHADV, SMOOTHADV_4, FAST)
PAIRS = (
    (SMOOTHADV, GAUSSIAN),
    (SMOOTHADV, VANILLA_NOISE),
    (VANILLA_NOISE, VANILLA),
    (VANILLA_NOISE, GAUSSIAN),
)
"""In the order that the paper found."""
Radii = dict[tuple[Method, float], np.ndarray]
Epsilons = dict[tuple[Method, float], float | None]


def select(folder: Path, processes: int) -> Epsilons:
    """The epsilon of each method at each sigma, by the average radius on held-out training images;
    of SmoothAdv's variants that of SmoothAdv.
    """
    held_out = comparing.hold_out(folder / "held_out")
    where = folder / "selection"
    more = {"dataset": held_out, "certifying": ("--N", str(comparing.DRAWS_TO_SELECT))}
    jobs = {
        (method, sigma): [
            method.job(where, sigma, epsilon, comparing.SELECTION_SEED, **more)
            for epsilon in EPSILONS
        ]
        for method in (VANILLA, VANILLA_NOISE, SMOOTHADV)
        for sigma in SIGMAS
    }
    comparing.run_all(sum(jobs.values(), []), processes, "choosing epsilon")
    found = {key: EPSILONS[jobs[key].index(job)] for key, job in comparing.best(jobs).items()}
    variants = {
        (m, sigma): found[SMOOTHADV, sigma] for m in (SMOOTHADV_4, FAST) for sigma in SIGMAS
    }
    return {(GAUSSIAN, sigma): None for sigma in SIGMAS} | found | variants


def table(radii: Radii, epsilons: Epsilons) -> str:
    """The tables for both sigmas; ``radii`` are [seeds, images]."""
    draws = comparing.resampled(next(iter(radii.values())).shape[1])
    names = ["training", "epsilon", "average certified radius"]
    lines = []
    for sigma in SIGMAS:
        lines += ["", f"sigma = {sigma}:", "", *comparing.head(names, RADII, 1)]
        for method in METHODS:
            found = radii[method, sigma]
            epsilon = epsilons[method, sigma]
            cells = [method.name, "" if epsilon is None else f"{epsilon:g}"]
            cells.append(cell(found.clip(min=0).mean(0), draws, 3))
            lines.append(row([*cells, *comparing.shares(found, RADII)]))
        lines.append("")
        for above, below in PAIRS:
            values = radii[above, sigma].clip(min=0) - radii[below, sigma].clip(min=0)
            low, high = comparing.interval(values.mean(0), draws)
            verdict = "above" if low > 0 else "below" if high < 0 else "not distinguishable from"
            gain = cell(values.mean(0), draws, 3, "+")
            lines.append(f"- {above.name} {verdict} {below.name}: average radius {gain}")
    return "\n".join(lines)


def main() -> None:
    """Select, train, certify, compare."""
    parser = comparing.parser_of(__doc__, "digits_comparison", "results/digits.md")
    options = parser.parse_args()
    folder = options.folder.resolve()
    epsilons = select(folder, options.processes)
    jobs = {
        (method, sigma): [
            method.job(folder, sigma, epsilons[method, sigma], seed) for seed in comparing.SEEDS
        ]
        for method in METHODS
        for sigma in SIGMAS
    }
    comparing.run_all(sum(jobs.values(), []), options.processes, "training and certifying")
    text = table(comparing.stacked_radii(jobs), epsilons)
    comparing.write_between(options.page, text, "digits comparison")
    print(text)


if __name__ == "__main__":
    main()
