"""Makes a network of integers of a float network: reads its operations, calibrates the ranges of
their values, and builds the layers.

A real value is an integer times a scale. Between the image and the mean over a map, all values have
8 bits, except the terms of a sum that no convolution computes with its shortcut. All sums that a
shortcut connects have one scale. The scale of each channel's weights is chosen such that its
multiplier is a power of 2.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F

from smoothadv.architectures.input_layers import Center
from smoothadv.base.errors import UserError
from smoothadv.integer.layers import (
    EXACT,
    SEVEN_BITS,
    WHITE,
    Convolution,
    IntegerLayer,
    Maximum,
    Rescaling,
    Step,
    Sum,
    Total,
)
from smoothadv.integer.network import IntegerNetwork
from smoothadv.voting.folding import (
    is_plain_convolution,
    layer_of,
    refresh,
    replace_norms,
    split_entrance,
    traced_plainly,
)

LEVELS = 255
"""The largest of the integers that a convolution reads, where they are not negative."""
_SIGNED, _POOLED = 127, 2**11 - 1
_WEIGHTS = {7: SEVEN_BITS, 8: 127}  # the largest by its bits
_LAST_WEIGHTS = 255
_ANY = 2**23 - 1  # sums of two are exact
_TERM = 2**10 - 1  # the least range of a term of a sum: four times that of the sum
_SHORTCUT = 2**22  # of 2^24 for the shortcut, the rest for the products
_COARSE = 2**-7
_LARGEST_BIAS = 2**22
_EXPONENT = 60  # of multipliers, far from where float32 ends
_SAMPLE = 2**15  # values of each operation and batch
_STRIDE = 2_654_435_761  # a prime, so that the places are of all channels, rows and columns
_SHARES = (0.99, 0.999, 0.9999, 0.99999, 1.0)
_KINDS: dict[Any, str] = {
    **dict.fromkeys((nn.ReLU, F.relu, torch.relu, "relu", "relu_"), "relu"),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "sum"),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, torch.mean, "mean"), "mean"),
    **dict.fromkeys((nn.Identity, nn.Flatten, nn.Dropout, torch.flatten, "flatten"), "same"),
    **{nn.Linear: "convolution", nn.MaxPool2d: "maximum", F.dropout: "same"},
}
"""The kind of an operation by the type of its layer, or else its function or method."""
_IN_PLACE = {operator.iadd, "add_", "relu_"}


class NoIntegerForm(UserError):
    """A float network cannot be converted."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"the network has no integer form: {reason}")


@dataclass(eq=False)
class Operation:
    """One operation: ``kind`` is "image", "convolution" (also a linear layer), "relu", "sum",
    "maximum" or "mean".

    It reads the results of its ``inputs``, and its ``users`` read its own. ``node`` has the result,
    whose ``shape`` is that for one image.
    """

    kind: str
    node: fx.Node
    shape: tuple[int, ...]
    inputs: list[Operation]
    users: list[Operation]
    layer: Any = None

    @property
    def only_user(self) -> Operation | None:
        return self.users[0] if len(self.users) == 1 else None

    @cached_property
    def is_settled(self) -> bool:
        """Whether its result is rounded. Only a ReLU or a sum may read an unrounded one of a
        convolution, only a ReLU that of a sum.
        """
        absorbing = {"convolution": ("relu", "sum"), "sum": ("relu",)}.get(self.kind, ())
        return self.only_user is None or self.only_user.kind not in absorbing

    @property
    def is_term(self) -> bool:
        """Whether a sum alone reads its result, and reads it unrounded."""
        return not self.is_settled and self.users[0].kind == "sum"

    @cached_property
    def settled(self) -> Operation:
        """The operation whose rounded result holds this one's."""
        return self if self.is_settled or self.only_user is None else self.only_user.settled

    @cached_property
    def is_positive(self) -> bool:
        """Whether its results are never negative."""
        return self.kind == "relu" or (
            self.kind in ("maximum", "mean") and self.inputs[0].is_positive
        )


