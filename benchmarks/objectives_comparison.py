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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import comparing
import numpy as np
from comparing import DRAWS, DRAWS_TO_SELECT, SEEDS, SELECTION_SEED, Job, cell, row
from digits_comparison import PLAIN_IMAGES, RADII, SIGMAS
from matplotlib.figure import Figure

EPOCHS, TEACHER_DRAWS = 30, 1_000
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
MODES = "settings", "cost"  # for EPOCHS, at equal cost


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
class Trained:
    """What is trained: an objective with the value of its flag, at a sigma, for so many epochs."""

    method: Method
    sigma: float
    value: float
    epochs: int

    @property
    def passes(self) -> float:
        """Of the training per image, without its teacher's."""
        return self.epochs * self.method.passes(self.sigma, self.epochs)

    @property
    def passes_of_teacher(self) -> float:
        """Of the teacher's training per image, and of its votes."""
        if self.teacher is None:
            return 0
        has_votes = "--teacher-draws" in self.method.options(self.epochs, self.sigma)
        return self.teacher.passes + TEACHER_DRAWS * has_votes

    @property
    def teacher(self) -> Trained | None:
        """What the teacher is: at the paper's value, trained for as many epochs as all."""
        if not self.method.teacher:
            return None
        method = BY_NAME[self.method.teacher]
        return Trained(method, self.sigma, method.value(self.sigma), EPOCHS)

    def job(self, folder: Path, seed: int, draws: int = DRAWS, dataset: str = "digits") -> Job:
        """The model of a seed."""
        epochs = self.epochs
        method = self.method
        needs = ()
        value = f"_{self.value:g}" if method.flag else ""
        name = f"{method.name}{value}_sigma_{self.sigma}_epochs_{epochs}_seed_{seed}"
        words = ["train", "--noise", str(self.sigma), "--seed", str(seed)]
        words += ["--objective", method.name, "--epochs", str(epochs), "--lr", "0.1"]
        words += ["--evaluate-every", "1000", "--lr-step-size", str(-(-epochs // 3))]
        words += [*PLAIN_IMAGES, *method.options(epochs, self.sigma)]
        words += [method.flag, f"{self.value:g}"] if method.flag else []
        if self.teacher is not None:
            needs = (self.teacher.job(folder, seed, draws, dataset),)
            words += ["--teacher", needs[0].checkpoint]
        how = ("--N", str(draws), "--precision", "bf16")
        return Job(folder, name, self.sigma, tuple(words), how, dataset, needs=needs)


def select(folder: Path, processes: int) -> dict[tuple[str, float], float]:
    """The value of each objective's setting at each sigma, by the average radius on held-out
    training images.
    """
    dataset = comparing.hold_out(folder / "held_out")
    where = folder / "selection"
    values = {
        (method.name, sigma): [factor * method.value(sigma) for factor in FACTORS]
        for method in METHODS
        for sigma in SIGMAS
        if method.flag
    }
    jobs = {
        (name, sigma): [
            Trained(BY_NAME[name], sigma, value, EPOCHS).job(
                where, SELECTION_SEED, DRAWS_TO_SELECT, dataset
            )
            for value in some
        ]
        for (name, sigma), some in values.items()
    }
    comparing.run_all(sum(jobs.values(), []), processes, "choosing")
    return {key: values[key][jobs[key].index(job)] for key, job in comparing.best(jobs).items()}


Key = tuple[str, float, str]
"""An objective, a sigma and a mode."""


def table(radii: dict[Key, np.ndarray], what: dict[Key, Trained]) -> str:
    """The tables of both sigmas, at equal cost; ``radii`` are [seeds, images]."""
    draws = comparing.resampled(next(iter(radii.values())).shape[1])
    names = ["objective", "setting", "epochs", "passes", "average certified radius"]
    lines = []
    names += ["against Gaussian"]
    for sigma in SIGMAS:
        lines += ["", f"sigma = {sigma}:", "", *comparing.head(names, RADII, 2)]
        base = radii["gaussian", sigma, "cost"].clip(min=0).mean(0)
        for method in METHODS:
            found = radii[method.name, sigma, "cost"]
            trained = what[method.name, sigma, "cost"]
            means = found.clip(min=0).mean(0)
            setting = f"`{method.flag} {trained.value:g}`" if method.flag else ""
            teacher = f" + {trained.passes_of_teacher:.0f}" if method.teacher else ""
            gain = "" if method.name == "gaussian" else cell(means - base, draws, 3, "+")
            cells = [f"`{method.name}`", setting, str(trained.epochs)]
            cells += [f"{trained.passes:.0f}{teacher}", cell(means, draws, 3), gain]
            lines.append(row([*cells, *comparing.shares(found, RADII)]))
    return "\n".join(lines)


def draw(radii: dict[Key, np.ndarray], what: dict[Key, Trained]) -> Figure:
    """The average certified radius against the cost of training, for each sigma, a mark for each
    seed.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, sigma in zip(figure.subplots(1, len(SIGMAS)), SIGMAS):
        for number, (method, marker) in enumerate(zip(METHODS, "os^DvPX<>")):
            style = {"color": f"C{number}", "marker": marker, "markersize": 4}
            keys = [(method.name, sigma, mode) for mode in MODES]
            points = [
                (what[key].passes + what[key].passes_of_teacher, radii[key].clip(min=0).mean(1))
                for key in keys
            ]
            points.sort(key=lambda point: point[0])
            costs = [cost for cost, _ in points]
            axes.plot(costs, [each.mean() for _, each in points], color=style["color"])
            axes.plot([], [], label=method.name, **style)
            for cost, each in points:
                axes.plot([cost] * len(each), each, linestyle="none", **style)
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
    options = comparing.parser_of(
        __doc__, "objectives_comparison", "results/objectives.md"
    ).parse_args()
    folder = options.folder.resolve()
    chosen = select(folder, options.processes)
    what = {
        (method.name, sigma, mode): Trained(
            method, sigma, chosen.get((method.name, sigma), 0.0), epochs_of(method, sigma, mode)
        )
        for mode in MODES
        for sigma in SIGMAS
        for method in METHODS
    }
    jobs = {key: [each.job(folder, seed) for seed in SEEDS] for key, each in what.items()}
    comparing.run_all(sum(jobs.values(), []), options.processes, "training and certifying")
    radii = comparing.stacked_radii(jobs)
    text = "![average certified radius against cost](objectives.png)\n" + table(radii, what)
    comparing.write_between(options.page, text, "objectives comparison")
    draw(radii, what).savefig(options.page.parent / "objectives.png", dpi=150)
    print(text)


if __name__ == "__main__":
    main()
