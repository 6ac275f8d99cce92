"""Functions timed in turns: what the benchmarks of speed share."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Times = list[dict[str, float]]
"""Of each round, the seconds of each function by its name."""


def parser_of(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that the benchmarks share; the first line of ``about`` is its
    description.
    """
    parser = argparse.ArgumentParser(
        description=(about or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with PyTorch limited to its --threads."""
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def conditions(options: argparse.Namespace) -> str:
    """Under which the figures hold."""
    threads = f"{options.threads} threads"
    where = torch.cuda.get_device_name() if options.device.type == "cuda" else threads
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{options.rounds} rounds, {where}, {versions}"


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Processor time on one CPU thread, which other processes do not disturb; else wall time."""
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_alone else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def in_turns(runs: Mapping[str, Callable[[], object]], options: argparse.Namespace) -> Times:
    """The times of the functions, which alternate, after each has run once to warm up."""
    for run in runs.values():
        run()
    return [
        {name: seconds(run, options.device) for name, run in runs.items()}
        for _ in range(options.rounds)
    ]


def print_rates(
    times: Times, base: str, amount: float, unit: str, *, before: str = "", width: int = 34
) -> None:
    """A line for each function: how much of ``amount`` it does in a second, and that as a multiple
    of ``base``'s; medians over the rounds.
    """
    for name in times[0]:
        rate = statistics.median(amount / each[name] for each in times)
        ratio = statistics.median(each[base] / each[name] for each in times)
        print(f"{before}{name:{width}s} {rate:12,.1f} {unit} {ratio:8.2f} x {base}", flush=True)