@dataclass(frozen=True)
class FloatNetwork:
    """A base classifier in float64: the ``mean`` and ``std`` [C] of its input layer, and the
    ``graph`` of its network.

    Batch normalization is folded into convolutions; ``operations`` are in the order of the graph,
    the last one makes the logits.
    """

    mean: torch.Tensor
    std: torch.Tensor
    graph: fx.GraphModule
    operations: list[Operation]


def read_network(classifier: nn.Module, image_shape: tuple[int, ...]) -> FloatNetwork:
    """The operations of a copy of a base classifier, for images of this shape; NoIntegerForm where
    it has none.
    """
    entrance, network = split_entrance(
        copy.deepcopy(classifier).cpu().double().eval().requires_grad_(False)
    )
    traced = traced_plainly(network)
    if traced is None or not isinstance(entrance, Center):
        raise NoIntegerForm("it cannot be traced, shares weights, or has no input layer")
    refresh(replace_norms(traced))
    ShapeProp(traced).propagate(torch.zeros(1, *image_shape, dtype=torch.float64))
    mean = entrance.mean.flatten()
    std = getattr(entrance, "std", torch.ones_like(mean)).flatten()
    operations = list(_operations(traced))
    if operations[-1].kind != "convolution" or operations[-1].users:
        raise NoIntegerForm("its logits do not come from a linear layer")
    return FloatNetwork(mean, std, traced, operations)


def _operations(graph: fx.GraphModule) -> Iterator[Operation]:
    made: dict[fx.Node, Operation] = {}
    overwritten: set[Operation] = set()
    for node in graph.graph.nodes:
        if node.op == "output":
            return
        kind, layer = _kind(graph, node)
        inputs = [
            made[value]
            for value in (*node.args, *node.kwargs.values())
            if isinstance(value, fx.Node)
        ]
        if late := overwritten.intersection(inputs):
            name = late.pop().node.name
            raise NoIntegerForm(f"'{node.name}' reads '{name}', which is overwritten before")
        has_argument = node.kwargs.get("inplace") or any(value is True for value in node.args)
        if node.target in _IN_PLACE or has_argument or getattr(layer, "inplace", False):
            overwritten.add(inputs[0])
        if kind == "same":
            made[node] = inputs[0]
            continue
        made[node] = Operation(kind, node, tuple(node.meta["tensor_meta"].shape), inputs, [], layer)
        for one in inputs:
            one.users.append(made[node])
        yield made[node]


def _kind(graph: fx.GraphModule, node: fx.Node) -> tuple[str, Any]:
    """The kind of an operation, or "same" where it changes nothing, and its layer; NoIntegerForm
    for others.
    """
    layer = layer_of(graph, node)
    if node.op == "placeholder":
        return "image", None
    if is_plain_convolution(layer):
        return "convolution", layer
    target: Any = node.target if layer is None else type(layer)
    dimensions = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else ())
    excluded = {
        # of a number, or times one
        "sum": node.kwargs or not all(isinstance(value, fx.Node) for value in node.args),
        "maximum": getattr(layer, "return_indices", False),
        "mean": getattr(layer, "output_size", 1) not in (1, (1, 1))
        or (layer is None and dimensions not in ((2, 3), [2, 3], (-2, -1), [-2, -1])),
        # F.dropout drops values by default.
        "same": target is F.dropout and (node.args[2:3] or (node.kwargs.get("training", True),))[0],
    }
    kind = _KINDS.get(target)
    if kind is None or excluded.get(kind):
        name = getattr(target, "__name__", target)
        raise NoIntegerForm(f"there is none of {name} ('{node.name}')")
    return kind, layer


