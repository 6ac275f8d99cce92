"""What a GPU would have to do, counted without one: kernels, bytes, waits of the host and memory.

    python benchmarks/counted_cost.py cases               # the cases whose ceilings the tests hold
    python benchmarks/counted_cost.py vote --arch resnet50 --precision bf16 --shares 1 5 41 \\
        --noise gaussian sound
    python benchmarks/counted_cost.py vote --arch resnet50 --precision integers --noise sound
    python benchmarks/counted_cost.py forward --arch cifar_resnet110 --batch 4096 --operators
    python benchmarks/counted_cost.py update --arch resnet50 --attack DDN --steps 4 --copies 1 \\
        --processes 8 --json
    python benchmarks/counted_cost.py update --graph      # the host launches its kernels together

The code of the commands runs on tensors without data (see counting.py), in seconds. "Bytes" and
"launches" are the times that these would take alone, at a bandwidth and a duration of a launch that
the options state; a GPU needs at least the longer one. A vote is one batch of certification: noise,
forward pass and votes, where that many images share the batch. An update is one step of training
after the first. "Added" is what an update needs more in one of several processes than in a single
process, each with a batch of this size; NCCL's own work is one launch per exchange.

Not counted are compiled networks, and what kernels do inside: where batch normalization or the
input of a convolution takes cuDNN two kernels, one is counted. Convolutions of --precision bf16 in
training follow a model of torch.autocast, which knows no meta device.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import torch
from certification_speed import DATASETS, SIGMA, quantized
from counting import META, Counted, page
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from smoothadv.architectures import get_architecture
from smoothadv.attacks import ATTACKS
from smoothadv.base.distributed import Processes
from smoothadv.datasets import describe_dataset
from smoothadv.noise import GaussianNoise, Noise, RoundedGaussianNoise, derive_generator
from smoothadv.objectives import OBJECTIVES
from smoothadv.statistics import Draws
from smoothadv.training.execution import CONVOLUTION_DTYPES, Execution
from smoothadv.training.graphed import GraphedUpdate
from smoothadv.training.schedule import Schedule, optimizer_of
from smoothadv.training.update import Address, Update
from smoothadv.voting.classifier import PRECISIONS, VotingClassifier, optimized_for_inference
from smoothadv.voting.counter import Poll, VoteCounter

NOISES: dict[str, type[Noise]] = {"gaussian": GaussianNoise, "sound": RoundedGaussianNoise}
EPSILON, INTEGERS = 0.5, "integers"


@dataclass(frozen=True)
class Case:
    """Something that is counted: ``run`` does it for ``images`` images."""

    name: str
    images: int
    run: Callable[[], Counted]


@functools.cache
def network_of(arch: str) -> torch.nn.Module:
    """The architecture with random weights, on the host."""
    return get_architecture(arch, _dataset(arch)).eval()


@functools.cache
def voter_of(arch: str, precision: str, sound: bool = False) -> VotingClassifier:
    """The network as it votes; with --sound all kernels have to be deterministic."""
    if precision == INTEGERS:
        from smoothadv.exact.kernels import KernelNetwork

        voter = optimized_for_inference(
            quantized(network_of(arch), torch.rand(2, *_shape(arch))), torch.device("cpu")
        )
        voter.use(KernelNetwork(voter.integers))
        return voter.to(META)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(sound)
    try:
        return optimized_for_inference(network_of(arch), META, precision=precision)
    finally:
        torch.use_deterministic_algorithms(before)


def _dataset(arch: str) -> str:
    return DATASETS.get(arch, "digits" if arch.startswith("digits") else "cifar10")


def _shape(arch: str) -> tuple[int, ...]:
    return describe_dataset(_dataset(arch)).image_shape


def forward(arch: str, batch: int, precision: str) -> Counted:
    """The network's forward pass on noisy images in memory."""
    voter = voter_of(arch, precision)
    images = torch.empty(batch, *_shape(arch), device=META, memory_format=torch.channels_last)
    with Counted() as counted, torch.inference_mode():
        voter(images)
    return counted


def noise(arch: str, batch: int, kind: str) -> Counted:
    """The noise of a batch of one image's draws."""
    images = torch.empty(batch, *_shape(arch), device=META, memory_format=torch.channels_last)
    image, stream = torch.empty(_shape(arch), device=META), NOISES[kind](SIGMA, 0).stream(0, META)
    with Counted() as counted, torch.inference_mode(), as_on_cuda(counted):
        with counted.paused():
            stream.fill(
                images, image, 0
            )  # the thresholds of sound noise are copied to the device once
        stream.fill(images, image, 0)
    return counted


