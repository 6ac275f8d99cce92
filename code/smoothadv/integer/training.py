"""Networks of integers in training: each pass rounds their weights, with the gradient of the
identity.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from smoothadv.base.errors import UserError, warn
from smoothadv.datasets import DatasetDescription
from smoothadv.integer.layers import Convolution, Step, rounded
from smoothadv.integer.network import IntegerNetwork
from smoothadv.models.checkpoint import INTEGER
from smoothadv.models.load import load_classifier
from smoothadv.noise import RoundedGaussianNoise

_TYPICAL = 4
"""What a convolution reads is about its largest input divided by this."""


class _Rounded(nn.Module):
    """The integers, at most ``largest`` in size, nearest to a parameter in ``unit``s."""

    def __init__(self, unit: float, largest: float) -> None:
        super().__init__()
        self.unit, self.largest = unit, largest

    def forward(self, parameter: torch.Tensor) -> torch.Tensor:
        integers = rounded(parameter / self.unit)
        # A clamp would have no gradient at its limits, where each channel has a weight.
        return integers.detach().clamp(-self.largest, self.largest) + (integers - integers.detach())

    def right_inverse(self, integers: torch.Tensor) -> torch.Tensor:
        return integers * self.unit


class TrainedIntegers(IntegerNetwork):
    """``network`` with parameters that are rounded to its weights and biases; its scales and ranges
    are kept.

    A parameter is an integer times a power of 2, such that the weights of a layer are as large as
    He et al. (2015) initialize them: the learning rates of other networks then suit. No weight
    becomes larger than the largest one of its layer was, and the sums are proven to be exact anew
    when ``integers`` are made.
    """

    # The record that these would write and compare changes with the weights.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, network: IntegerNetwork) -> None:
        steps = [Step(layer, inputs) for _, layer, inputs in network.steps()]
        super().__init__(network.image_shape, network.clip, network.mean.flatten(), steps)
        for layer in self.layers:
            if isinstance(layer, Convolution):
                deviation = max(float(layer.weight.square().mean().sqrt()), 1.0)
                unit = 2.0 ** round(math.log2(math.sqrt(2 / layer.weight[0].numel()) / deviation))
                # A parameter of the bias counts inputs of typical size.
                bias_unit = unit * 2.0 ** -round(math.log2(max(layer.largest_input / _TYPICAL, 1)))
                _train(layer, "weight", unit, float(layer.weight.abs().max()))
                _train(layer, "bias", bias_unit, 2.0**22)

    def integers(self) -> IntegerNetwork:
        """The network of integers that this one is now, on the CPU; ValueError where a sum may not
        be exact.
        """
        steps = []
        for _, layer, inputs in self.steps():
            kind, (settings, tensors) = type(layer), layer.stored()
            if isinstance(layer, Convolution):
                kind = Convolution
                tensors["weight"] = layer.weight.detach().cpu()
                tensors["bias"] = layer.bias.detach().cpu()
            steps.append(Step(kind(settings, tensors), inputs))
        return IntegerNetwork(self.image_shape, self.clip, self.mean.cpu().flatten(), steps).eval()

    def state_fields(self) -> dict[str, Any]:
        """Those of the network of integers, and ``trained``, the parameters."""
        try:
            network = self.integers()
        except ValueError as error:
            raise UserError(
                f"--finetune-quantized: {error} with the weights that were trained: try a smaller "
                "--lr"
            ) from error
        network.set_probe()
        return {**network.state_fields(), "trained": self.state_dict()}


def _train(layer: Convolution, name: str, unit: float, largest: float) -> None:
    integers = layer._buffers.pop(name)
    assert integers is not None
    layer.register_parameter(name, nn.Parameter(integers))
    parametrize.register_parametrization(layer, name, _Rounded(unit, largest))


def trained_integers(
    content: dict[str, Any], path: Path, arch: str, noise_sd: float, description: DatasetDescription
) -> TrainedIntegers:
    """The network in a checkpoint of integers of ``arch``, to be trained; UserError where it is of
    something else.

    A warning tells of noise that exceeds what ranges were chosen for.
    """
    if content["arch"] != (wanted := f"{INTEGER}:{arch}"):
        raise UserError(
            f"--finetune-quantized: {path} holds a {content['arch']}, expected {wanted}, as "
            "quantize makes it"
        )
    network = load_classifier(path, description)
    assert isinstance(network, IntegerNetwork)
    if network.clip < (needed := RoundedGaussianNoise(noise_sd, 0).clip):
        warn(
            f"{path} clamps noise at {network.clip} grey levels, and --noise {noise_sd:g} has "
            f"{needed}: quantize for it"
        )
    return TrainedIntegers(network)