@torch.inference_mode()
def largest_values(
    network: FloatNetwork, batches: Iterable[torch.Tensor]
) -> dict[Operation, float]:
    """For each rounded result the size above which values are best clamped, for LEVELS levels from
    0 to it; for each term of a sum the largest size.

    ``batches`` are noisy images [B, C, H, W]. The input layer subtracts whole grey levels, as it
    will for integers. Of some quantiles of the sizes, the best has the least mean squared error (as
    in Choukroun et al., 2019, without a grid).
    """
    nodes = {one.node: one for one in network.operations if one.is_settled or one.is_term}
    samples: dict[Operation, list[torch.Tensor]] = {operation: [] for operation in nodes.values()}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if (operation := nodes.get(n)) is not None:
                flat = result.flatten().abs()
                places = torch.arange(min(len(flat), _SAMPLE)) * _STRIDE % len(flat)
                samples[operation].append(flat[places].float())
            return result

    mean = ((network.mean * WHITE).round() / WHITE).view(-1, 1, 1)
    for batch in batches:
        Recorder(network.graph).run((batch.double() - mean) / network.std.view(-1, 1, 1))
    return {
        operation: float(torch.cat(parts).max())
        if operation.is_term
        else _best_clamp(torch.cat(parts))
        for operation, parts in samples.items()
    }


def _best_clamp(sizes: torch.Tensor) -> float:
    """The quantile of ``sizes`` to clamp at; 1 where all are 0."""
    ascending = sizes.sort().values
    found = {
        float(ascending[min(len(sizes) - 1, int(share * len(sizes)))]) for share in _SHARES
    } - {0.0}

    def error(largest: float) -> float:
        step = largest / LEVELS
        return float(((sizes / step).round().clamp(max=LEVELS) * step - sizes).square().mean())

    return min(found, key=error, default=1.0)


@dataclass(frozen=True)
class _Value:
    """Value ``number`` of the integer network: integers in low..high, times ``scale`` [1] (of the
    image: [C]).
    """

    number: int
    scale: torch.Tensor
    low: int
    high: int


def _size(value: _Value) -> int:
    return max(-value.low, value.high)


def _integers(
    weight: torch.Tensor, bias: torch.Tensor, scales: torch.Tensor, target: _Value
) -> dict[str, torch.Tensor]:
    """The tensors of a convolution whose weights and bias have the ``scales`` [O]."""
    return {
        "weight": (weight / scales.view(-1, 1, 1, 1)).round(),
        "bias": (bias / scales).round(),
        "multiplier": (scales / target.scale).float(),
    }


def _fits(tensors: Mapping[str, torch.Tensor], value: _Value, shortcut: _Value) -> bool:
    """Whether a convolution of the value with this shortcut is exact (``Convolution.range_of``)."""
    sums = tensors["weight"].abs().sum((1, 2, 3)) * _size(value) + tensors["bias"].abs()
    multipliers = tensors["multiplier"]
    is_exact = float((sums + _size(shortcut) / multipliers).max()) < EXACT
    return is_exact and float(multipliers.max()) <= 1


def _value(scale: float, levels: int, is_positive: bool) -> _Value:
    scales = torch.tensor([scale], dtype=torch.float64)
    return _Value(0, scales, 0 if is_positive else -levels, levels)


def convert(
    network: FloatNetwork,
    batches: Iterable[torch.Tensor],
    image_shape: tuple[int, ...],
    clip: int,
    weight_bits: int = 7,
) -> IntegerNetwork:
    """The network of integers for images of ``image_shape`` with noise of up to ``clip`` grey
    levels, with weights of 7 or 8 bits; NoIntegerForm where its sums cannot be proven to be exact.

    ``batches`` as in ``largest_values``.
    """
    builder = _Builder(network, largest_values(network, batches), clip, _WEIGHTS[weight_bits])
    try:
        for operation in network.operations:
            builder.add(operation)
        levels = (network.mean * WHITE).round()
        converted = IntegerNetwork(image_shape, clip, levels, builder.steps).eval()
    except ValueError as error:
        raise NoIntegerForm(error) from error
    converted.set_probe()
    return converted


