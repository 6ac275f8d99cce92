"""Noisy samples per second of certification, as a ratio to a plain eager float32 loop over the same
network.

    python benchmarks/certification_speed.py --plain-batch 100 400 1000 --draws 1000 \\
        --rounds 5 --precision fp32 bf16 --compile --integers
    python benchmarks/certification_speed.py --arch resnet50 --plain-batch 8 --draws 16 \\
        --batch 8 --compile

All variants alternate in this process, and include drawing the noise and counting the votes.
Printed are medians over rounds of the ratio within a round. The last lines give the speed of
drawing noise alone. Weights are random, because speed does not depend on them; the statistics of
normalization come from noise-like images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from plain_certification import count_votes, gaussian
from timing import conditions, in_turns, parsed, parser_of, print_rates

from smoothadv.architectures import get_architecture
from smoothadv.datasets import describe_dataset
from smoothadv.exact.conversion import convert, read_network
from smoothadv.exact.network import IntegerNetwork
from smoothadv.noise import GaussianNoise, Noise, RoundedGaussianNoise
from smoothadv.statistics import Draws
from smoothadv.voting.classifier import (
    PRECISIONS,
    CompiledClassifier,
    VotingClassifier,
    default_batch,
    optimized_for_inference,
)
from smoothadv.voting.counter import Poll, VoteCounter, check_exact

SIGMA = 0.25
DATASETS = {"resnet50": "imagenet"}
INTEGERS = "integers"


def settled(arch: str, dataset: str, device: torch.device) -> torch.nn.Module:
    """The architecture in eval mode, whose batch normalization has the statistics of noise-like
    images.
    """
    torch.manual_seed(0)
    network = get_architecture(arch, dataset).to(device).train()
    with torch.no_grad():
        for _ in range(3):
            network(torch.rand(16, *describe_dataset(dataset).image_shape, device=device))
    return network.eval()


def counting(
    counter: VoteCounter, noise: Noise, image: torch.Tensor, draws: int
) -> Callable[[], None]:
    """A function that counts votes as certification does."""

    def voting():
        return (yield Draws(draws))

    def run() -> None:
        for _ in counter.run([Poll(image, (noise.stream(0, counter.device),), voting())]):
            pass

    return run


def filling(
    noise: Noise, image: torch.Tensor, batch: int, draws: int, device: torch.device
) -> Callable[[], None]:
    """A function that only draws the noise."""
    out = torch.empty(batch, *image.shape, device=device).to(memory_format=torch.channels_last)
    stream = noise.stream(0, device)

    def run() -> None:
        for start in range(0, draws, batch):
            stream.fill(out, image, start)

    return run


def quantized(classifier: torch.nn.Module, images: torch.Tensor) -> IntegerNetwork:
    """The network of integers, calibrated on ``images``."""
    floats = read_network(classifier, shape := tuple(images.shape[1:]))
    return convert(floats, [images], shape, RoundedGaussianNoise(SIGMA, 0).clip)


def voter_of(
    network: torch.nn.Module, kind: str, shape: tuple[int, ...], device: torch.device
) -> VotingClassifier:
    """The classifier in a precision, or in integers, as it votes."""
    if kind != INTEGERS:
        return optimized_for_inference(network, device, precision=kind)
    levels = (torch.rand(64, *shape) + SIGMA * torch.randn(64, *shape)) * 255
    return optimized_for_inference(quantized(network, levels.round() / 255), device)


def variants(options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """The functions to time, by name, the plain loop first."""
    dataset, device = DATASETS.get(options.arch, "cifar10"), options.device
    description = describe_dataset(dataset)
    network = settled(options.arch, dataset, device)
    image = (torch.rand(description.image_shape) * 255).round().to(device) / 255
    classes, gauss, rounded = (
        description.num_classes,
        GaussianNoise(SIGMA, 0),
        RoundedGaussianNoise(SIGMA, 0),
    )
    runs: dict[str, Callable[[], None]] = {
        f"plain, batch {batch}": partial(
            count_votes, network, image, options.draws, batch, classes, gaussian(SIGMA)
        )
        for batch in options.plain_batch
    }
    kinds = [*options.precision, *[INTEGERS] * options.integers]
    arrangements = [(kind, False) for kind in kinds]
    arrangements += [(kind, True) for kind in kinds if options.compile]
    for kind, compiled in arrangements:
        voter = voter_of(network, kind, description.image_shape, device)
        voter = CompiledClassifier(voter) if compiled else voter
        batch = options.batch or default_batch(voter, description.image_shape, device)
        counter = VoteCounter([voter], [classes], batch, device)
        voter.use_fast_form(partial(check_exact, counter))
        name = f"{kind}{', compiled' if compiled else ''}, batch {batch}"
        noise = rounded if kind == INTEGERS else gauss
        runs[name] = counting(counter, noise, image, options.draws)
        if kind == "fp32" and not compiled:
            runs[f"{name}, --sound"] = counting(counter, rounded, image, options.draws)
            runs["drawing Gaussian noise alone"] = filling(
                gauss, image, batch, options.draws, device
            )
            runs["drawing --sound noise alone"] = filling(
                rounded, image, batch, options.draws, device
            )
    return runs


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--arch", default="cifar_resnet110")
    parser.add_argument("--plain-batch", type=int, nargs="+", default=[400])
    parser.add_argument(
        "--batch", type=int, default=None, help="batch of ours; None: as certify chooses"
    )
    parser.add_argument("--draws", type=int, default=800, help="per round and variant")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), default=["fp32"])
    parser.add_argument("--integers", action="store_true", help="a network of integers, too")
    options = parsed(parser)
    times = in_turns(variants(options), options)
    print(f"{options.arch}, {options.draws} draws, {conditions(options)}")
    print_rates(times, next(iter(times[0])), options.draws, "samples/s")


if __name__ == "__main__":
    main()
