"""Networks of integers as checkpoints hold them, and their form in bytes for CPUs; docs/integer.md
defines them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smoothadv.architectures.integers import NetworkOfIntegers, digest_of_logits
from smoothadv.base.errors import first_line
from smoothadv.integer.layers import (
    DEFINITION,
    EXACT,
    LAYERS,
    SEVEN_BITS,
    WHITE,
    Convolution,
    IntegerLayer,
    LayerGraph,
    Range,
    Step,
    in_float64,
)
from smoothadv.models.checkpoint import INTEGER


class IntegerNetwork(LayerGraph, NetworkOfIntegers):
    """A LayerGraph that checkpoints hold; ``probe`` is computed in float64."""

    probe = ""

    @classmethod
    def read(
        cls,
        record: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        image_shape: Sequence[int],
        num_classes: int,
    ) -> IntegerNetwork:
        """The network for which ``stored`` returned this, for images of this shape; ValueError
        where it is damaged, or has other than ``num_classes`` logits.
        """
        if (found := record.get("definition")) != DEFINITION:
            raise ValueError(
                f"it has definition {found!r} of integer networks, and this version knows "
                f"{DEFINITION}"
            )
        try:
            clip, steps = record["clip"], record["steps"]
            if not steps or type(clip) is not int or not 0 <= clip < EXACT // 4:
                raise ValueError(f"{len(steps)} steps, clip {clip}")
            by_step: dict[str, dict[str, torch.Tensor]] = {}
            for name, tensor in tensors.items():
                step, _, kind = name.partition(".")
                by_step.setdefault(step, {})[kind] = tensor
            mean = by_step.pop("mean")[""]
            is_other = (
                mean.is_floating_point() or mean.is_complex() or mean.shape != (image_shape[0],)
            )
            if is_other or bool((mean.double().abs() > WHITE).any()):
                raise ValueError(
                    f"its mean, of shape {list(mean.shape)}, is no grey level for each of "
                    f"{image_shape[0]} channels"
                )
            made = [
                Step(LAYERS[kind](settings, by_step.pop(str(number), {})), tuple(inputs))
                for number, (kind, inputs, settings) in enumerate(steps, 1)
            ]
            if by_step:
                raise ValueError(f"tensors of step {next(iter(by_step))}, which needs none")
            network = cls(image_shape, clip, mean, made)
            network.probe = str(record["probe"])
            with torch.inference_mode():
                logits = network(torch.zeros(1, *image_shape)).shape[1]
            if num_classes != logits:
                raise ValueError(f"it has {logits} logits, expected {num_classes}")
        except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
            raise ValueError(f"its integer network is damaged: {reason}") from error
        return network

    def stored(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """A record, as JSON can hold it, and tensors of integers and multipliers, which together
        are the network.
        """
        steps, tensors = [], {"mean": self.mean.flatten().to(torch.int16)}
        for number, layer, inputs in self.steps():
            settings, layer_tensors = layer.stored()
            steps.append([type(layer).__name__.lower(), list(inputs), settings])
            tensors |= {f"{number}.{name}": value for name, value in layer_tensors.items()}
        record = {"definition": DEFINITION, "clip": self.clip, "probe": self.probe, "steps": steps}
        return record, tensors

    def state_fields(self) -> dict[str, Any]:
        record, tensors = self.stored()
        return {"state_dict": tensors, INTEGER: record}

    def get_extra_state(self) -> str:
        """The record as text: a digest of the state covers it."""
        return json.dumps([self.stored()[0], self.image_shape], sort_keys=True)

    def set_extra_state(self, state: str) -> None:
        if state != self.get_extra_state():
            raise ValueError("the state is of another integer network")

    @torch.inference_mode()
    def set_probe(self) -> None:
        """Set ``probe``, from sums in float64 on the CPU."""
        with in_float64(self.layers):
            self.probe = digest_of_logits(self(self.probe_images()))

    def fast_form(self, device: torch.device) -> nn.Module | None:
        if device.type == "cpu":
            return byte_form(self)
        try:
            from smoothadv.integer import kernels
        except ImportError:  # without Triton
            return None
        return kernels.kernel_form(self, device)


class ByteConvolution(Convolution):
    """A convolution of bytes, 0..255; without gradients.

    Where its result is one of bytes, and so is its shortcut, and its multipliers are powers of 2,
    oneDNN computes all of it: the sum in int32; in float32 its product with the multiplier, the
    bias and the shortcut, which are exact by ``range_of``; rounding to the nearest even integer,
    and 0..255.
    """

    def __init__(self, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(settings, tensors)
        self.keeps_shortcut = True
        self.layout: tuple[torch.Size | None, list[torch.Tensor]] = None, []
        self.zeros = torch.zeros(len(self.weight), dtype=torch.int64)
        self.geometry = (list(self.stride), list(self.padding), list(self.dilation), self.groups)

    def range_of(self, *inputs: Range) -> Range:
        limits = super().range_of(*inputs)
        channels = self.weight.shape[1] * self.groups
        self.width = -(-channels // (self.parts if self.groups == 1 else 1))
        self.ones, self.scaled_bias = torch.ones(len(self.weight)), self.bias * self.multiplier
        is_byte = (self.low, self.high) == (0, WHITE) and self.has_powers and self.parts == 1
        self.is_fused = is_byte and all(0 <= low and high <= WHITE for low, high in inputs[1:])
        return limits

    def _packed(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the weight in oneDNN's layout, which cannot be copied or moved.

        It depends on the shape of ``x``: that for another shape gives the same sums, up to 20 times
        as slowly.
        """
        if self.layout[0] != x.shape:
            scales = self.multiplier if self.is_fused else self.ones
            packed = [
                torch.ops.onednn.qconv_prepack(
                    part.to(torch.int8).contiguous(),
                    scales,
                    1.0,
                    0,
                    *self.geometry,
                    [len(x), part.shape[1] * self.groups, *x.shape[2:]],
                )
                for part in self.weight.split(self.width, 1)
            ]
            self.layout = x.shape, packed
        return self.layout[1]

    def total(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_float64:
            return super().total(x)
        bias = self.bias if self.parts == 1 else None
        # The scale, zero and type of the result; nothing follows the sum.
        result: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
        sums = [
            torch.ops.onednn.qconv2d_pointwise(
                part, 1.0, 0, packed, self.ones, self.zeros, bias, *self.geometry, *result
            )
            for part, packed in zip(x.to(torch.uint8).split(self.width, 1), self._packed(x))
        ]
        return sums[0] if self.parts == 1 else self.sum_of_parts(sums)

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor | None = None) -> torch.Tensor:
        if not self.is_fused or self.in_float64:
            return super().forward(x, shortcut)
        (packed,) = self._packed(x)
        given = (x.to(torch.uint8), 1.0, 0, packed, self.multiplier, self.zeros)
        bias, result = self.scaled_bias, (1.0, 0, torch.uint8)
        if shortcut is None:
            return torch.ops.onednn.qconv2d_pointwise(
                *given, bias, *self.geometry, *result, "relu", [], ""
            )
        kept = shortcut.to(torch.uint8, memory_format=torch.channels_last)
        if kept is shortcut and self.keeps_shortcut:
            kept = kept.clone()  # the result takes its place
        return torch.ops.onednn.qconv2d_pointwise.binary(
            *given, kept, bias, *self.geometry, *result, 1.0, 0, "sum", 1.0, "relu", [], ""
        )

    def compared(self, x: torch.Tensor, *shortcut: torch.Tensor) -> torch.Tensor:
        return (
            self(x, *(one.clone() for one in shortcut)).float() if self.is_fused else self.total(x)
        )


