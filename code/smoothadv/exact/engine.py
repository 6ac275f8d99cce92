"""Networks of integers on a CPU that multiplies bytes (AVX-512 VNNI, AMX): sums by oneDNN's
quantized convolutions.

A convolution that reads 8 bits, with weights of 8 bits, adds its products in int32.
``Convolution.bound`` proves that no sum, or no part of one, reaches 2^24: these are the sums of the
definition. Scales of 1 leave them as they are in float32; the product with the multiplier and the
rounding behind it are those of the definition. Other layers, like the first one, which reads up to
11 bits, stay in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from smoothadv.exact.layers import Convolution, IntegerLayer, Maximum
from smoothadv.exact.network import IntegerNetwork, Step

_BYTES = (torch.uint8, torch.int8)


class ByteConvolution(Convolution):
    """A convolution of values that ``dtype``, uint8 or int8, holds; without gradients."""

    def __init__(
        self, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(settings, tensors)
        self.dtype = dtype
        self.scales = torch.ones(len(self.weight)), torch.zeros(len(self.weight), dtype=torch.int64)
        self.geometry = (list(self.stride), list(self.padding), list(self.dilation), self.groups)

    def bound(self, *sizes: float) -> float:
        size = super().bound(*sizes)
        self.width = -(
            -self.weight.shape[1] * self.groups // (self.parts if self.groups == 1 else 1)
        )
        # No buffers: oneDNN's layout cannot be copied or moved.
        self.packed = [
            torch.ops.onednn.qconv_prepack(
                part.contiguous(), self.scales[0], 1.0, 0, *self.geometry, None
            )
            for part in self.weight.to(torch.int8).split(self.width, 1)
        ]
        return size

    @property
    def smallest_input(self) -> float:
        return 0 if self.dtype is torch.uint8 else -self.largest_input

    def total(self, x: torch.Tensor, in_float64: bool = False) -> torch.Tensor:
        if in_float64:
            return super().total(x, in_float64)
        bias = self.bias if self.parts == 1 else None
        result: tuple[object, ...] = (
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )  # scale, zero, type; nothing behind the sum
        sums = [
            torch.ops.onednn.qconv2d_pointwise(
                part, 1.0, 0, packed, *self.scales, bias, *self.geometry, *result
            )
            for part, packed in zip(x.to(self.dtype).split(self.width, 1), self.packed)
        ]
        return sums[0] if self.parts == 1 else self.sum_of_parts(sums)


def fast_form(network: IntegerNetwork, device: torch.device) -> IntegerNetwork | None:
    """The same network with convolutions of bytes, without gradients; None where this CPU or this
    PyTorch has none.

    It shares the other layers with ``network``. ``voting.check_exact`` says whether it computes
    exactly.
    """
    if device.type != "cpu" or not getattr(torch.cpu, "_is_vnni_supported", bool)():
        return None
    dtypes: list[torch.dtype | None] = [
        None
    ]  # a type of one byte that holds the value, if there is one
    steps = []
    try:
        for layer, inputs in zip(network.layers, network.inputs):
            assert isinstance(layer, IntegerLayer)
            dtype = dtypes[inputs[0]]
            weights = layer.weight.abs().max() if isinstance(layer, Convolution) else torch.inf
            if dtype is not None and weights <= torch.iinfo(torch.int8).max:
                layer = ByteConvolution(*layer.stored(), dtype)
            steps.append(Step(layer, inputs))
            dtypes.append(dtype if isinstance(layer, Maximum) else _holding(layer))
        if not any(isinstance(step.layer, ByteConvolution) for step in steps):
            return None
        made = IntegerNetwork(network.image_shape, network.clip, network.mean, steps).eval()
        with torch.inference_mode():
            made(network.probe_images())
    except (
        AttributeError,
        RuntimeError,
    ):  # another version's operators, or a geometry that they do not take
        return None
    return made


def _holding(layer: IntegerLayer) -> torch.dtype | None:
    """The type of one byte that holds what ``layer`` clamps to, if there is one."""
    low, high = getattr(layer, "low", None), getattr(layer, "high", None)
    if low is None or high is None:
        return None
    return next(
        (kind for kind in _BYTES if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max),
        None,
    )
