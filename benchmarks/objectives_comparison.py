"""Trains, certifies and compares all training objectives on digits, and writes tables and curves to
docs/results/objectives.md.

    bash scripts/objectives_comparison.sh

Each objective is trained twice for noise of 0.25 and 0.5: for as many epochs as all others, at the
papers' settings, and for as many as cost what SmoothMix costs then. Cost is counted in passes per
training image: 1 forward, 2 backward, 2 for the gradient of an image or its noise, 1 for each noisy
copy of a look at the training set. What a teacher costs comes on top and is stated beside it. One
setting of each objective is chosen on training images alone: a fifth of them is held out, a model
is trained on the rest with a quarter of the paper's value, that value and four times that value,
and the largest average certified radius on the held-out images wins. Then models of three seeds are
trained on all training images and certified on all test images.

The script runs the commands that a user would type, several at a time, and continues where it was
interrupted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import digits_comparison as digits
import numpy as np
from matplotlib.figure import Figure

from smoothadv.datasets import get_dataset
from smoothadv.records.readers import read_certification_log

SIGMAS, SEEDS, RADII = (0.25, 0.5), (0, 1, 2), (0.0, 0.25, 0.5, 0.75, 1.0)
EPOCHS, SELECTION_SEED = 30, 100
DRAWS, DRAWS_TO_SELECT, TEACHER_DRAWS = 10_000, 1_000, 1_000
FACTORS = (0.25, 1.0, 4.0)


@dataclass(frozen=True)
class Method:
    """An objective, its chosen flag with the papers' values by sigma, and its passes per image and
    epoch.

    ``options`` are further words for a number of epochs; ``teacher`` is the objective of the
    teacher.
    """

    name: str
    passes: Callable[[float, int], float]
    flag: str = ""
    paper: tuple[float, float] = (0.0, 0.0)
    options: Callable[[int, float], list[str]] = lambda epochs, sigma: []
    teacher: str = ""

    def value(self, sigma: float) -> float:
        return self.paper[SIGMAS.index(sigma)]


def constant(passes: float) -> Callable[[float, int], float]:
    return lambda sigma, epochs: passes


def _warmup(epochs: int, sigma: float) -> list[str]:
    return ["--warmup", str(max(1, epochs // 15))]


def _attack(epochs: int, sigma: float) -> list[str]:
    return ["--attack", "PGD", "--num-steps", "2", *_warmup(epochs, sigma)]


def _begin(epochs: int, sigma: float) -> int:
    """The papers' 60 and 70 of 150 epochs."""
    return round(epochs * (0.4 if sigma == 0.25 else 70 / 150))


def _weakness(epochs: int, sigma: float) -> list[str]:
    every = str(max(1, round(epochs / 15)))
    return ["--attack-from-epoch", str(_begin(epochs, sigma)), "--resample-every", every]


def _passes_of_weakness(sigma: float, epochs: int) -> float:
    begin, steps = _begin(epochs, sigma), 3 if sigma == 0.25 else 6
    looks = 100 + 16 * len(range(begin, epochs, max(1, round(epochs / 15))))
    return (12 * begin + (12 + 8 * steps) * (epochs - begin) + looks) / epochs


METHODS = (
    Method("gaussian", constant(3)),
    Method("smoothadv", constant(7), "--epsilon", (0.5, 0.5), _attack),
    Method("stability", constant(6), "--lambda", (2, 2)),
    Method("macer", constant(48), "--lambda", (12, 6)),
    Method("consistency", constant(6), "--lambda", (20, 10)),
    Method("smoothmix", constant(28), "--eta", (5, 5), _warmup),
    Method(
        "cat-rs",
        constant(56),
        "--lambda",
        (0.5, 1),
        lambda *_: ["--teacher-draws", str(TEACHER_DRAWS)],
        "gaussian",
    ),
    Method("acr-weakness", _passes_of_weakness, "--noise-step-size", (0.25, 0.25), _weakness),
    Method("distillation", constant(4), teacher="smoothmix"),
)
BY_NAME = {method.name: method for method in METHODS}
BUDGET = EPOCHS * 28
MODES = {"settings": "for 30 epochs", "cost": "at equal cost"}


def epochs_of(method: Method, sigma: float, mode: str) -> int:
    """How many epochs an objective is trained: EPOCHS, or as many as the budget of passes
    allows.
    """
    if mode == "settings":
        return EPOCHS
    return max(
        number
        for number in range(1, BUDGET)
        if number * method.passes(sigma, number) <= BUDGET * 1.01
    )