class ByteGraph(LayerGraph):
    """A LayerGraph whose convolutions read, and mostly make, bytes."""

    def __init__(self, network: LayerGraph, steps: Sequence[Step]) -> None:
        super().__init__(network.image_shape, network.clip, network.mean, steps)
        for number, layer, inputs in self.steps():
            if isinstance(layer, ByteConvolution) and layer.shortcut:
                is_needed = inputs[1] not in self.unused_after[number]
                layer.keeps_shortcut = is_needed or inputs[1] == inputs[0]

    def given(self, layer: IntegerLayer, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x if isinstance(layer, ByteConvolution) else x.float() for x in values]


def _is_proven(layer: IntegerLayer, read: Range, made: torch.Tensor) -> bool:
    """Whether convolutions of bytes compute this layer exactly, whatever it reads of this range;
    ``made`` has the shape of its results.

    Some of oneDNN's add products in pairs, in 16 bits, which saturate, and nothing says which of
    them it chooses on a processor. Faults of its version 3.13 set the limits of geometry: on
    processors with AVX-512, windows with gaps, and those that make a single column with a stride,
    may read what lies beside the map.
    """
    return (
        isinstance(layer, Convolution)
        and 0 <= read[0]
        and read[1] <= WHITE
        and float(layer.weight.abs().max()) <= SEVEN_BITS
        and layer.dilation == (1, 1)
        and (layer.stride[1] == 1 or made.shape[3] > 1)
    )


@torch.no_grad()
def byte_form(network: LayerGraph) -> LayerGraph | None:
    """The same network with convolutions of bytes, without gradients; None where this CPU or this
    PyTorch has none.

    A convolution that reads 0..255, with weights of 7 bits, adds its products in int32, by
    oneDNN's quantized convolutions. ``Convolution.range_of`` proves that no sum, or no part of one,
    reaches 2^24: these are the sums of the definition. Other layers, like the first one, which
    reads up to 11 bits with signs, stay in float32 and are those of ``network``.
    ``voting.counter.check_integers`` looks whether the form computes exactly.
    """
    if not getattr(torch.cpu, "_is_avx2_supported", bool)():
        return None  # the operators may be there, but slow
    steps, maps = [], network.maps(torch.zeros(1, *network.image_shape))
    try:
        for number, layer, inputs in network.steps():
            if _is_proven(layer, network.ranges[inputs[0]], maps[number]):
                layer = ByteConvolution(*layer.stored())
            steps.append(Step(layer, inputs))
        if not any(isinstance(step.layer, ByteConvolution) for step in steps):
            return None
        form = ByteGraph(network, steps).eval()
        form(network.probe_images())
    except (AttributeError, RuntimeError):
        # Another version's operators, or a geometry that they do not take.
        return None
    return form
