"""Builds the network of integers: the scales of its values, and its weights.

A real value is an integer times a scale. What a convolution reads has 8 bits; sums with shortcuts
are 64 times finer, with 15 bits, since the errors of their rounding add up along the network. All
sums that a shortcut connects have one scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from smoothadv.base.errors import UserError
from smoothadv.exact.layers import (
    Convolution,
    IntegerLayer,
    Maximum,
    Rescaling,
    Sum,
    Total,
)
from smoothadv.exact.network import WHITE, IntegerNetwork, Step
from smoothadv.exact.reading import FloatNetwork, Operation

LEVELS = 255
"""The largest of the integers that a convolution reads, where they are not negative."""
_SIGNED, _FINER, _WIDE, _POOLED = 127, 64, 2**15 - 1, 2**11 - 1
_WEIGHTS, _LAST_WEIGHTS = 127, 255
_ANY = 2**23 - 1  # sums of two are exact
_LARGEST_BIAS = 2**22


@dataclass(frozen=True)
class _Value:
    """Value ``number`` of the integer network: integers in low..high, times ``scale`` [1] (of the
    image: [C]).
    """

    number: int
    scale: torch.Tensor
    low: int
    high: int


def _value(scale: float, levels: int, is_positive: bool) -> _Value:
    return _Value(
        0, torch.tensor([scale], dtype=torch.float64), 0 if is_positive else -levels, levels
    )


class Builder:
    """Builds the integer network of ``network`` for images of ``image_shape`` with noise of up to
    ``clip`` grey levels.

    ``largest`` has the size at which each rounded result is clamped.
    """

    def __init__(
        self,
        network: FloatNetwork,
        largest: Mapping[Operation, float],
        image_shape: tuple[int, ...],
        clip: int,
    ) -> None:
        self.network, self.largest, self.image_shape, self.clip = (
            network,
            largest,
            image_shape,
            clip,
        )
        self.steps: list[Step] = []
        self.values: dict[Operation, _Value] = {}
        self.narrowed: dict[Operation, _Value] = {}
        self.wide_scales = self._wide_scales()

    def build(self) -> IntegerNetwork:
        """The network of integers; UserError where its sums cannot be proven to be exact."""
        for operation in self.network.operations:
            if operation.kind != "convolution" and any(
                value.kind == "image" for value in operation.inputs
            ):
                raise UserError(
                    f"the network has no integer form: a {operation.kind} reads the image, no "
                    "convolution"
                )
        try:
            for operation in self.network.operations:
                self.values[operation] = getattr(self, f"_{operation.kind}")(operation)
            return IntegerNetwork(
                self.image_shape, self.clip, (self.network.mean * WHITE).round(), self.steps
            )
        except ValueError as error:
            raise UserError(f"the network has no integer form: {error}") from error

    def _wide_scales(self) -> dict[Operation, float]:
        """The scale of each rounded result that is a sum or that a sum reads: one for all that
        shortcuts connect.
        """
        chains: dict[Operation, list[Operation]] = {}
        for operation in self.network.operations:
            if operation.kind != "sum":
                continue
            members = [operation.settled]
            for term in operation.inputs:
                while term.is_settled:
                    members += chains.get(term, [term])
                    if term.kind != "maximum":  # which has the scale of what it reads
                        break
                    term = term.inputs[0]
            for member in members:
                chains[member] = members
        return {
            operation: max(self.largest[member] for member in members) / (LEVELS * _FINER)
            for operation, members in chains.items()
        }

    def _add(self, layer: IntegerLayer, inputs: Sequence[_Value], result: _Value) -> _Value:
        self.steps.append(Step(layer, tuple(value.number for value in inputs)))
        return replace(result, number=len(self.steps))

    def _target(self, operation: Operation) -> _Value:
        """The scale and the range of a rounded result."""
        if operation in self.wide_scales:
            return _value(self.wide_scales[operation], _WIDE, operation.is_positive)
        return self._narrow(operation)

    def _narrow(self, operation: Operation) -> _Value:
        """The scale and the range of a result as a convolution reads it."""
        levels = LEVELS if operation.is_positive else _SIGNED
        return _value(self.largest[operation] / levels, levels, operation.is_positive)

    def _rescaled(self, value: _Value, target: _Value) -> _Value:
        settings, tensors = (
            {"low": target.low, "high": target.high},
            {"multiplier": (value.scale / target.scale).float()},
        )
        return self._add(Rescaling(settings, tensors), [value], target)

    def _image(self, operation: Operation) -> _Value:
        return _Value(0, 1 / (WHITE * self.network.std), -self.clip, WHITE + self.clip)

    def _convolution(self, operation: Operation) -> _Value:
        source, layer = operation.inputs[0], operation.layer
        value = self.values[source]
        if value.high == _WIDE and value.number:  # that of a sum, perhaps through a maximum
            if source not in self.narrowed:
                self.narrowed[source] = self._rescaled(value, self._narrow(source))
            value = self.narrowed[source]
        weight, settings = layer.weight, {}
        if isinstance(layer, torch.nn.Linear):
            weight = weight[:, :, None, None]
            if math.prod(source.shape[1:]) != source.shape[1]:
                raise UserError(
                    "the network has no integer form: a linear layer follows a map, not its mean"
                )
        else:
            settings = {
                name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")
            }
        if len(value.scale) not in (1, weight.shape[1]):
            raise UserError("the network has no integer form: its first convolution has groups")
        weight = weight * value.scale.view(1, -1, 1, 1)  # for integers as input
        bias = torch.zeros(len(weight), dtype=torch.float64) if layer.bias is None else layer.bias
        if operation.users:
            target = self._target(operation.settled)
            if operation.settled is not operation and operation.users[0].kind == "sum":
                target = replace(target, low=-_ANY, high=_ANY)
            settings |= {"low": target.low, "high": target.high}
            scales = torch.maximum(
                weight.abs().amax((1, 2, 3)) / _WEIGHTS, bias.abs() / _LARGEST_BIAS
            ).clamp(min=1e-30)
        else:  # logits are integers times a power of 2, which costs no rounding
            sizes = (
                float(weight.abs().max()) / _LAST_WEIGHTS,
                float(bias.abs().max()) / _LARGEST_BIAS,
            )
            exponent = -math.ceil(math.log2(max(*sizes, 2.0**-60)))
            target, scales = _value(1.0, 1, False), torch.full_like(bias, 2.0**-exponent)
        rounded = {
            "weight": (weight / scales.view(-1, 1, 1, 1)).round(),
            "bias": (bias / scales).round(),
        }
        layer = Convolution(settings, {**rounded, "multiplier": (scales / target.scale).float()})
        return self._add(layer, [value], target)

    def _relu(self, operation: Operation) -> _Value:
        source = operation.inputs[0]
        if source.settled is operation:  # the clamp of what it reads begins at 0
            return self.values[source]
        return self._rescaled(self.values[source], self._target(operation))

    def _sum(self, operation: Operation) -> _Value:
        target = self._target(operation.settled)
        terms = [self.values[term] for term in operation.inputs]
        any_value = replace(target, low=-_ANY, high=_ANY)
        terms = [
            term if torch.equal(term.scale, target.scale) else self._rescaled(term, any_value)
            for term in terms
        ]
        return self._add(Sum({"low": target.low, "high": target.high}, {}), terms, target)

    def _maximum(self, operation: Operation) -> _Value:
        kernel, *geometry, ceil_mode = operation.layer.values()
        pairs = dict(
            zip(("kernel", "stride", "padding", "dilation"), map(_pair, (kernel, *geometry)))
        )
        value = self.values[operation.inputs[0]]
        return self._add(Maximum({**pairs, "ceil_mode": int(ceil_mode)}, {}), [value], value)

    def _mean(self, operation: Operation) -> _Value:
        value, kernel = self.values[operation.inputs[0]], operation.inputs[0].shape[2:]
        total = self._add(
            Total({"kernel": kernel}, {}),
            [value],
            replace(value, scale=value.scale / math.prod(kernel)),
        )
        levels = _POOLED
        return self._rescaled(
            total, _value(self.largest[operation] / levels, levels, operation.is_positive)
        )


def _pair(given: int | tuple[int, int]) -> tuple[int, int]:
    return given if isinstance(given, tuple) else (given, given)
