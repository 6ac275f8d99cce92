"""Speed on an accelerator: certification and training, compared with plain loops and with the limits of the chip.

    python benchmarks/gpu.py                               # everything; nearly an hour on one GPU, mostly to compile
    python benchmarks/gpu.py --minutes 9                   # as much as that allows; the same command again continues
    python benchmarks/gpu.py --only certify --archs cifar_resnet110 --precision bf16 fp16 --modes compiled
    python benchmarks/gpu.py --smoke --device cpu          # whether it runs; a minute, 50 s of it to compile

"Plain" means Cohen et al.'s sampling loop and the released SmoothAdv update, eager in float32 (convolutions in TF32,
which is PyTorch's default, unless the line says fp32). Every precision and mode is a part of its own, in which its
variants alternate with the plain one; ratios and rates are medians over rounds. Results are written after each part,
and what is in the file already is not measured again. A variant that fails, for example as the memory is too small for
its batch, becomes a line that says so. Rates include all the work: drawing noise, counting votes, updating weights.
"graph" replays the forward pass of a batch as a CUDA graph, which the commands do not do: it shows what launching
kernels costs.

The ceiling of a case is the smaller of two rates: measured copy bandwidth divided by its bytes, and measured matrix
speed divided by its FLOP. The bytes are those of the activations that even fused kernels have to move.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import plain_training
import torch
from certification_speed import DATASETS, SIGMA, counting, settled
from plain_certification import count_votes, gaussian
from training_speed import EPSILON, PLAIN, batch_of, sgd, updating

from smoothadv.architectures import get_architecture
from smoothadv.attacks import ATTACKS
from smoothadv.datasets import describe_dataset
from smoothadv.noise import GaussianNoise, training_noise
from smoothadv.objectives import OBJECTIVES
from smoothadv.smoothing.classifier import PRECISIONS, CompiledClassifier, arrange
from smoothadv.smoothing.voting import VoteCounter
from smoothadv.training.execution import Execution
from smoothadv.training.processes import Processes
from smoothadv.training.update import Update

# (method, T, m) of SmoothAdv's updates.
UPDATES = {"PGD T=2 m=1": ("PGD", 2, 1), "PGD T=4 m=4": ("PGD", 4, 4), "PGD T=10 m=8": ("PGD", 10, 8)}
UPDATES["DDN T=4 m=1"] = ("DDN", 4, 1)
MODES = ("eager", "compiled", "graph")
TRAINING_PRECISIONS = ("fp32", "tf32", "bf16")
CERTIFICATION_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PLAIN_BATCH = {"cifar_resnet110": 1000, "resnet50": 200}
# What --smoke makes of the options: little, since a CPU without AVX-512 emulates bf16, ten times slower than float32.
SMOKE = {
    "archs": ["digits_resnet8"],
    "training_arch": "digits_resnet8",
    "batches": [2],
    "draws": 4,
    "training_batch": 4,
    "rounds": 1,
    "warm_ups": 1,
    "matrix_size": 64,
}


@dataclass(frozen=True)
class Work:
    """FLOP and bytes (with 2-byte activations) per image of a forward pass, a step of an attack, and an update.

    For ResNet-110 at 32x32 and ResNet-50 at 224x224. Every convolution reads its input and writes its output once;
    normalization, sum and ReLU are fused into it; an update also stores the inputs of normalizations.
    """

    flop: tuple[float, float, float]
    bytes: tuple[float, float, float]


WORK = {
    "cifar_resnet110": Work((0.506e9, 1.01e9, 1.52e9), (5.3e6, 11.3e6, 32e6)),
    "resnet50": Work((8.18e9, 16.4e9, 24.5e9), (56.6e6, 121e6, 340e6)),
}


@dataclass
class Measurement:
    """The result of one variant: images per second, their ratio to plain, share of the ceiling, peak memory in MiB."""

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
    """Within, convolutions compute in full float32 for "fp32"; otherwise they may use TF32, PyTorch's default."""
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


def ways(
    options: argparse.Namespace, precisions: tuple[str, ...], modes: tuple[str, ...], is_first: bool
) -> list[tuple[str, str]]:
    """The chosen ones of the given precisions and modes in which a case is measured: every pair of them.

    With --smoke the first case is measured in every precision in the first mode and in every mode in the first
    precision, the other cases in the first pair: the other pairs run the same code again.
    """
    chosen = [precision for precision in options.precision if precision in precisions]
    pairs = [(precision, mode) for precision in chosen for mode in options.modes if mode in modes]
    if options.smoke and pairs:
        precision, mode = pairs[0]
        pairs = [pair for pair in pairs if pair[0] == precision or pair[1] == mode] if is_first else pairs[:1]
    return pairs


