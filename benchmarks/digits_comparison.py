"""Trains, certifies and compares four ways of training on digits, and writes the table to
docs/results/digits.md.

    bash scripts/digits_comparison.sh

Gaussian augmentation, Vanilla PGD, Vanilla PGD + noise (SmoothAdv, appendix C.1) and SmoothAdv, all
with the same network, epochs and attack steps, for noise of 0.25 and 0.5. The epsilon of each
method is chosen on training images alone: a fifth of them is held out, a model is trained on the
rest for each candidate, and the largest average certified radius on the held-out images wins. Then
models of three seeds are trained on all training images and certified on all test images.

The script runs the commands that a user would type, several at a time, and continues where it was
interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from smoothadv.datasets import get_dataset
from smoothadv.records.readers import read_certification_log

CODE = Path(__file__).parent.parent / "code"
SIGMAS = (0.25, 0.5)
EPSILONS = (0.125, 0.25, 0.5, 1.0, 2.0)
SEEDS = (0, 1, 2)
SELECTION_SEED = 100
RADII = (0.0, 0.25, 0.5, 0.75, 1.0)
STEPS, EPOCHS = 4, 60
DRAWS, DRAWS_TO_SELECT = 10_000, 1_000
RESAMPLES = 10_000


@dataclass(frozen=True)
class Method:
    """A way of training: its name in tables and files, and its options."""

    name: str
    file: str
    options: tuple[str, ...] = ()
    attacks: bool = True
    noise: bool = True
    copies: int = 1
    schedule: tuple[str, ...] = ("--epochs", str(EPOCHS))

    def command(self, sigma: float, epsilon: float | None) -> list[str]:
        """The words of train or train_pgd with the options of the method."""
        noise = ["--noise", str(sigma if self.noise else 0.0), *self.schedule]
        if not self.attacks:
            return ["train", *noise]
        attack = ["--attack", "PGD", "--epsilon", str(epsilon), "--num-steps", str(STEPS)]
        return ["train_pgd", *noise, *attack, "--num-noise-vec", str(self.copies), *self.options]


GAUSSIAN = Method("Gaussian", "gaussian", attacks=False)
VANILLA = Method("Vanilla PGD", "vanilla", noise=False)
VANILLA_NOISE = Method("Vanilla PGD + noise", "vanilla_noise", ("--base-attack",))
SMOOTHADV = Method("SmoothAdv", "smoothadv")
SMOOTHADV_4 = Method("SmoothAdv, m = 4", "smoothadv_m4", copies=4)
FAST = Method("SmoothAdv, recipe `fast`", "smoothadv_fast", schedule=("--recipe", "fast"))
METHODS = (GAUSSIAN, VANILLA, VANILLA_NOISE, SMOOTHADV, SMOOTHADV_4, FAST)


@dataclass(frozen=True)
class Job:
    """One model to train and certify."""

    method: Method
    sigma: float
    epsilon: float | None
    seed: int
    dataset: str
    images: int
    folder: Path
    draws: int = DRAWS

    @property
    def name(self) -> str:
        epsilon = "" if self.epsilon is None else f"_eps_{self.epsilon}"
        return f"{self.method.file}_sigma_{self.sigma}{epsilon}_seed_{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.tsv"

    def run(self) -> None:
        """Run both commands, unless the log is complete."""
        if self.log.exists() and len(read_certification_log(self.log)) == self.images:
            return
        model = self.folder / "models" / self.name
        command, *options = self.method.command(self.sigma, self.epsilon)
        train = [self.dataset, "digits_resnet8", str(model), *options, "--resume"]
        call(
            command,
            *train,
            "--seed",
            str(self.seed),
            "--crop-padding",
            "0",
            "--no-horizontal-flip",
            "--batch",
            "128",
        )
        checkpoint = str(model / "checkpoint.pth.tar")
        call(
            "certify",
            self.dataset,
            checkpoint,
            str(self.sigma),
            str(self.log),
            "--N",
            str(self.draws),
        )


def call(command: str, *arguments: str) -> str:
    """What a command of this clone prints, on the CPU with one thread; SystemExit with all of it
    where it fails.
    """
    device = [] if command == "quantize" else ["--device", "cpu"]
    words = [sys.executable, str(CODE / f"{command}.py"), *arguments, *device]
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def run_all(jobs: Sequence[Any], processes: int, what: str) -> None:
    """Run the jobs, which have a method ``run``, ``processes`` of them at a time."""
    with ThreadPoolExecutor(processes) as pool:
        for _ in tqdm(pool.map(lambda job: job.run(), jobs), what, len(jobs), disable=None):
            pass


def hold_out(folder: Path) -> tuple[str, int]:
    """Make a dataset of training images, every fifth of a class for testing; its name and the
    number of those.
    """
    images = get_dataset("digits", "train")
    seen = [0] * 10
    for index in range(len(images)):
        image, label = images[index]
        split = "test" if seen[label] % 5 == 4 else "train"
        seen[label] += 1
        path = folder / split / str(label) / f"{index:04d}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image[0] * 255).round().byte().numpy()).save(path)
    return f"imagefolder:{folder}", sum(count // 5 for count in seen)


def certified_radii(job: Job) -> np.ndarray:
    """The radius of each image, in order; -1 where the class is wrong or the classifier
    abstains.
    """
    log = read_certification_log(job.log)
    return np.where(log.correct == 1, log.radius, -1.0)


def average_radius(radii: np.ndarray) -> np.ndarray:
    return radii.clip(min=0).mean(-1)


def select(folder: Path, processes: int) -> dict[tuple[Method, float], float]:
    """The epsilon of each attacking method at each sigma, by the average radius on held-out
    training images.
    """
    dataset, images = hold_out(folder / "held_out")
    choices = itertools.product((VANILLA, VANILLA_NOISE, SMOOTHADV), SIGMAS, EPSILONS)
    jobs = [
        Job(
            method,
            sigma,
            epsilon,
            SELECTION_SEED,
            dataset,
            images,
            folder / "selection",
            DRAWS_TO_SELECT,
        )
        for method, sigma, epsilon in choices
    ]
    run_all(jobs, processes, "choosing epsilon")
    best: dict[tuple[Method, float], Job] = {}
    for job in jobs:
        key = (job.method, job.sigma)
        if key not in best or average_radius(certified_radii(job)) > average_radius(
            certified_radii(best[key])
        ):
            best[key] = job
    chosen = {key: job.epsilon for key, job in best.items()}
    return chosen | {
        (method, sigma): chosen[SMOOTHADV, sigma]
        for method in (SMOOTHADV_4, FAST)
        for sigma in SIGMAS
    }


def interval(values: np.ndarray, draws: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval over test images: values [images], draws [resamples, images] of
    indices.
    """
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(low), float(high)


