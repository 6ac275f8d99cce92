"""Wall time of training and certifying on a CPU beside k busy processes, by the number of threads
and how they wait.

    python benchmarks/threads.py            # prints the table
    python benchmarks/threads.py --write    # also puts it into benchmarks/results/threads.md

A process for each setting does the same pieces of work, in rounds in which the settings take turns;
shown are medians of the rounds. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from smoothadv.base.cpus import suitable_threads, usable_cpus
from smoothadv.cli import shorten_waiting

PAGE = Path(__file__).parent / "results" / "threads.md"
START, END = (
    "<!-- made by benchmarks/threads.py -->\n",
    "<!-- end of what benchmarks/threads.py made -->\n",
)
CPUS = str(usable_cpus())
DEFAULT = "default"
SETTINGS = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    f"{CPUS} threads": {"OMP_NUM_THREADS": CPUS},
    f"{CPUS} threads, passive": {"OMP_NUM_THREADS": CPUS, "OMP_WAIT_POLICY": "passive"},
    DEFAULT: {},
}
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"
TASKS = (
    "train digits_resnet8",
    "train cifar_resnet20",
    "certify digits_resnet8",
    "certify cifar_resnet20",
)


def work(setting: str) -> None:
    """Do the piece of work that each line of standard input names; answer with the seconds that it
    took.
    """
    if setting == DEFAULT:
        shorten_waiting()
    import torch

    import smoothadv
    from smoothadv.architectures import get_architecture
    from smoothadv.datasets import describe_dataset
    from smoothadv.objectives.gaussian import Gaussian
    from smoothadv.training.spec import EvaluationSchedule

    most = torch.get_num_threads()

    def task(name: str) -> Callable[[], object]:
        command, arch = name.split()
        data = describe_dataset("digits" if arch.startswith("digits") else "cifar10")
        if setting == DEFAULT:
            torch.set_num_threads(suitable_threads(data.image_shape, most))
        torch.manual_seed(0)
        images, model = (
            torch.rand(256, *data.image_shape),
            get_architecture(arch, data, "normalize"),
        )
        if command == "certify":
            return lambda: smoothadv.certify(
                model,
                images[:1],
                [0],
                sigma=0.25,
                n=4000 if arch.startswith("digits") else 300,
                device="cpu",
            )
        few = {
            "schedule": {"epochs": 1, "batch": 64},
            "tests": EvaluationSchedule(images=16),
            "quiet": True,
        }
        some, folder = (
            images if arch.startswith("digits") else images[:64],
            tempfile.mkdtemp(dir=outputs),
        )
        common = {
            "objective": Gaussian(noise_sd=0.25),
            "outdir": folder,
            "existing": "overwrite",
            "device": "cpu",
        }
        return lambda: smoothadv.train(
            model, some, torch.arange(len(some)) % 10, num_classes=10, **common, **few
        )

    with tempfile.TemporaryDirectory() as outputs:
        for line in sys.stdin:
            run = task(line.strip())
            start = time.perf_counter()
            run()
            print(time.perf_counter() - start, flush=True)


def start_worker(setting: str) -> subprocess.Popen[str]:
    """A process with this setting."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))
    }
    command = [sys.executable, __file__, "--work", setting]
    environment = {**kept, **SETTINGS[setting]}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def seconds(worker: subprocess.Popen[str], task: str) -> float:
    """How long a worker takes for a piece of work."""
    worker.stdin.write(f"{task}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def measure(competitors: list[int], rounds: int) -> dict[tuple[str, int], list[float]]:
    """The median seconds of each task beside so many competitors, one for each setting."""
    workers, medians = [start_worker(setting) for setting in SETTINGS], {}
    try:
        for task in TASKS:  # loads what is loaded late, and makes buffers
            for worker in workers:
                seconds(worker, task)
        for count in competitors:
            busy = [
                subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())])
                for _ in range(count)
            ]
            try:
                for task in TASKS:
                    times = [[seconds(worker, task) for worker in workers] for _ in range(rounds)]
                    medians[task, count] = [statistics.median(column) for column in zip(*times)]
                    print(
                        task,
                        count,
                        *(f"{median:.2f}" for median in medians[task, count]),
                        file=sys.stderr,
                    )
            finally:
                for process in busy:
                    process.kill()
    finally:
        for worker in workers:
            worker.kill()
    return medians


def table(medians: dict[tuple[str, int], list[float]], rounds: int) -> str:
    """The table and what follows from it, in Markdown."""
    columns = ["Work", "Busy processes", *SETTINGS, "default : best"]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    ratios = [times[-1] / min(times) for times in medians.values()]
    for ((task, count), times), ratio in zip(medians.items(), ratios):
        fields = [task, str(count), *(f"{one:.2f} s" for one in times), f"{ratio:.2f}"]
        lines.append("| " + " | ".join(fields) + " |")
    found = (
        f"Medians of {rounds} rounds on {CPUS} CPUs; the default takes at most {max(ratios):.2f} "
        "times as long as the"
    )
    return "\n".join([*lines, "", f"{found} best.", ""])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--competitors", type=int, nargs="+", default=[0, 2, 6])
    parser.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/results/threads.md"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    text = table(measure(options.competitors, options.rounds), options.rounds)
    print(text)
    if options.write:
        page = PAGE.read_text()
        PAGE.write_text(
            re.sub(f"{START}.*?{END}", lambda _: f"{START}\n{text}\n{END}", page, flags=re.DOTALL)
        )


if __name__ == "__main__":
    main()
