"""Noisy samples per second of a network of integers, as a ratio to the compiled float network.

    python benchmarks/integer_speed.py --arch cifar_resnet20 cifar_resnet110 --batch 100 25

All forms alternate in this process, on one thread; all forms of integers must return the same
logits. Printed are medians over rounds: of the rate, and of the ratio within a round. Weights are
random, statistics and ranges those of noisy images. "Bytes" are convolutions of 8 bits by
oneDNN, which votes where the CPU has AVX2. ONEDNN_MAX_CPU_ISA=AVX2 and
ATEN_CPU_CAPABILITY=avx2 show a CPU without them. Of ONNX Runtime and OpenVINO those that are
installed compute the exported networks, too. "x plain" is relative to the first row.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from certification_speed import quantized
from networks import SIGMA, prepared
from timing import Line, Variant, parsed, parser_of, report

from smoothadv.integer.export import as_onnx
from smoothadv.integer.network import IntegerNetwork
from smoothadv.noise import RoundedGaussianNoise
from smoothadv.voting.classifier import (
    CompiledClassifier,
    optimized_for_inference,
)
from smoothadv.voting.counter import VoteCounter, check_integers

CPU, SHAPE, BASE = torch.device("cpu"), (3, 32, 32), "floats, compiled"


def noisy_images(count: int) -> torch.Tensor:
    """Images [count, C, H, W] of random grey levels with the noise of --sound."""
    images, stream = (
        (torch.rand(count, *SHAPE) * 255).round() / 255,
        RoundedGaussianNoise(SIGMA, 0).stream(0, CPU),
    )
    return torch.cat([stream.noisy(1, image) for image in images]).to(
        memory_format=torch.channels_last
    )


def forms(
    classifier: torch.nn.Module, made: IntegerNetwork, batch: int
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The float network, the integers in float32 and, where they are exact, in bytes: eager and
    compiled.
    """
    floats, integers, in_bytes = (
        optimized_for_inference(network, CPU) for network in (classifier, made, made)
    )
    in_bytes.use_fast_form(partial(check_integers, VoteCounter([in_bytes], [10], batch, CPU)))
    eager = {
        "floats": floats,
        "integers": integers,
        **({"bytes": in_bytes} if in_bytes.fast else {}),
    }
    return eager | {f"{name}, compiled": CompiledClassifier(voter) for name, voter in eager.items()}


def exported(
    classifier: torch.nn.Module, made: IntegerNetwork, batch: int
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The float network and the integers as ONNX models, in the runtimes that are installed."""
    if not any(find_spec(package) for package, _ in RUNTIMES.values()):
        return {}
    import onnx

    found = io.BytesIO()
    torch.onnx.export(
        classifier,
        noisy_images(batch),
        found,
        input_names=["images"],
        output_names=["logits"],
        dynamo=False,
    )
    integers = as_onnx(made, {}, onnx).SerializeToString()
    models = {"floats": found.getvalue(), "integers": integers}
    return {
        f"{name}, {runtime}": start(model, batch)
        for runtime, (package, start) in RUNTIMES.items()
        if find_spec(package)
        for name, model in models.items()
    }


def in_onnx_runtime(model: bytes, batch: int) -> Callable[[torch.Tensor], torch.Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(
        session.run(None, {"images": images.contiguous().numpy()})[0]
    )


def in_openvino(model: bytes, batch: int) -> Callable[[torch.Tensor], torch.Tensor]:
    import openvino

    core = openvino.Core()
    network = core.read_model(model)
    network.reshape([batch, *SHAPE])
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(network, "CPU", settings)
    return lambda images: torch.from_numpy(compiled([images.contiguous().numpy()])[0])


RUNTIMES = {
    "ONNX Runtime": ("onnxruntime", in_onnx_runtime),
    "OpenVINO": ("openvino", in_openvino),
}


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--arch", nargs="+", default=["cifar_resnet20", "cifar_resnet110"])
    parser.add_argument("--batch", nargs="+", type=int, default=[100], help="certify takes 100")
    options = parsed(parser)
    for arch in options.arch:
        for batch in options.batch:
            torch._dynamo.reset()
            measure(arch, batch, options)


@torch.inference_mode()
def measure(arch: str, batch: int, options: argparse.Namespace) -> None:
    """Print the table of an architecture at a batch."""
    classifier = prepared(arch, CPU, options.updates)
    made = quantized(classifier, SHAPE)
    images = noisy_images(batch)
    voters = forms(classifier, made, batch) | exported(classifier, made, batch)
    logits = {name: voter(images) for name, voter in voters.items() if "floats" not in name}
    assert all(torch.equal(logits["integers"], other) for other in logits.values())
    runs = {name: partial(voter, images) for name, voter in voters.items()}
    report(
        [
            Variant(Line(arch, "fp32", name, batch), lambda run=run: run, batch)
            for name, run in {BASE: runs.pop(BASE), **runs}.items()
        ],
        options,
    )


if __name__ == "__main__":
    main()