def cell(values: np.ndarray, draws: np.ndarray, scale: float, digits: int) -> str:
    low, high = interval(values, draws)
    return (
        f"{scale * values.mean():.{digits}f} [{scale * low:.{digits}f}, {scale * high:.{digits}f}]"
    )


def table(
    radii: dict[tuple[Method, float], np.ndarray], epsilons: dict[tuple[Method, float], float]
) -> str:
    """The tables for both sigmas; ``radii`` are [seeds, images]."""
    images = next(iter(radii.values())).shape[1]
    draws = np.random.default_rng(0).integers(images, size=(RESAMPLES, images))
    lines = []
    for sigma in SIGMAS:
        lines += ["", f"sigma = {sigma}:", ""]
        lines.append(
            "| training | epsilon | average certified radius | seeds | "
            + " | ".join(f"{r:.2f}" for r in RADII)
            + " |"
        )
        lines.append("|---|---:|---:|---:|" + "---:|" * len(RADII))
        for method in METHODS:
            found = radii[method, sigma]
            by_seed = ", ".join(f"{average_radius(seed):.3f}" for seed in found)
            accuracies = [cell((found >= radius).mean(0), draws, 100, 1) for radius in RADII]
            epsilon = epsilons.get((method, sigma))
            average = cell(found.clip(min=0).mean(0), draws, 1, 3)
            cells = [
                method.name,
                "" if epsilon is None else f"{epsilon:g}",
                average,
                by_seed,
                *accuracies,
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
        lines += differences(radii, sigma, draws)
    return "\n".join(lines)


def differences(
    radii: dict[tuple[Method, float], np.ndarray], sigma: float, draws: np.ndarray
) -> list[str]:
    """Differences of average radii on the same images, for pairs in the order that the paper
    found.
    """
    pairs = [
        (SMOOTHADV, GAUSSIAN),
        (SMOOTHADV, VANILLA_NOISE),
        (VANILLA_NOISE, VANILLA),
        (VANILLA_NOISE, GAUSSIAN),
    ]
    lines = []
    for above, below in pairs:
        values = (radii[above, sigma].clip(min=0) - radii[below, sigma].clip(min=0)).mean(0)
        low, high = interval(values, draws)
        verdict = "above" if low > 0 else "below" if high < 0 else "not distinguishable from"
        lines.append(
            f"- {above.name} {verdict} {below.name}: average radius {values.mean():+.3f} "
            f"[{low:+.3f}, {high:+.3f}]"
        )
    return lines


def write_between(page: Path, text: str, name: str = "digits comparison") -> None:
    """Replace what is between the markers of that name on a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    content = page.read_text()
    if begin not in content or end not in content:
        raise SystemExit(f"{page} lacks the line {begin} or {end}")
    head, rest = content.split(begin)
    page.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    """Select, train, certify, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("logs/digits_comparison"), help="for models and logs"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="jobs at a time, with one thread each",
    )
    parser.add_argument("--page", type=Path, default=CODE.parent / "docs" / "results" / "digits.md")
    options = parser.parse_args()
    folder = options.folder.resolve()
    epsilons = select(folder, options.processes)
    images = len(get_dataset("digits", "test"))
    jobs = {
        (method, sigma): [
            Job(method, sigma, epsilons.get((method, sigma)), seed, "digits", images, folder)
            for seed in SEEDS
        ]
        for method in METHODS
        for sigma in SIGMAS
    }
    run_all(
        [job for group in jobs.values() for job in group],
        options.processes,
        "training and certifying",
    )
    radii = {key: np.stack([certified_radii(job) for job in group]) for key, group in jobs.items()}
    text = table(radii, epsilons)
    write_between(options.page, text)
    print(text)


if __name__ == "__main__":
    main()
