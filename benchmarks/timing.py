"""Functions timed in turns: what the benchmarks of speed share."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

HEAD = (
    "| case | precision | mode | batch | images/s | x plain | of the ceiling | peak MiB |",
    "|---|---|---|---:|---:|---:|---:|---:|",
)


@dataclass
class Line:
    """What is measured: images per second, their ratio to the first variant's, the share of the
    ceiling, and the peak memory in MiB; or the ``trouble``.
    """

    case: str
    precision: str
    mode: str
    batch: int
    rate: float = 0.0
    ratio: float = 0.0
    of_ceiling: float | None = None
    memory: float | None = None
    trouble: str = ""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.case, self.precision, self.mode, self.batch

    def row(self) -> str:
        """The line of a table in Markdown, below HEAD."""
        share = "" if self.of_ceiling is None else f"{self.of_ceiling:.1%}"
        memory = "" if self.memory is None else f"{self.memory:,.0f}"
        result = self.trouble or f"{self.rate:,.1f} | {self.ratio:.2f} | {share} | {memory}"
        return f"| {self.case} | {self.precision} | {self.mode} | {self.batch} | {result} |"


@dataclass
class Variant:
    """A function to time, which ``prepare`` returns and which processes ``images`` images.

    "deterministic" ``kernels`` are cuDNN's that training asks for, "sound" ones those of --sound;
    "any" are what PyTorch takes by default.
    """

    line: Line
    prepare: Callable[[], Callable[[], object]]
    images: int
    kernels: str = "any"

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Within, PyTorch takes these kernels, and TF32 where the precision is not "fp32"."""
        cudnn = torch.backends.cudnn
        algorithms = torch.get_deterministic_debug_mode()
        before = (cudnn.allow_tf32, cudnn.deterministic)
        memory = torch.utils.deterministic
        fills = memory.fill_uninitialized_memory
        memory.fill_uninitialized_memory = False  # as certify has it
        cudnn.allow_tf32 = self.line.precision != "fp32"
        cudnn.deterministic = self.kernels != "any"
        torch.set_deterministic_debug_mode("error" if self.kernels == "sound" else "default")
        try:
            yield
        finally:
            cudnn.allow_tf32, cudnn.deterministic = before
            memory.fill_uninitialized_memory = fills
            torch.set_deterministic_debug_mode(algorithms)


def parser_of(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that the benchmarks share; the first line of ``about`` is its
    description.
    """
    parser = argparse.ArgumentParser(
        description=(about or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=1, help="where the CPU computes")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.set_defaults(warm_ups=1, updates=0)
    return parser


def parsed(
    parser: argparse.ArgumentParser, arguments: list[str] | None = None
) -> argparse.Namespace:
    """The command line, with PyTorch limited to its --threads."""
    options = parser.parse_args(arguments)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: --device cpu shows whether the benchmark runs")
    options.usual = "tf32" if options.device.type == "cuda" else "fp32"  # of the plain loops
    if options.device.type == "cpu":
        torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what "sound" kernels need
    return options


def conditions(options: argparse.Namespace) -> str:
    """Under which the figures hold."""
    threads = f"{options.threads} threads"
    where = torch.cuda.get_device_name() if options.device.type == "cuda" else threads
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{options.rounds} rounds, {where}, {versions}"


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Processor time on one CPU thread, which other processes do not disturb; else wall time,
    before and after which the device is idle.
    """
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_alone else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


@contextlib.contextmanager
def noting_trouble(line: Line) -> Iterator[None]:
    """Within, an exception ends the block and becomes the line's ``trouble``; other variants are
    still measured.
    """
    try:
        yield
    except Exception as error:
        line.trouble = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if line.trouble and torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(variants: list[Variant], options: argparse.Namespace) -> list[Line]:
    """The lines of all variants, timed in turns: ``warm_ups`` times without counting, then
    ``rounds`` times. Rates and ratios to the first variant are medians over rounds.
    """
    runs: dict[int, Callable[[], object]] = {}
    times: list[list[float]] = [[] for _ in variants]
    on_gpu = options.device.type == "cuda"
    for number, variant in enumerate(variants):
        with noting_trouble(variant.line), variant.settings():
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            runs[number] = variant.prepare()
            for _ in range(options.warm_ups):
                seconds(runs[number], options.device)
            if on_gpu:
                variant.line.memory = torch.cuda.max_memory_allocated() / 2**20
    for _ in range(options.rounds):
        for number, variant in enumerate(variants):
            if not variant.line.trouble:
                with noting_trouble(variant.line), variant.settings():
                    taken = seconds(runs[number], options.device)
                    times[number].append(taken / variant.images)
    for variant, taken in zip(variants, times):
        if not variant.line.trouble:
            variant.line.rate = statistics.median(1 / each for each in taken)
        if not (variant.line.trouble or variants[0].line.trouble):
            ratios = (first / each for first, each in zip(times[0], taken))
            variant.line.ratio = statistics.median(ratios)
    return [variant.line for variant in variants]


def report(variants: list[Variant], options: argparse.Namespace) -> None:
    """Measure the variants and print the table."""
    lines = measured(variants, options)
    print(f"{conditions(options)}\n", *HEAD, *(line.row() for line in lines), sep="\n", flush=True)
