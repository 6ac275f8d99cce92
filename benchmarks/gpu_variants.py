"""What gpu.py measures, and how: certification and updates of training in their variants, timed in
turns.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import plain_training
import torch
from certification_speed import DATASETS, SIGMA, counting, settled
from plain_certification import count_votes, gaussian
from training_speed import EPSILON, PLAIN, batch_of, updating
from training_speed import sgd as plain_sgd

from smoothadv.architectures import get_architecture
from smoothadv.attacks import ATTACKS
from smoothadv.base.distributed import Processes
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.datasets import describe_dataset
from smoothadv.noise import GaussianNoise, training_noise
from smoothadv.objectives import OBJECTIVES
from smoothadv.training.execution import Execution
from smoothadv.training.graphed import GraphedUpdate
from smoothadv.training.schedule import Schedule, optimizer_of
from smoothadv.training.update import Update
from smoothadv.voting.classifier import PRECISIONS, CompiledClassifier, optimized_for_inference
from smoothadv.voting.counter import VoteCounter

# (method, T, m) of SmoothAdv's updates.
UPDATES = {
    "PGD T=2 m=1": ("PGD", 2, 1),
    "PGD T=4 m=4": ("PGD", 4, 4),
    "PGD T=10 m=8": ("PGD", 10, 8),
}
UPDATES["DDN T=4 m=1"] = ("DDN", 4, 1)
PLAIN_BATCH = {"cifar_resnet110": 1000, "resnet50": 200}


@dataclass
class Measurement:
    """The result of one variant: images per second, their ratio to plain, share of the ceiling,
    peak memory in MiB.
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


@dataclass
class Variant:
    """A function to time, which ``prepare`` returns and which processes ``images`` images."""

    measurement: Measurement
    prepare: Callable[[], Callable[[], None]]
    images: int


@contextlib.contextmanager
def matrix_precision(precision: str) -> Iterator[None]:
    """Within, convolutions compute in full float32 for "fp32"; otherwise they may use TF32,
    PyTorch's default.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def product_precision(precision: str) -> str:
    """The name that the commands use for a precision."""
    return "fp32" if precision == "tf32" else precision


class Replayed(torch.nn.Module):
    """The module as a CUDA graph of one batch's kernels."""

    def __init__(self, module: torch.nn.Module, example: torch.Tensor) -> None:
        super().__init__()
        self._input = example.clone(memory_format=torch.preserve_format)
        with torch.inference_mode():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    module(self._input)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._output = module(self._input)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self._input.copy_(images)
        self._graph.replay()
        return self._output


def certifications(
    arch: str, precision: str, mode: str, options: argparse.Namespace
) -> list[Variant]:
    """The plain loop, then this package in a precision and mode, in every batch; mode "plain": the
    plain loop alone.
    """
    dataset, device = DATASETS.get(arch, "cifar10"), options.device
    description = describe_dataset(dataset)
    network, shape, classes = (
        settled(arch, dataset, device),
        description.image_shape,
        description.num_classes,
    )
    image = torch.rand(shape, device=device)
    case, plain_batch = f"certify {arch}", min(PLAIN_BATCH.get(arch, 400), options.draws)

    def plainly() -> None:
        count_votes(network, image, options.draws, plain_batch, classes, gaussian(SIGMA))

    precisions = ("tf32", precision) if mode == "plain" else ("tf32",)
    plain = [
        Variant(Measurement(case, each, "plain", plain_batch), lambda: plainly, options.draws)
        for each in precisions
    ]
    if mode == "plain":
        return plain

    def prepare(batch: int, draws: int) -> Callable[[], None]:
        voter = optimized_for_inference(network, device, precision=product_precision(precision))
        voter = CompiledClassifier(voter) if mode == "compiled" else voter
        if mode == "graph":
            example = torch.rand(batch, *shape, device=device).contiguous(
                memory_format=torch.channels_last
            )
            voter = Replayed(voter, example)
        # With a smaller batch the figures would be those of another variant.
        counter = VoteCounter([voter], [classes], batch, device, keep_batch=True)
        return counting(counter, GaussianNoise(SIGMA, 0), image, draws)

    variants = []
    for batch in options.batches:
        draws = -(-options.draws // batch) * batch
        made = functools.partial(prepare, batch, draws)
        variants.append(Variant(Measurement(case, precision, mode, batch), made, draws))
    return plain + variants


def updates(name: str, precision: str, mode: str, options: argparse.Namespace) -> list[Variant]:
    """The released update, then this package in a precision and mode."""
    method, steps, copies = UPDATES[name]
    arch, device, size = options.training_arch, options.device, options.training_batch
    torch.manual_seed(0)
    network = get_architecture(arch, "cifar10").to(device)
    with torch.no_grad():  # normalization gets the statistics of noisy images
        for _ in range(10):
            noise = SIGMA * torch.randn(min(64, size), 3, 32, 32, device=device)
            network(torch.rand_like(noise) + noise)
    images, labels = batch_of(network, size, device)
    plain, attack = copy.deepcopy(network), PLAIN[method](EPSILON, steps)
    optimizer = plain_sgd(plain)

    def update_plainly() -> None:
        part = size // copies
        for start in range(0, part * copies, part):
            chosen = slice(start, start + part)
            noise = training_noise(images[chosen], copies, SIGMA, None)
            plain_training.update(plain, optimizer, images[chosen], labels[chosen], noise, attack)

    case = f"train {arch} {name}"

    def prepare() -> Callable[[], None]:
        execution = Execution(product_precision(precision), mode == "compiled")
        model = execution.prepare(copy.deepcopy(network), device)
        objective = OBJECTIVES["smoothadv"](
            ATTACKS[method](EPSILON, steps), SIGMA, copies, warmup=0
        )
        ours = optimizer_of(Schedule(len(images), 1, 1e-12, 1), model, device)
        update = Update(
            model, objective, ours, execution, Processes(), device, images[:2], len(images)
        )
        if mode != "graph":
            return updating(update, images, labels)
        update.compute = GraphedUpdate(update)
        run = updating(update, images, labels)

        def run_graph() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error", DoubtfulWarning
                )  # else the line would be of updates without a graph
                run()

        return run_graph

    return [
        Variant(Measurement(case, "tf32", "plain", size), lambda: update_plainly, size),
        Variant(Measurement(case, precision, mode, size), prepare, size),
    ]