def vote(arch: str, batch: int, precision: str, shares: int, kind: str) -> Counted:
    """A batch of certification that ``shares`` images share, from the images to the votes on the
    host.
    """
    voter, classes = (
        voter_of(arch, precision, kind == "sound"),
        describe_dataset(_dataset(arch)).num_classes,
    )
    counter = VoteCounter(voter, classes, batch, META, dtype=voter.dtype)
    made, image = NOISES[kind](SIGMA, 0), torch.zeros(_shape(arch))

    def voting(draws: int):
        return (yield Draws(draws))

    def polls(draws: int) -> list[Poll]:
        """Images of equally many draws, but for the last one, which fill the batch."""
        rest = [min(draws, batch - start) for start in range(0, batch, draws)]
        return [
            Poll(image, made.stream(index, META), voting(each)) for index, each in enumerate(rest)
        ]

    with Counted() as counted, as_on_cuda(counted):
        with counted.paused():
            list(counter.run(polls(batch)))
        list(counter.run(polls(-(-batch // shares))))
    return counted


def update(
    arch: str,
    batch: int,
    precision: str,
    attack: str | None,
    steps: int,
    copies: int,
    processes: int = 1,
    graph: bool = False,
) -> Counted:
    """An update of training in one of ``processes`` processes, each with a batch of that size,
    perhaps by a graph.
    """
    execution, group = Execution(precision), Processes()
    group.size = processes
    with META:
        model = execution.prepare(get_architecture(arch, _dataset(arch)), META)
    objective = OBJECTIVES["gaussian"](SIGMA)
    if attack is not None:
        objective = OBJECTIVES["smoothadv"](
            ATTACKS[attack](EPSILON, steps), SIGMA, copies, warmup=0
        )
    images = torch.empty(batch, *_shape(arch), device=META, memory_format=torch.channels_last)
    labels = torch.empty(batch, dtype=torch.int64, device=META)
    with Counted() as counted, without_values(counted):
        with counted.paused():
            optimizer = optimizer_of(Schedule(batch, 1, 0.1, 1), model, META)
            step = Update(model, objective, optimizer, execution, group, META, images[:2], batch)
            step.compute = GraphedUpdate(step) if graph else step.compute
            for number in range(
                1 + graph
            ):  # the first one makes the optimizer's buffers, the second one a graph
                step(images, labels, batch * processes, slice(0, batch), Address(0, 0, number), 1.0)
        step(images, labels, batch * processes, slice(0, batch), Address(0, 0, 2), 1.0)
    return counted


_update_once = functools.cache(update)


def added(*arguments: object, processes: int, graph: bool = False) -> Counted:
    """What an update needs more in one of ``processes`` processes than in a single one."""
    several, one = (
        update(*arguments, processes=processes, graph=graph),
        _update_once(*arguments, graph=graph),
    )
    several.peak -= one.peak
    several.launches -= one.launches
    for counts, of_one in (
        (several.kernels, one.kernels),
        (several.bytes, one.bytes),
        (several.waits, one.waits),
    ):
        counts.subtract(of_one)
    return several


@contextlib.contextmanager
def without_values(counted: Counted) -> Iterator[None]:
    """What an update asks of torch that tensors without data, or a single process, do not offer."""

    def exchanged(tensor: torch.Tensor, *others: object) -> None:
        counted.launch("exchange", 1, 2 * tensor.nbytes)

    with contextlib.ExitStack() as stack:
        for target, replacement in {
            "torch.distributed.all_reduce": exchanged,
            "torch.distributed.broadcast": exchanged,
            # There are no generators on the meta device: those of the host draw nothing there.
            "smoothadv.training.update.derive_generator": lambda device, *key: derive_generator(
                "cpu", *key
            ),
            # Whether folding changes the logits cannot be seen without data.
            "smoothadv.voting.folding.agree": lambda *functions: True,
            "smoothadv.training.execution.runs": lambda *calls: True,
            "smoothadv.training.execution.are_offered_on": lambda device: True,
            "torch.autocast": lambda device, dtype, **options: Autocast(dtype),
            "torch.equal": lambda *tensors: True,
            "smoothadv.training.schedule.has_cuda_graphs": lambda device: True,
            "smoothadv.training.graphed.cuda": cuda_without_values(counted),
        }.items():
            stack.enter_context(mock.patch(target, replacement))
        yield


def cuda_without_values(counted: Counted) -> mock.Mock:
    """What graphs need of torch.cuda."""

    @contextlib.contextmanager
    def recording(graph: mock.Mock, **options: object) -> Iterator[None]:
        with Counted() as inside:
            yield
        graph.replay = partial(counted.launch_graph, inside)

    cuda = mock.Mock(graph=recording, CUDAGraph=mock.Mock, mem_get_info=lambda device: (0, 0))
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.memory_allocated = cuda.memory_reserved = cuda.max_memory_allocated = lambda device: 0
    return cuda


@contextlib.contextmanager
def as_on_cuda(counted: Counted) -> Iterator[None]:
    """What is chosen for CUDA devices alone: Triton's kernels of the noise, and copies that wait
    for nothing else.
    """

    def launch(
        kernel: str,
        out: torch.Tensor,
        plan: torch.Tensor,
        per_counter: int,
        *tables: object,
        **sizes: int,
    ) -> None:
        counted.launch(f"{kernel} noise", 1, out.nbytes + plan.nbytes)

    def to_host(values: torch.Tensor) -> Callable[[], torch.Tensor]:
        counted.wait("votes of a batch, once the next is queued")
        host = values.to("cpu", non_blocking=True)
        return lambda: host

    def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        return values.to(device, non_blocking=True)

    def launch_integers(
        kernel: object, blocks: int, *arguments: object, **constants: object
    ) -> None:
        counted.launch(
            "convolution of integers", 1, sum(getattr(each, "nbytes", 0) for each in arguments)
        )

    kernels = SimpleNamespace(launch=launch, gaussian="Gaussian", rounded="rounded")
    with contextlib.ExitStack() as stack:
        for target, replacement in {
            "smoothadv.noise.streams.kernels_on": lambda device: kernels,
            "smoothadv.noise.streams.to_device": to_device,
            "smoothadv.voting.counter.to_device": to_device,
            "smoothadv.voting.counter.to_host": to_host,
            **({"smoothadv.exact.kernels.launch": launch_integers} if find_spec("triton") else {}),
        }.items():
            stack.enter_context(mock.patch(target, replacement))
        yield


class Autocast(TorchFunctionMode):
    """As torch.autocast does with networks: convolutions and linear layers in ``dtype``, losses in
    float32.
    """

    LOW = (F.conv1d, F.conv2d, F.conv3d, F.linear)
    HIGH = (F.cross_entropy, F.log_softmax, F.softmax, F.nll_loss)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        dtype = (
            self.dtype if function in self.LOW else torch.float32 if function in self.HIGH else None
        )
        if dtype is not None:
            args = [
                arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
                for arg in args
            ]
        return function(*args, **(kwargs or {}))


def standard_cases() -> list[Case]:
    """The cases whose ceilings the tests hold."""
    small, large = "cifar_resnet110", "resnet50"
    cases = [
        Case(f"noise {arch} {kind}", 4096, partial(noise, arch, 4096, kind))
        for arch in (small, large)
        for kind in NOISES
    ]
    for arch in (small, large):
        for precision in ("bf16", "fp32"):
            cases.append(
                Case(f"forward {arch} {precision}", 4096, partial(forward, arch, 4096, precision))
            )
    votes = [(small, shares, "gaussian") for shares in (1, 5, 41)] + [
        (large, 1, kind) for kind in NOISES
    ]
    for arch, shares, kind in votes:
        name = f"vote {arch} bf16 {kind}, shares: {shares}"
        cases.append(Case(name, 4096, partial(vote, arch, 4096, "bf16", shares, kind)))
    cases.append(
        Case(
            f"vote {small} {INTEGERS} sound, shares: 1",
            4096,
            partial(vote, small, 4096, INTEGERS, 1, "sound"),
        )
    )
    for arch, steps, copies in ((small, 2, 1), (small, 10, 8), (large, 2, 1)):
        cases.append(_update_case(arch, 256, "fp32", "PGD", steps, copies))
    cases.append(_update_case(small, 256, "fp32", "PGD", 2, 1, graph=True))
    cases.append(_update_case("cifar_resnet20", 256, "fp32", "DDN", 4, 1))
    name = f"added by 8 processes {small} fp32 PGD T=2 m=1"
    adding = partial(added, small, 256, "fp32", "PGD", 2, 1, processes=8)
    return [*cases, Case(name, 256, adding)]


def _update_case(
    arch: str,
    batch: int,
    precision: str,
    attack: str | None,
    steps: int,
    copies: int,
    graph: bool = False,
) -> Case:
    chosen = "no attack" if attack is None else f"{attack} T={steps} m={copies}"
    run = partial(_update_once, arch, batch, precision, attack, steps, copies, graph=graph)
    return Case(f"update {arch} {precision} {chosen}{', as a graph' * graph}", batch, run)


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    if options.way == "cases":
        return standard_cases()
    arch, batch = options.arch, options.batch
    if options.way == "noise":
        return [
            Case(f"noise {arch} {kind}", batch, partial(noise, arch, batch, kind))
            for kind in options.noise
        ]
    precision = options.precision
    if options.way == "forward":
        return [
            Case(f"forward {arch} {precision}", batch, partial(forward, arch, batch, precision))
        ]
    if options.way == "vote":
        return [
            Case(
                f"vote {arch} {precision} {kind}, shares: {shares}",
                batch,
                partial(vote, arch, batch, precision, shares, kind),
            )
            for kind in options.noise
            for shares in options.shares
        ]
    attack = None if options.attack == "none" else options.attack
    case = _update_case(
        arch, batch, precision, attack, options.steps, options.copies, options.graph
    )
    if options.processes == 1:
        return [case]
    each = (arch, batch, precision, attack, options.steps, options.copies)
    name = f"added by {options.processes} processes {case.name.partition(' ')[2]}"
    return [
        case,
        Case(name, batch, partial(added, *each, processes=options.processes, graph=options.graph)),
    ]


def figures(case: Case, bandwidth: float, launch: float) -> dict[str, object]:
    """The counts of a case, and the times in ms at a bandwidth in TB/s and a duration of a launch
    in us.
    """
    counted = case.run()
    kernels, moved = sum(counted.kernels.values()), sum(counted.bytes.values())
    return {
        "case": case.name,
        "images": case.images,
        "kernels": kernels,
        "launches": counted.launches,
        "bytes": moved,
        "waits": {reason: count for reason, count in counted.waits.items() if count},
        "peak": counted.peak,
        "bytes_ms": moved / bandwidth / 1e9,
        "launches_ms": counted.launches * launch / 1e3,
        "operators": {
            name: {"kernels": count, "bytes": counted.bytes[name]}
            for name, count in counted.kernels.most_common()
            if count or counted.bytes[name]
        },
    }


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--device-bandwidth",
        type=float,
        default=4.3,
        help="TB/s (default: that of an H200's copies)",
    )
    shared.add_argument(
        "--launch", type=float, default=5.0, help="us from one launch to the next (default: 5)"
    )
    shared.add_argument(
        "--json",
        action="store_true",
        help="print JSON, with the kernels and bytes of each operator",
    )
    shared.add_argument("--operators", action="store_true", help="add a table of operators")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_subparsers(dest="way", required=True)
    ways.add_parser("cases", parents=[shared], help="the cases whose ceilings the tests hold")
    made = {
        name: ways.add_parser(name, parents=[shared])
        for name in ("noise", "forward", "vote", "update")
    }
    for name, way in made.items():
        way.add_argument("--arch", default="cifar_resnet110")
        way.add_argument("--batch", type=int, default=256 if name == "update" else 4096)
    for name in ("noise", "vote"):
        made[name].add_argument("--noise", nargs="+", choices=list(NOISES), default=list(NOISES))
    for name in ("forward", "vote"):
        made[name].add_argument("--precision", choices=[*PRECISIONS, INTEGERS], default="bf16")
    made["vote"].add_argument(
        "--shares", nargs="+", type=int, default=[1, 5, 41], help="images sharing a batch"
    )
    way = made["update"]
    way.add_argument("--precision", choices=list(CONVOLUTION_DTYPES), default="fp32")
    way.add_argument("--attack", choices=[*ATTACKS, "none"], default="PGD")
    way.add_argument("--steps", type=int, default=2, help="T")
    way.add_argument("--copies", type=int, default=1, help="m, the noise draws per image")
    way.add_argument(
        "--graph",
        action="store_true",
        help="made as a CUDA graph, whose kernels are launched together",
    )
    way.add_argument(
        "--processes", type=int, default=1, help="count also what data parallelism adds"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Count and print."""
    options = parsed(arguments)
    rows = [
        figures(case, options.device_bandwidth, options.launch) for case in chosen_cases(options)
    ]
    print(json.dumps(rows, indent=1) if options.json else page(rows, options.operators))


if __name__ == "__main__":
    main()