def certifications(arch: str, precision: str, mode: str, options: argparse.Namespace) -> list[Variant]:
    """The plain loop, then this package in a precision and mode, in every batch; mode "plain": the plain loop alone."""
    dataset, device = DATASETS.get(arch, "cifar10"), options.device
    description = describe_dataset(dataset)
    network, shape, classes = settled(arch, dataset, device), description.image_shape, description.num_classes
    image = torch.rand(shape, device=device)
    case, plain_batch = f"certify {arch}", min(PLAIN_BATCH.get(arch, 400), options.draws)

    def plainly() -> None:
        count_votes(network, image, options.draws, plain_batch, classes, gaussian(SIGMA))

    precisions = ("tf32", precision) if mode == "plain" else ("tf32",)
    plain = [
        Variant(Measurement(case, each, "plain", plain_batch), lambda: plainly, options.draws) for each in precisions
    ]
    if mode == "plain":
        return plain

    def prepare(batch: int, draws: int) -> Callable[[], None]:
        voter = arrange(network, device, precision=product_precision(precision))
        voter = CompiledClassifier(voter) if mode == "compiled" else voter
        if mode == "graph":
            example = torch.rand(batch, *shape, device=device).contiguous(memory_format=torch.channels_last)
            voter = Replayed(voter, example)
        # With a smaller batch the figures would be those of another variant.
        counter = VoteCounter(voter, classes, batch, device, keep_batch=True)
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
    optimizer = sgd(plain)

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
        objective = OBJECTIVES["smoothadv"](ATTACKS[method](EPSILON, steps), SIGMA, copies, warmup=0)
        update = Update(model, objective, sgd(model), execution, Processes(), device, images[:2], len(images))
        return updating(update, images, labels)

    return [
        Variant(Measurement(case, "tf32", "plain", size), lambda: update_plainly, size),
        Variant(Measurement(case, precision, mode, size), prepare, size),
    ]


@contextlib.contextmanager
def noting_trouble(measurement: Measurement) -> Iterator[None]:
    """Within, an exception ends the block and becomes the measurement's ``trouble``; others are still measured."""
    try:
        yield
    except Exception as error:
        measurement.trouble = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if measurement.trouble and torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(variants: list[Variant], options: argparse.Namespace) -> list[Measurement]:
    """Time all variants in turns: ``warm_ups`` times without counting, then ``rounds`` times; a failure is recorded."""
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
            variant.measurement.ratio = statistics.median(plain / each for plain, each in zip(times[0], of_variant))
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
    """Measured limits: bytes per second of a copy (read and written), FLOP per second of products of matrices."""
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


def relate(measurement: Measurement, found: dict[str, float]) -> None:
    """Set the share of the ceiling, if the work of the case is known."""
    kind, arch, *name = measurement.case.split(" ", 2)
    if arch not in WORK or not measurement.rate:
        return
    work = WORK[arch]
    if kind == "certify":
        flop, moved = work.flop[0], work.bytes[0]
    else:
        _, steps, copies = UPDATES[name[0]]
        flop, moved = (copies * (steps * each[1] + each[2]) for each in (work.flop, work.bytes))
    moved *= 2 if measurement.precision in ("fp32", "tf32") else 1
    ceiling = min(found["copy"] / moved, found[measurement.precision] / flop)
    measurement.of_ceiling = measurement.rate / ceiling