@contextlib.contextmanager
def noting_trouble(measurement: Measurement) -> Iterator[None]:
    """Within, an exception ends the block and becomes the measurement's ``trouble``; others are
    still measured.
    """
    try:
        yield
    except Exception as error:
        measurement.trouble = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if measurement.trouble and torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(variants: list[Variant], options: argparse.Namespace) -> list[Measurement]:
    """Time all variants in turns: ``warm_ups`` times without counting, then ``rounds`` times; a
    failure is recorded.
    """
    runs: dict[int, Callable[[], None]] = {}
    times: list[list[float]] = [[] for _ in variants]
    for number, variant in enumerate(variants):
        with noting_trouble(variant.measurement):
            if options.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with matrix_precision(variant.measurement.precision):
                runs[number] = variant.prepare()
            for _ in range(options.warm_ups):
                seconds(runs[number], variant.measurement.precision, options.device)
            if options.device.type == "cuda":
                variant.measurement.memory = torch.cuda.max_memory_allocated() / 2**20
    for _ in range(options.rounds):
        for number, variant in enumerate(variants):
            if not variant.measurement.trouble:
                with noting_trouble(variant.measurement):
                    took = seconds(runs[number], variant.measurement.precision, options.device)
                    times[number].append(took / variant.images)
    for variant, of_variant in zip(variants, times):
        if not variant.measurement.trouble:
            variant.measurement.rate = statistics.median(1 / each for each in of_variant)
        if not (variant.measurement.trouble or variants[0].measurement.trouble):
            variant.measurement.ratio = statistics.median(
                plain / each for plain, each in zip(times[0], of_variant)
            )
    return [variant.measurement for variant in variants]


def seconds(run: Callable[[], None], precision: str, device: torch.device) -> float:
    """Wall time; the device is idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    with matrix_precision(precision):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ceilings(device: torch.device, size: int) -> dict[str, float]:
    """Measured limits: bytes per second of a copy (read and written), FLOP per second of products
    of matrices.
    """
    source = torch.empty(16 * size * size, device=device)
    target = torch.empty_like(source)
    found = {"copy": 2 * source.nbytes / quickest(lambda: target.copy_(source), device)}
    for precision, dtype in {"fp32": torch.float32, "tf32": torch.float32, **PRECISIONS}.items():
        dtype = torch.float32 if precision in ("fp32", "tf32") else dtype
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[precision] = 2 * size**3 / quickest(lambda one=one, other=other: one @ other, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def quickest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of ten runs, after two runs to warm up."""
    times = []
    for _ in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[2:])