@dataclass(frozen=True)
class Job:
    """One model to train and certify."""

    method: Method
    sigma: float
    value: float
    seed: int
    epochs: int
    dataset: str
    images: int
    folder: Path
    draws: int = DRAWS

    @property
    def name(self) -> str:
        value = f"_{self.value:g}" if self.method.flag else ""
        return f"{self.method.name}{value}_sigma_{self.sigma}_epochs_{self.epochs}_seed_{self.seed}"

    @property
    def passes(self) -> float:
        """Of the training per image, without its teacher's."""
        return self.epochs * self.method.passes(self.sigma, self.epochs)

    @property
    def passes_of_teacher(self) -> float:
        """Of the teacher's training per image, and of its votes."""
        teacher = self.teacher()
        votes = (
            TEACHER_DRAWS
            if "--teacher-draws" in self.method.options(self.epochs, self.sigma)
            else 0
        )
        return 0 if teacher is None else teacher.passes + votes

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.tsv"

    @property
    def model(self) -> Path:
        return self.folder / "models" / self.name

    def teacher(self) -> Job | None:
        """The job that makes the teacher: at the paper's value, for as many epochs as all."""
        if not self.method.teacher:
            return None
        method = BY_NAME[self.method.teacher]
        value = method.value(self.sigma)
        return Job(
            method, self.sigma, value, self.seed, EPOCHS, self.dataset, self.images, self.folder
        )

    def train(self) -> None:
        """Train the model, unless it is there; its teacher first."""
        words = [
            self.dataset,
            "digits_resnet8",
            str(self.model),
            "--noise",
            str(self.sigma),
            "--seed",
            str(self.seed),
        ]
        words += [
            "--objective",
            self.method.name,
            "--epochs",
            str(self.epochs),
            "--evaluate-every",
            "1000",
            "--resume",
        ]
        words += ["--crop-padding", "0", "--no-horizontal-flip", "--batch", "128", "--lr", "0.1"]
        words += [
            "--lr-step-size",
            str(-(-self.epochs // 3)),
            *self.method.options(self.epochs, self.sigma),
        ]
        words += [self.method.flag, f"{self.value:g}"] if self.method.flag else []
        if teacher := self.teacher():
            words += ["--teacher", str(teacher.model / "checkpoint.pth.tar")]
        if not (self.model / "done").exists():
            digits.call("train", *words)
            (self.model / "done").touch()

    def run(self) -> None:
        """Train and certify, unless the log is complete."""
        if self.log.exists() and len(read_certification_log(self.log)) == self.images:
            return
        self.train()
        checkpoint = str(self.model / "checkpoint.pth.tar")
        words = [self.dataset, checkpoint, str(self.sigma), str(self.log), "--N", str(self.draws)]
        digits.call("certify", *words, "--precision", "bf16")


def run_all(jobs: list[Job], processes: int, what: str) -> None:
    """Train the teachers of the jobs, then run the jobs."""
    teachers = {job.teacher() for job in jobs} - {None}
    with digits.ThreadPoolExecutor(processes) as pool:
        list(pool.map(Job.train, sorted(teachers, key=lambda job: job.name)))
    digits.run_all(jobs, processes, what)


def select(folder: Path, processes: int) -> dict[tuple[str, float], float]:
    """The value of each objective's setting at each sigma, by the average radius on held-out
    training images.
    """
    dataset, images = digits.hold_out(folder / "held_out")
    jobs = [
        Job(
            method,
            sigma,
            factor * method.value(sigma),
            SELECTION_SEED,
            EPOCHS,
            dataset,
            images,
            where,
            DRAWS_TO_SELECT,
        )
        for method in METHODS
        for sigma in SIGMAS
        for factor in (FACTORS if method.flag else ())
        for where in [folder / "selection"]
    ]
    run_all(jobs, processes, "choosing")
    best: dict[tuple[str, float], Job] = {}
    for job in jobs:
        key = (job.method.name, job.sigma)
        if key not in best or average(job) > average(best[key]):
            best[key] = job
    return {key: job.value for key, job in best.items()}


def average(job: Job) -> float:
    """The average certified radius of a job's log."""
    return float(digits.average_radius(digits.certified_radii(job)))


def table(
    radii: dict[tuple[str, float, str], np.ndarray], jobs: dict[tuple[str, float, str], list[Job]]
) -> str:
    """The tables of both sigmas and modes; ``radii`` are [seeds, images]."""
    images = next(iter(radii.values())).shape[1]
    draws = np.random.default_rng(0).integers(images, size=(digits.RESAMPLES, images))
    lines = []
    for mode, sigma in (
        (mode, sigma) for mode in MODES for sigma in SIGMAS if ("gaussian", sigma, mode) in radii
    ):
        lines += ["", f"sigma = {sigma}, {MODES[mode]}:", ""]
        head = [
            "objective",
            "setting",
            "epochs",
            "passes",
            "average certified radius",
            "against Gaussian",
            "seeds",
        ]
        lines.append("| " + " | ".join([*head, *(f"{radius:.2f}" for radius in RADII)]) + " |")
        lines.append("|---|---|---:|---:|---:|---:|---:|" + "---:|" * len(RADII))
        for method in METHODS:
            key = (method.name, sigma, mode)
            if key not in radii:
                continue
            found, (job, *_) = radii[key], jobs[key]
            means = found.clip(min=0).mean(0)
            gain = means - radii["gaussian", sigma, mode].clip(min=0).mean(0)
            low, high = digits.interval(gain, draws)
            cells = [
                f"`{method.name}`",
                f"`{method.flag} {job.value:g}`" if method.flag else "",
                str(job.epochs),
            ]
            cells += [
                f"{job.passes:.0f}" + (f" + {job.passes_of_teacher:.0f}" if method.teacher else "")
            ]
            cells += [digits.cell(means, draws, 1, 3)]
            cells += [
                "" if method.name == "gaussian" else f"{gain.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
            ]
            cells += [", ".join(f"{digits.average_radius(seed):.3f}" for seed in found)]
            cells += [f"{100 * (found >= radius).mean():.1f}" for radius in RADII]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(
    radii: dict[tuple[str, float, str], np.ndarray], jobs: dict[tuple[str, float, str], list[Job]]
) -> Figure:
    """The average certified radius against the cost of training, for each sigma, a mark for each
    seed.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, sigma in zip(figure.subplots(1, len(SIGMAS)), SIGMAS):
        for number, (method, marker) in enumerate(zip(METHODS, "os^DvPX<>")):
            color = f"C{number}"
            keys = [
                (method.name, sigma, mode) for mode in MODES if (method.name, sigma, mode) in radii
            ]
            points = [
                (
                    jobs[key][0].passes + jobs[key][0].passes_of_teacher,
                    radii[key].clip(min=0).mean(1),
                )
                for key in keys
            ]
            points.sort(key=lambda point: point[0])
            axes.plot(
                [cost for cost, _ in points], [each.mean() for _, each in points], color=color
            )
            axes.plot([], [], color=color, marker=marker, markersize=4, label=method.name)
            for cost, each in points:
                axes.plot(
                    [cost] * len(each), each, marker, color=color, markersize=4, linestyle="none"
                )
        axes.set(
            xscale="log",
            xlabel="passes per training image, with its teacher's",
            title=f"sigma = {sigma}",
        )
    figure.axes[0].set_ylabel("average certified radius")
    figure.axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def main() -> None:
    """Select, train, certify, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("logs/objectives_comparison"),
        help="for models and logs",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="jobs at a time, with one thread each",
    )
    parser.add_argument(
        "--page", type=Path, default=digits.CODE.parent / "docs/results/objectives.md"
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="both unless asked otherwise"
    )
    options = parser.parse_args()
    folder, images = options.folder.resolve(), len(get_dataset("digits", "test"))
    chosen = select(folder, options.processes)
    jobs: dict[tuple[str, float, str], list[Job]] = {}
    for mode in options.modes:
        for method, sigma in ((method, sigma) for method in METHODS for sigma in SIGMAS):
            value, epochs = chosen.get((method.name, sigma), 0.0), epochs_of(method, sigma, mode)
            jobs[method.name, sigma, mode] = [
                Job(method, sigma, value, seed, epochs, "digits", images, folder) for seed in SEEDS
            ]
        group = [job for (_, _, of_mode), group in jobs.items() if of_mode == mode for job in group]
        run_all(
            list(dict.fromkeys(group)), options.processes, f"training and certifying {MODES[mode]}"
        )
        radii = {
            key: np.stack([digits.certified_radii(job) for job in group])
            for key, group in jobs.items()
        }
        text = "![average certified radius against cost](objectives.png)\n" + table(radii, jobs)
        digits.write_between(options.page, text, "objectives comparison")
        draw(radii, jobs).savefig(options.page.parent / "objectives.png", dpi=150)
        print(text)


if __name__ == "__main__":
    main()
