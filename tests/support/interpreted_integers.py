"""Runs the kernels of networks of integers in Triton's interpreter, on the CPU, and prints what it
finds as JSON.

A process of its own: Triton reads TRITON_INTERPRET when it is imported. With "all", ResNet-50 has
maps of their true sizes.
"""

import json
import sys
from unittest import mock

import torch
import triton
import triton.language as tl

from smoothadv.architectures.integers import digest_of_logits
from smoothadv.base.errors import UserError
from smoothadv.integer import kernels
from smoothadv.integer.layers import (
    Convolution,
    Maximum,
    Rescaling,
    Step,
    Sum,
    Total,
    in_float64,
)
from smoothadv.integer.network import IntegerNetwork
from smoothadv.voting.counter import VoteCounter, check_integers
from support.integers import house_network
from support.interpreted_kernels import interpreter_stores

CPU = torch.device("cpu")


@triton.jit
def halves_upwards(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.floor(tl.minimum(tl.maximum(x, LOW), HIGH) + 0.5).to(tl.int32)


def flipped(network: IntegerNetwork) -> IntegerNetwork:
    """With the other sign of every second multiplier."""
    for layer in network.layers:
        if isinstance(layer, Convolution) and not layer.is_last:
            layer.multiplier[::2] *= -1
    return network


def odd_network(seed: int = 0) -> IntegerNetwork:
    """Uneven geometry, halves to be rounded, weights of two digits, int8 and int32, and layers
    without a kernel.
    """
    generator = torch.Generator().manual_seed(seed)
    wide, steps = {"low": -(2**23), "high": 2**23}, list[Step]()

    def add(
        kind: type,
        *inputs: int,
        shape: tuple[int, ...] = (),
        most: int = 127,
        multiplier: float = 0,
        **settings,
    ):
        tensors = {}
        if kind is Convolution:
            weight = torch.randint(-most, most + 1, shape, generator=generator)
            bias = torch.randint(-999, 999, shape[:1], generator=generator)
            tensors = {
                "weight": weight,
                "bias": bias,
                "multiplier": torch.full(shape[:1], multiplier),
            }
        if kind is Rescaling:
            tensors = {"multiplier": torch.tensor([multiplier])}
        steps.append(Step(kind(settings, tensors), inputs))
        return len(steps)

    uneven = {"stride": (2, 1), "padding": (3, 0), "dilation": (1, 2)}
    first = add(
        Convolution, 0, shape=(8, 3, 2, 3), multiplier=2.0**-11, low=-127, high=127, padding=(1, 1)
    )
    second = add(Convolution, first, shape=(8, 8, 3, 2), multiplier=0.5, **wide, **uneven)
    third = add(
        Convolution, first, shape=(8, 8, 3, 2), most=9999, multiplier=-(2.0**-9), **wide, **uneven
    )
    total = add(Sum, second, third, low=0, high=2**15 - 1)
    byte = add(Rescaling, total, multiplier=2.0**-7, low=0, high=255)
    other = add(Rescaling, total, multiplier=-0.5, low=-127, high=127)
    largest = add(Maximum, byte, kernel=(2, 3), stride=(1, 2), padding=(0, 1))
    grouped = add(
        Convolution, largest, shape=(8, 4, 1, 1), multiplier=2.0**-6, low=-127, high=127, groups=2
    )
    most = {"high": 2**15 - 1}
    again = add(
        Convolution,
        grouped,
        shape=(40, 8, 1, 3),
        most=1,
        multiplier=0.5,
        low=0,
        padding=(0, 1),
        **most,
    )
    short = add(
        Convolution, other, shape=(40, 8, 1, 1), multiplier=1.5, low=-300, stride=(1, 2), **most
    )
    both = add(Sum, again, add(Maximum, short, kernel=(2, 1)), low=-9, **most)
    middle = add(Rescaling, both, multiplier=0.75, low=0, high=999)
    short = {"shape": (40, 40, 1, 1), "most": 3, "multiplier": 2.0**-5, "shortcut": 1}
    middle = add(Convolution, middle, both, low=-9, high=999, **short)
    with torch.no_grad():
        x = [torch.zeros(1, 3, 7, 9)]
        for step in steps:
            step.layer.parts = 1
            x.append(step.layer(*(x[used] for used in step.inputs)))
    pooled = add(Total, middle, kernel=tuple(x[-1].shape[2:]))
    add(Convolution, pooled, shape=(5, 40, 1, 1), multiplier=2.0**-9)
    network = IntegerNetwork((3, 7, 9), 383, torch.tensor([125, 0, 255]), steps).eval()
    network.set_probe()
    return network


def inputs_of(operation: kernels._Operation, clip: int, rows: int) -> list[torch.Tensor]:
    """One batch of random values of the whole range, the extremes alone, and those that make the
    largest sum of the first output: each program of the interpreter takes long.
    """
    limits = [
        (value.low, value.high) if number else (-clip, 255 + clip)
        for number, value in zip(operation.reads, operation.read)
    ]
    generator = torch.Generator().manual_seed(0)
    signs = operation.layer.weight[0].sum((1, 2)) > 0
    found = []
    for place, (number, value, (low, high)) in enumerate(
        zip(operation.reads, operation.read, limits)
    ):
        shape = (rows, *value.shape)
        random = torch.randint(low, high + 1, shape, generator=generator)
        worst = torch.ones(shape) > 0 if place else signs.view(1, -1, 1, 1).expand(shape)
        extremes = [torch.where(each, low, high) for each in (worst, ~worst, worst | True)]
        x = torch.cat([random, *extremes])
        x = x.to(value.dtype) if number else (x / 255).float()
        found.append(x.contiguous(memory_format=torch.channels_last))
    return found


def wrong(operation: kernels._Operation, clip: int, rows: int = 1) -> int:
    """How many integers are not those of the definition in float64."""
    given = inputs_of(operation, clip, rows)
    with torch.inference_mode(), in_float64([operation.layer]):
        return int((operation(*given).float() != operation.defined(*given)).sum())


def shapes(network: IntegerNetwork, rows: int, most: float = torch.inf) -> dict[str, int]:
    """Of each distinct operation with a kernel and at most so many weights, how many integers are
    wrong.
    """
    found: dict[str, int] = {}
    for operation in kernels.KernelNetwork(network).operations:
        if isinstance(operation, kernels._Convolution) and operation.weight.numel() <= most:
            types = [value.dtype for value in (*operation.read, operation.made)]
            name = f"{types} {sorted(operation.constants.items())}"
            if name not in found:
                found[name] = wrong(operation, network.clip, rows)
    return found


def whole(network: IntegerNetwork) -> dict:
    """Of a whole network: the digest of the probe, the checks of voting, NaN."""
    form, images = kernels.KernelNetwork(network), network.probe_images()
    with torch.inference_mode():
        result: dict = {
            "digest": digest_of_logits(form(images)) == network.probe,
            "is refused": False,
        }
        images[2, 0, 1, 1] = torch.nan
        result["rows of NaN"] = form(images).isnan().all(1).nonzero().flatten().tolist()
    try:
        check_integers(VoteCounter([form], [len(network.layers[-1].weight)], 5, CPU), network, form)
    except UserError:
        result["is refused"] = True
    return result


def faults(network: IntegerNetwork) -> dict:
    """For each planted error, the number of the first layer that is found to be wrong."""
    images = network.probe_images()[:3]
    found: dict = {"none": kernels.KernelNetwork(network).inexact_layer(images), "roundings": []}
    for name, fault in (("_rounded", halves_upwards), ("_WHOLE", tl.constexpr(2.0**22))):
        with mock.patch.object(kernels, name, fault):
            found["roundings"].append(kernels.KernelNetwork(network).inexact_layer(images))
    for name, fault in {
        "multiplier": lambda operation: operation.multiplier.mul_(1 + 2.0**-10),
        "border": lambda operation: operation.constants.update(
            HEIGHT=operation.constants["HEIGHT"] - 1
        ),
        "bias": lambda operation: operation.bias.add_(1),
        "tap": lambda operation: operation.weight[:, 0, 0].zero_(),
    }.items():
        form = kernels.KernelNetwork(network)
        fault(form.operations[1])
        found[name] = form.inexact_layer(images)
    return found


def main(chosen: str) -> None:
    if not interpreter_stores():
        return
    odd = odd_network()
    kernels._BLOCK_ROWS = 512  # the interpreter takes long for each program
    if chosen == "all":
        kernels._BLOCK_ROWS = 1024
        found = {"resnet50": shapes(flipped(house_network("resnet50", 224)), 1)}
    else:
        found = {
            "odd": whole(odd),
            "faults": faults(odd),
            "shapes of odd": shapes(odd, 3),
        }
        found["cifar_resnet110"] = shapes(flipped(house_network("cifar_resnet110", 16)), 1)
        kernels._BLOCK_ROWS = 128
        found["resnet50"] = shapes(flipped(house_network("resnet50", 32)), 1, most=2**14)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
