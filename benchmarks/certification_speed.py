"""Noisy samples per second of certification, as a ratio to a plain eager loop over the same
network.

    python benchmarks/certification_speed.py --plain-batch 100 400 1000 --draws 1000 \\
        --rounds 5 --precision fp32 bf16 --compile --integers --sound
    python benchmarks/certification_speed.py --arch resnet50 --plain-batch 8 --draws 16 \\
        --batch 8 --compile
    python benchmarks/certification_speed.py --device cuda --precision tf32 bf16 --sound \\
        --integers --plain-batch 1000 --draws 16384

All variants alternate in this process, and include drawing the noise and counting the votes.
Printed are medians over rounds of the ratio within a round. The last lines give the speed of
drawing noise alone. The plain loop computes in float32, on a GPU in TF32; "fp32" is without TF32.
--sound is not compiled on a GPU, where certify refuses that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from networks import SIGMA, description_of, prepared
from plain_certification import count_votes, gaussian
from timing import Line, Variant, parsed, parser_of, report

from smoothadv.integer.conversion import convert, read_network
from smoothadv.integer.network import IntegerNetwork
from smoothadv.noise import GaussianNoise, Noise, RoundedGaussianNoise
from smoothadv.statistics import Draws
from smoothadv.voting.classifier import (
    CompiledClassifier,
    VotingClassifier,
    default_batch,
    optimized_for_inference,
)
from smoothadv.voting.counter import Poll, VoteCounter, check_integers

INTEGERS = "integers"
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", INTEGERS)
GAUSSIAN = GaussianNoise(SIGMA, 0)
ROUNDED = RoundedGaussianNoise(SIGMA, 0)


def grey_image(arch: str, device: torch.device) -> torch.Tensor:
    """A random image [C, H, W] of 8 bits, made on the CPU as datasets make theirs: a GPU divides by
    255 by multiplying with the rounded inverse.
    """
    return ((torch.rand(description_of(arch).image_shape) * 255).round() / 255).to(device)


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


def filling(noise: Noise, arch: str, options: argparse.Namespace) -> Callable[[], None]:
    """A function that only draws the noise."""
    image = grey_image(arch, options.device)
    out = torch.empty(min(100, options.draws), *image.shape, device=options.device)
    out = out.to(memory_format=torch.channels_last)
    stream = noise.stream(0, options.device)

    def run() -> None:
        for start in range(0, options.draws, len(out)):
            stream.fill(out, image, start)

    return run


def quantized(classifier: torch.nn.Module, shape: tuple[int, ...]) -> IntegerNetwork:
    """The network of integers, calibrated on noisy images of random grey levels."""
    levels = (torch.rand(64, *shape) + SIGMA * torch.randn(64, *shape)) * 255
    images = levels.round() / 255
    return convert(read_network(classifier, shape), [images], shape, ROUNDED.clip)


def voter_of(arch: str, precision: str, options: argparse.Namespace) -> VotingClassifier:
    """The classifier in a precision, or in integers, as it votes."""
    network = prepared(arch, options.device, options.updates)
    if precision == INTEGERS:
        network = quantized(network, description_of(arch).image_shape)
        precision = "fp32"
    precision = "fp32" if precision == "tf32" else precision
    return optimized_for_inference(network, options.device, precision=precision)


def plain(arch: str, precision: str, batch: int, options: argparse.Namespace) -> Variant:
    """Cohen et al.'s loop."""
    classes = description_of(arch).num_classes

    def prepare() -> Callable[[], object]:
        image = grey_image(arch, options.device)
        network = prepared(arch, options.device, options.updates)
        noise = gaussian(SIGMA)
        return partial(count_votes, network, image, options.draws, batch, classes, noise)

    return Variant(Line(f"certify {arch}", precision, "plain", batch), prepare, options.draws)


def ours(arch: str, precision: str, mode: str, options: argparse.Namespace) -> list[Variant]:
    """This package in a precision and a mode, "eager" or "compiled", in every batch; with
    ``options.sound`` also with the noise of --sound, which networks of integers always have.
    """
    device = options.device
    description = description_of(arch)

    def prepare(line: Line, noise: Noise) -> Callable[[], None]:
        voter = voter_of(arch, precision, options)
        voter = CompiledClassifier(voter) if mode == "compiled" else voter
        line.batch = line.batch or default_batch(voter, description.image_shape, device)
        # With a smaller batch the figures would be those of another variant.
        classes = [description.num_classes]
        counter = VoteCounter([voter], classes, line.batch, device, keep_batch=True)
        voter.use_fast_form(partial(check_integers, counter))
        return counting(counter, noise, grey_image(arch, device), options.draws)

    noises: dict[str, Noise] = {mode: ROUNDED if precision == INTEGERS else GAUSSIAN}
    if options.sound and precision != INTEGERS and (mode != "compiled" or device.type == "cpu"):
        noises[f"{mode}, --sound"] = ROUNDED
    variants = []
    for batch in options.batches:
        for name, noise in noises.items():
            line = Line(f"certify {arch}", precision, name, batch)
            kernels = "sound" if noise is ROUNDED else "any"
            made = partial(prepare, line, noise)
            variants.append(Variant(line, made, options.draws, kernels))
    return variants


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--arch", default="cifar_resnet110")
    parser.add_argument("--plain-batch", type=int, nargs="+", default=[400])
    parser.add_argument(
        "--batch", type=int, nargs=1, default=[0], dest="batches", help="0: as certify chooses"
    )
    parser.add_argument("--draws", type=int, default=800, help="per round and variant")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS[:-1], default=["fp32"])
    parser.add_argument("--integers", action="store_true", help="a network of integers, too")
    parser.add_argument("--sound", action="store_true", help="also with the noise of --sound")
    options = parsed(parser, arguments)
    variants = [plain(options.arch, options.usual, batch, options) for batch in options.plain_batch]
    for mode in ["eager"] + ["compiled"] * options.compile:
        for precision in [*options.precision, *[INTEGERS] * options.integers]:
            variants += ours(options.arch, precision, mode, options)
    for name, noise in {"noise alone": GAUSSIAN, "noise alone, --sound": ROUNDED}.items():
        line = Line(f"certify {options.arch}", "fp32", name, min(100, options.draws))
        made = partial(filling, noise, options.arch, options)
        variants.append(Variant(line, made, options.draws))
    report(variants, options)


if __name__ == "__main__":
    main()