def page(facts: dict[str, object], found: dict[str, float], measurements: list[Measurement]) -> str:
    """The results as Markdown."""
    lines = [f"# Speed on {facts['device']}", "", ", ".join(f"{key} {value}" for key, value in facts.items()), ""]
    lines += [f"Measured ceilings: copy {found['copy'] / 1e9:,.0f} GB/s; matrix products in TFLOP/s: "]
    lines[-1] += ", ".join(f"{name} {rate / 1e12:,.1f}" for name, rate in found.items() if name != "copy")
    lines += ["", "| case | precision | mode | batch | images/s | x plain | of the ceiling | peak MiB |"]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|"]
    for each in measurements:
        share = "" if each.of_ceiling is None else f"{each.of_ceiling:.1%}"
        memory = "" if each.memory is None else f"{each.memory:,.0f}"
        result = each.trouble or f"{each.rate:,.1f} | {each.ratio:.2f} | {share} | {memory}"
        lines.append(f"| {each.case} | {each.precision} | {each.mode} | {each.batch} | {result} |")
    return "\n".join(lines) + "\n"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; --smoke makes all sizes tiny."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="check that everything runs: tiny networks and sizes")
    parser.add_argument("--only", nargs="+", choices=("certify", "train"), default=["certify", "train"])
    parser.add_argument("--archs", nargs="+", default=["cifar_resnet110", "resnet50"], help="networks to certify")
    parser.add_argument("--training-arch", default="cifar_resnet110")
    parser.add_argument("--cases", nargs="+", choices=list(UPDATES), default=list(UPDATES), help="training updates")
    parser.add_argument("--precision", nargs="+", choices=CERTIFICATION_PRECISIONS, default=["tf32", "bf16", "fp16"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", "compiled", "graph"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1024, 4096], help="batches of certification")
    parser.add_argument("--draws", type=int, default=16_384, help="per round and variant")
    parser.add_argument("--training-batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=None, help="begin no part that may not end within this time")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for JSON and Markdown")
    parser.set_defaults(warm_ups=2, matrix_size=8192)
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
        options.cases = [case for case in options.cases if UPDATES[case][2] <= options.training_batch]
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: --smoke --device cpu shows whether the benchmark runs")
    if options.device.type == "cpu":
        options.modes = [mode for mode in options.modes if mode != "graph"]
    return options


def parts(options: argparse.Namespace) -> list[tuple[str, str, str, str]]:
    """What to measure: kind, architecture or update, precision, mode."""
    chosen = []
    for arch in options.archs if "certify" in options.only else ():
        if options.device.type == "cuda":
            chosen.append(("certify", arch, "fp32", "plain"))
        pairs = ways(options, CERTIFICATION_PRECISIONS, MODES, arch == options.archs[0])
        chosen += [("certify", arch, *pair) for pair in pairs]
    for case in options.cases if "train" in options.only else ():
        pairs = ways(options, TRAINING_PRECISIONS, ("eager", "compiled"), case == options.cases[0])
        chosen += [("train", case, *pair) for pair in pairs]
    return chosen


def begun(options: argparse.Namespace, facts: dict[str, object]) -> tuple[Path, dict]:
    """The file of results so far with these facts, whatever its date, and what it holds; a new one if there is none."""
    device = str(facts["device"]).replace(" ", "_")
    for path in sorted(options.out.glob(f"gpu_*_{device}.json"), reverse=True):
        content = json.loads(path.read_text())
        if {**content["facts"], "date": ""} == {**facts, "date": ""}:
            return path, content
    path = options.out / f"gpu_{facts['date']}_{device}.json"
    if path.exists():
        raise SystemExit(f"{path} has results of other settings: move it, or give another --out")
    return path, {"facts": facts, "ceilings": ceilings(options.device, options.matrix_size), "measurements": []}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write, one part after another."""
    options = parsed(arguments)
    start, longest = time.monotonic(), 0.0
    name = torch.cuda.get_device_name() if options.device.type == "cuda" else platform.machine()
    facts = {"device": name, "date": date.today().isoformat(), "PyTorch": torch.__version__}
    facts |= {"CUDA": torch.version.cuda, "Python": platform.python_version(), "rounds": options.rounds}
    facts |= {"draws": options.draws, "batches": options.batches, "training_batch": options.training_batch}
    options.out.mkdir(parents=True, exist_ok=True)
    path, content = begun(options, facts)
    found, measurements = content["ceilings"], [Measurement(**each) for each in content["measurements"]]

    def lines() -> set[tuple[str, str, str]]:
        return {(each.case, each.precision, each.mode) for each in measurements}

    waiting = []
    for part in parts(options):
        kind, name, precision, mode = part
        case = f"certify {name}" if kind == "certify" else f"train {options.training_arch} {name}"
        if (case, precision, mode) not in lines():
            waiting.append(part)
    for number, (kind, name, precision, mode) in enumerate(waiting):
        began = time.monotonic()
        if options.minutes is not None and began - start + longest > 60 * options.minutes:
            print(f"{len(waiting) - number} parts remain: the same command again continues", file=sys.stderr)
            break
        make = certifications if kind == "certify" else updates
        done = measured(make(name, precision, mode, options), options)
        for each in done:
            relate(each, found)
            if each.mode != "plain" or (each.case, each.precision, each.mode) not in lines():
                measurements.append(each)
        content["measurements"] = [asdict(each) for each in measurements]
        # Written after each part, so that the results so far are not lost with the machine.
        path.write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(content["facts"], found, measurements))
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()  # the next part compiles its own network
        longest = max(longest, time.monotonic() - began)
    print(page(content["facts"], found, measurements), end="")


if __name__ == "__main__":
    main()
