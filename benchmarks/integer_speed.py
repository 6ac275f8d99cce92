"""Time of a noisy sample in a network of integers, as a ratio to the compiled float network.

    python benchmarks/integer_speed.py --arch cifar_resnet20 cifar_resnet110 --batch 100 25

All forms alternate in this process, on one thread; all forms of integers must return the same
logits. Printed are medians over rounds: of the time, and of the ratio within a round. Weights are
random, statistics and ranges those of noise-like images. "Bytes" are convolutions of 8 bits by
oneDNN, which votes where the CPU has the instructions. ONEDNN_MAX_CPU_ISA=AVX2 and
ATEN_CPU_CAPABILITY=avx2 show a CPU without them.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from certification_speed import seconds, settled

from smoothadv.exact.conversion import convert, read_network
from smoothadv.exact.network import IntegerNetwork
from smoothadv.noise import RoundedGaussianNoise
from smoothadv.voting.classifier import (
    CompiledClassifier,
    VotingClassifier,
    optimized_for_inference,
)
from smoothadv.voting.counter import VoteCounter, check_exact

CPU, SHAPE, SIGMA, BASE = torch.device("cpu"), (3, 32, 32), 0.25, "floats, compiled"


def noisy_images(count: int) -> torch.Tensor:
    """Images [count, C, H, W] of random grey levels with the noise of --sound."""
    images, stream = (
        (torch.rand(count, *SHAPE) * 255).round() / 255,
        RoundedGaussianNoise(SIGMA, 0).stream(0, CPU),
    )
    return torch.cat([stream.noisy(1, image) for image in images]).to(
        memory_format=torch.channels_last
    )


def quantized(classifier: torch.nn.Module, images: torch.Tensor) -> IntegerNetwork:
    """The network of integers, calibrated on ``images``."""
    floats = read_network(classifier, shape := tuple(images.shape[1:]))
    return convert(floats, [images], shape, RoundedGaussianNoise(SIGMA, 0).clip)


def forms(arch: str, batch: int) -> dict[str, VotingClassifier]:
    """The float network, the integers in float32 and, where they are exact, in bytes: eager and
    compiled.
    """
    made = quantized(classifier := settled(arch, "cifar10", CPU), noisy_images(64))
    floats, integers, in_bytes = (
        optimized_for_inference(network, CPU) for network in (classifier, made, made)
    )
    in_bytes.use_fast_form(partial(check_exact, VoteCounter(in_bytes, 10, batch, CPU)))
    eager = {
        "floats": floats,
        "integers": integers,
        **({"bytes": in_bytes} if in_bytes.fast else {}),
    }
    return eager | {f"{name}, compiled": CompiledClassifier(voter) for name, voter in eager.items()}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=["cifar_resnet20", "cifar_resnet110"])
    parser.add_argument("--batch", nargs="+", type=int, default=[100], help="certify takes 100")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    options.threads, options.device = 1, CPU
    torch.set_num_threads(1)
    for arch in options.arch:
        for batch in options.batch:
            torch._dynamo.reset()
            measure(arch, batch, options)


@torch.inference_mode()
def measure(arch: str, batch: int, options: argparse.Namespace) -> None:
    """Print the table of an architecture at a batch."""
    images, voters = noisy_images(batch), forms(arch, batch)
    logits = {name: voter(images) for name, voter in voters.items()}
    assert all(
        torch.equal(logits[name], logits["integers"]) for name in voters if "floats" not in name
    )
    rounds = [
        {name: seconds(partial(voter, images), options) for name, voter in voters.items()}
        for _ in range(options.rounds)
    ]
    print(f"{arch}, batch {batch}, {options.rounds} rounds, torch {torch.__version__}")
    for name in voters:
        each = statistics.median(times[name] for times in rounds) / batch * 1e6
        ratio = statistics.median(times[name] / times[BASE] for times in rounds)
        print(f"{name:20s} {each:9,.0f} us {ratio:6.2f} x {BASE}", flush=True)


if __name__ == "__main__":
    main()