def _scales(
    operations: Iterable[Operation], largest: Mapping[Operation, float]
) -> dict[Operation, float]:
    """The scale of each rounded result: one for all that shortcuts connect, which are the sums and
    what they read.
    """
    chains = {operation: [operation] for operation in largest}
    for operation in operations:
        if operation.kind != "sum":
            continue
        members = [*chains[operation.settled]]
        for term in operation.inputs:
            while term.is_settled:
                members += [one for one in chains[term] if one not in members]
                if term.kind != "maximum":  # which has the scale of what it reads
                    break
                term = term.inputs[0]
        for member in members:
            chains[member] = members
    return {
        operation: max(largest[one] for one in members)
        / (LEVELS if all(one.is_positive for one in members) else _SIGNED)
        for operation, members in chains.items()
    }


class _Builder:
    """Builds the steps of the integer network.

    ``largest`` has the size at which each rounded result is clamped.
    """

    def __init__(
        self,
        network: FloatNetwork,
        largest: Mapping[Operation, float],
        clip: int,
        largest_weight: int,
    ) -> None:
        self.network, self.clip, self.largest_weight = network, clip, largest_weight
        self.largest, self.scales = largest, _scales(network.operations, largest)
        self.steps: list[Step] = []
        self.values: dict[Operation, _Value] = {}

    def add(self, operation: Operation) -> None:
        """Add the layers of an operation, whose inputs have been added."""
        kinds = {source.kind for source in operation.inputs}
        if "image" in kinds and operation.kind != "convolution":
            raise NoIntegerForm(f"a {operation.kind} reads the image, no convolution")
        self.values[operation] = getattr(self, f"_{operation.kind}")(operation)

    def _step(self, layer: IntegerLayer, inputs: Sequence[_Value], result: _Value) -> _Value:
        self.steps.append(Step(layer, tuple(value.number for value in inputs)))
        return replace(result, number=len(self.steps))

    def _target(self, operation: Operation) -> _Value:
        """The scale and the range of a rounded result."""
        levels = LEVELS if operation.is_positive else _SIGNED
        return _value(self.scales[operation], levels, operation.is_positive)

    def _rescaled(self, value: _Value, target: _Value) -> _Value:
        tensors = {"multiplier": (value.scale / target.scale).float()}
        layer = Rescaling({"low": target.low, "high": target.high}, tensors)
        return self._step(layer, [value], target)

    def _image(self, operation: Operation) -> _Value:
        return _Value(0, 1 / (WHITE * self.network.std), -self.clip, WHITE + self.clip)

    def _convolution(self, operation: Operation) -> _Value:
        source, layer = operation.inputs[0], operation.layer
        value = self.values[source]
        weight, settings = layer.weight, {}
        if isinstance(layer, torch.nn.Linear):
            weight = weight[:, :, None, None]
            if math.prod(source.shape[1:]) != source.shape[1]:
                raise NoIntegerForm("a linear layer follows a map, not its mean")
        else:
            settings = {
                name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")
            }
        if len(value.scale) not in (1, weight.shape[1]):
            raise NoIntegerForm("its first convolution has groups")
        weight = weight * value.scale.view(1, -1, 1, 1)  # for integers as input
        bias = torch.zeros(len(weight), dtype=torch.float64) if layer.bias is None else layer.bias
        if not operation.users:  # logits are integers times a power of 2, which costs no rounding
            scale = max(weight.abs().max() / _LAST_WEIGHTS, bias.abs().max() / _LARGEST_BIAS)
            exponent = -math.ceil(math.log2(max(float(scale), 2.0**-60)))
            scales, target = torch.full_like(bias, 2.0**-exponent), _value(1.0, 1, False)
            tensors = _integers(weight, bias, scales, target)
            return self._step(Convolution(settings, tensors), [value], target)
        target = self._target(operation.settled)
        tensors = self._rounded_weights(weight, bias, target)
        for fitting, shortcut in self._with_shortcut(operation, weight, bias, target):
            if _fits(fitting, value, shortcut):
                settings |= {"low": target.low, "high": target.high, "shortcut": 1}
                made = self._step(Convolution(settings, fitting), [value, shortcut], target)
                self.values[operation.users[0]] = made
                return made
        if operation.is_term:
            size = 2 * self.largest[operation] / float(target.scale)  # what images show, twice
            limit = min(_ANY, max(_TERM, 2 ** math.ceil(math.log2(size + 1)) - 1))
            target = replace(target, low=-limit, high=limit)
        settings |= {"low": target.low, "high": target.high}
        return self._step(Convolution(settings, tensors), [value], target)

    def _rounded_weights(
        self, weight: torch.Tensor, bias: torch.Tensor, target: _Value, least: float = 0.0
    ) -> dict[str, torch.Tensor]:
        """The tensors of a convolution whose multipliers are the smallest powers of 2 from
        ``least`` on.
        """
        scales = torch.maximum(
            weight.abs().amax((1, 2, 3)) / self.largest_weight, bias.abs() / _LARGEST_BIAS
        )
        multipliers = (scales / target.scale).clamp(min=least)
        exponents = torch.log2(multipliers).ceil().clamp(-_EXPONENT, _EXPONENT)
        return _integers(weight, bias, target.scale * torch.exp2(exponents), target)

    def _with_shortcut(
        self, operation: Operation, weight: torch.Tensor, bias: torch.Tensor, target: _Value
    ) -> Iterator[tuple[dict[str, torch.Tensor], _Value]]:
        """The tensors with which a term of a sum may add the other one, and that one: if it is
        there, of the sum's scale and shape.

        The second ones have weights of fewer bits where a channel's are so small that its sums
        leave no room for the shortcut. With values of 80, say, their rounding then adds an error of
        up to .2 of the sum's levels, whose own rounding adds .3.
        """
        others = [one for one in operation.users[0].inputs if one is not operation]
        if not operation.is_term or len(others) != 1 or others[0].shape != operation.shape:
            return
        other = self.values.get(others[0])
        if other is None or not other.number or not torch.equal(other.scale, target.scale):
            return
        yield self._rounded_weights(weight, bias, target), other
        room = _size(other) / _SHORTCUT
        if room * weight[0].numel() ** 0.5 <= _COARSE:
            yield self._rounded_weights(weight, bias, target, room), other

    def _relu(self, operation: Operation) -> _Value:
        source = operation.inputs[0]
        if source.settled is operation:  # the clamp of what it reads begins at 0
            return self.values[source]
        return self._rescaled(self.values[source], self._target(operation))

    def _sum(self, operation: Operation) -> _Value:
        if operation in self.values:  # of the convolution that adds a shortcut
            return self.values[operation]
        target = self._target(operation.settled)
        terms = [self.values[term] for term in operation.inputs]
        terms = [
            term
            if torch.equal(term.scale, target.scale)
            else self._rescaled(term, replace(target, low=-_ANY, high=_ANY))
            for term in terms
        ]
        return self._step(Sum({"low": target.low, "high": target.high}, {}), terms, target)

    def _maximum(self, operation: Operation) -> _Value:
        pool, value = operation.layer, self.values[operation.inputs[0]]
        sizes = pool.kernel_size, pool.stride, pool.padding, pool.dilation
        pairs = [size if isinstance(size, tuple) else (size, size) for size in sizes]
        settings = dict(zip(("kernel", "stride", "padding", "dilation"), pairs))
        layer = Maximum({**settings, "ceil_mode": int(pool.ceil_mode)}, {})
        return self._step(layer, [value], value)

    def _mean(self, operation: Operation) -> _Value:
        value, kernel = self.values[operation.inputs[0]], operation.inputs[0].shape[2:]
        mean = replace(value, scale=value.scale / math.prod(kernel))
        total = self._step(Total({"kernel": kernel}, {}), [value], mean)
        scale = self.largest[operation] / _POOLED
        return self._rescaled(total, _value(scale, _POOLED, operation.is_positive))
