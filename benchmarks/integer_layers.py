"""Where the time of a noisy sample goes in networks of integers, by kind of layer.

    python benchmarks/integer_layers.py --arch cifar_resnet110

Three forms alternate in this process, on one thread: all layers in float32; convolutions of bytes
whose sums leave oneDNN as float32 and are rescaled and rounded by PyTorch ("sums apart"), as in
version 1 of the definition; and bytes with oneDNN's fused operators, which vote. Printed are
medians over rounds, in microseconds per sample, of each kind of layer and of the noise. All forms
must return the same logits. Weights are random.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from certification_speed import quantized, settled
from integer_speed import CPU, SHAPE, SIGMA, noisy_images

from smoothadv.exact.layers import Convolution, LayerGraph
from smoothadv.exact.network import ByteConvolution, byte_form
from smoothadv.noise import RoundedGaussianNoise


def kind_of(layer: torch.nn.Module, number: int) -> str:
    """The row of the table that a layer's time belongs to."""
    if not isinstance(layer, Convolution):
        return type(layer).__name__.lower()
    if number == 1 or layer.is_last:
        return "first convolution" if number == 1 else "logits"
    outputs, inputs, size, _ = layer.weight.shape
    how = "shortcut" if layer.shortcut else ""
    if layer.high > 255 and not layer.shortcut:
        how = "summand"
    step = f" / {layer.stride[0]}" if max(layer.stride) > 1 else ""
    return ", ".join(filter(None, [f"{inputs} to {outputs}, {size} x {size}{step}", how]))


def timed_layers(network: LayerGraph, images: torch.Tensor) -> Iterator[tuple[str, float]]:
    """The kind and the seconds of each layer."""
    start = time.perf_counter()
    values = {0: network.entrance(images)}
    yield "entrance", time.perf_counter() - start
    for number, layer, inputs in network.steps():
        start = time.perf_counter()
        values[number] = layer(*network.given(layer, [values[used] for used in inputs]))
        seconds = time.perf_counter() - start
        yield kind_of(layer, number), seconds
        for used in network.unused_after[number]:
            del values[used]


@torch.inference_mode()
def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--arch", default="cifar_resnet110")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = quantized(settled(options.arch, "cifar10", CPU), noisy_images(64))
    networks = {"float32": network, "sums apart": byte_form(network), "fused": byte_form(network)}
    if not all(networks.values()):
        raise SystemExit("this CPU has no convolutions of bytes")
    for layer in networks["sums apart"].layers:
        if isinstance(layer, ByteConvolution):
            layer.is_fused = False
    images = noisy_images(options.batch)
    logits = [form(images) for form in networks.values()]
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    out, stream = torch.empty_like(images), RoundedGaussianNoise(SIGMA, 0).stream(0, CPU)
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for name, form in networks.items():
            start = time.perf_counter()
            stream.fill(out, torch.rand(SHAPE), 0)
            found = {"noise": time.perf_counter() - start}
            for kind, seconds in timed_layers(form, images):
                found[kind] = found.get(kind, 0.0) + seconds
            found["all"] = sum(found.values())
            for kind, seconds in found.items():
                times.setdefault(kind, {}).setdefault(name, []).append(seconds)
    print(f"{options.arch}, batch {options.batch}, {options.rounds} rounds, us per sample")
    print(f"{'':44s}" + "".join(f"{name:>12s}" for name in networks))
    for kind in [*(kind for kind in times if kind != "all"), "all"]:
        each = [statistics.median(times[kind][name]) for name in networks]
        print(f"{kind:44s}" + "".join(f"{s / options.batch * 1e6:12.1f}" for s in each))


if __name__ == "__main__":
    main()
