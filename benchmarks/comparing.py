"""What the comparisons on digits share: the commands that a user would type, and tables of radii
with paired intervals over images. All continue where they were interrupted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from tqdm import tqdm

from smoothadv.datasets import get_dataset
from smoothadv.records.readers import read_certification_log

ROOT = Path(__file__).parent.parent
SEEDS = (0, 1, 2)
SELECTION_SEED = 100
DRAWS = 10_000
DRAWS_TO_SELECT = 1_000
RESAMPLES = 10_000
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Job:
    """A model to train and certify.

    ``training`` are the command and its options, ``certifying`` further words of ``certify``.
    ``needs`` are jobs whose checkpoints these words name.
    """

    folder: Path
    name: str
    sigma: float
    training: tuple[str, ...]
    certifying: tuple[str, ...] = ("--N", str(DRAWS))
    dataset: str = "digits"
    arch: str = "digits_resnet8"
    needs: tuple[Job, ...] = ()

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.tsv"

    @property
    def model(self) -> Path:
        return self.folder / "models" / self.name

    @property
    def checkpoint(self) -> str:
        return str(self.model / "checkpoint.pth.tar")

    @property
    def certified(self) -> str:
        """The checkpoint that is certified."""
        return self.checkpoint

    def make(self) -> None:
        """Run the command that trains the model."""
        command, *options = self.training
        call(command, self.dataset, self.arch, str(self.model), *options, "--resume")

    def train(self) -> None:
        """Make the model, unless it is there."""
        if not (self.model / "done").exists():
            self.make()
            (self.model / "done").touch()

    def run(self) -> None:
        """Train and certify, unless the log is complete."""
        images = len(get_dataset(self.dataset, "test"))
        if self.log.exists() and len(read_certification_log(self.log)) == images:
            return
        self.train()
        words = [self.dataset, self.certified, str(self.sigma), str(self.log)]
        call("certify", *words, *self.certifying)


def call(command: str, *arguments: str) -> str:
    """What a command of this clone prints, on the CPU with one thread; SystemExit with all of it
    where it fails.
    """
    device = [] if command == "quantize" else ["--device", "cpu"]
    words = [sys.executable, str(ROOT / "code" / f"{command}.py"), *arguments, *device]
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def run_all(jobs: Iterable[Job], processes: int, what: str) -> None:
    """Train what the jobs need, then run the jobs, ``processes`` of them at a time."""
    with ThreadPoolExecutor(processes) as pool:
        jobs = list(dict.fromkeys(jobs))
        for wave in reversed(list(_needed(jobs))):
            list(pool.map(Job.train, wave))
        for _ in tqdm(pool.map(Job.run, jobs), what, len(jobs), disable=None):
            pass


def _needed(jobs: Iterable[Job]) -> Iterable[list[Job]]:
    """The jobs that these need, those that they need in turn, and so on."""
    while jobs := list(dict.fromkeys(need for job in jobs for need in job.needs)):
        yield jobs


def best(jobs: Mapping[Key, Sequence[Job]]) -> dict[Key, Job]:
    """Of each group the job with the largest average radius, the first of equals."""
    return {
        key: max(group, key=lambda job: average_radius(certified_radii(job.log)))
        for key, group in jobs.items()
    }


def hold_out(folder: Path) -> str:
    """Make a dataset of training images, every fifth of a class for testing; its name."""
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
    return f"imagefolder:{folder}"


def certified_radii(log: Path) -> np.ndarray:
    """The radius of each image, in order; -1 where the class is wrong or the classifier
    abstains.
    """
    rows = read_certification_log(log)
    return np.where(rows.correct == 1, rows.radius, -1.0)


def stacked_radii(jobs: Mapping[Key, Sequence[Job]]) -> dict[Key, np.ndarray]:
    """The radii [seeds, images] of each group."""
    return {
        key: np.stack([certified_radii(job.log) for job in group]) for key, group in jobs.items()
    }


def average_radius(radii: np.ndarray) -> np.ndarray:
    return radii.clip(min=0).mean(-1)


def resampled(images: int) -> np.ndarray:
    """Indices [resamples, images] of bootstrap samples."""
    return np.random.default_rng(0).integers(images, size=(RESAMPLES, images))


def interval(values: np.ndarray, draws: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval over test images of values [images]; draws: see
    ``resampled``.
    """
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(low), float(high)


def cell(values: np.ndarray, draws: np.ndarray, digits: int, sign: str = "") -> str:
    """The mean of values [images] with its interval; ``sign`` "+" for a difference."""
    mean, low, high = (
        f"{value:{sign}.{digits}f}" for value in (values.mean(), *interval(values, draws))
    )
    return f"{mean} [{low}, {high}]"


def shares(radii: np.ndarray, at: Iterable[float]) -> list[str]:
    """Certified accuracies in percent, of radii [seeds, images]."""
    return [f"{100 * (radii >= radius).mean():.1f}" for radius in at]


def head(names: Iterable[str], radii: Iterable[float], texts: int) -> list[str]:
    """The first two lines of a table with a column for each radius; the first columns have text."""
    columns = [*names, *(f"{radius:.2f}" for radius in radii)]
    return [row(columns), "|" + "---|" * texts + "---:|" * (len(columns) - texts)]


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write_between(page: Path, text: str, name: str) -> None:
    """Replace what is between the markers of that name on a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    content = page.read_text()
    if begin not in content or end not in content:
        raise SystemExit(f"{page} lacks the line {begin} or {end}")
    before, rest = content.split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def parser_of(about: str | None, name: str, page: str) -> argparse.ArgumentParser:
    """The options of all comparisons."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    folder = Path(f"logs/{name}")
    parser.add_argument("--folder", type=Path, default=folder, help="for models and logs")
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="jobs at a time, with one thread each",
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / page)
    return parser
