"""Layers of whole numbers: one function on every device, whatever the threads, the batch and the
instruction set.

docs/integer.md defines them. Values are integers in float32 tensors. All terms and all partial sums
of a sum are integers of a size below 2^24, so that it is exact in any order; a product, a rounding
to the nearest even integer and a clamp follow, single operations that IEEE 754 fixes. With
gradients, rounding has that of the identity ("straight-through", Bengio et al., 2013).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.integer.arithmetic import only_adds

DEFINITION = 2
"""The version of the definition in docs/integer.md."""
EXACT = 2**24
"""float32 holds all integers up to this size."""
WHITE = 255
SEVEN_BITS = 64
"""The largest weight with which the sum of any two products of bytes stays below 2^15, where the
instructions of some processors saturate.
"""
_ROUNDED = 1 + 2**-22  # more than two roundings to float32 can add
Pair = tuple[int, int]
Range = tuple[int, int]
_RANGES = {
    "low": (1 - EXACT, EXACT - 1),
    "high": (1 - EXACT, EXACT - 1),
    "padding": (0, 255),
    "ceil_mode": (0, 1),
    "shortcut": (0, 1),
}
_TYPES = (torch.int8, torch.int16, torch.int32)
_NO_CLAMP = {"low": 0, "high": -1}
_PROBES = 8


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest even integers; overwrites ``x`` where it needs no gradient."""
    return _Round.apply(x) if x.requires_grad else x.round_()


class IntegerLayer(nn.Module, ABC):
    """A layer with ``settings`` and ``tensors``, as a checkpoint holds them; ValueError where they
    are damaged.

    A subclass is the whole description of a kind of layer. SETTINGS has the names and defaults of
    whole numbers and pairs of them, TENSORS the names of tensors: "multiplier" is float32, others
    hold integers. Results are clamped to ``low``..``high``.
    """

    SETTINGS: ClassVar[dict[str, Any]] = {}
    TENSORS: ClassVar[tuple[str, ...]] = ()
    ARGUMENTS: ClassVar[int] = 1
    low: int
    high: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    ceil_mode: int
    multiplier: torch.Tensor

    def __init__(self, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.arguments = self.ARGUMENTS + int(settings.get("shortcut") == 1)
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
        }
        self.settings = {**self.SETTINGS, **given}
        if self.settings.keys() != self.SETTINGS.keys() or set(tensors) != set(self.TENSORS):
            raise ValueError(f"{type(self).__name__} has {', '.join((*settings, *tensors))}")
        for name, value in self.settings.items():
            numbers = (
                value if isinstance(self.SETTINGS[name], tuple) and len(value) == 2 else (value,)
            )
            least, most = _RANGES.get(name, (1, 255))
            if any(type(number) is not int or not least <= number <= most for number in numbers):
                raise ValueError(f"{type(self).__name__}: {name} is {value!r:.100}")
            setattr(self, name, value)
        outputs = [*tensors["weight"].shape[:1]] if "weight" in tensors else [1]
        for name, tensor in tensors.items():
            shape = list(tensor.shape)
            is_shaped = len(shape) == 4 and 0 not in shape if name == "weight" else shape == outputs
            if not is_shaped:
                raise ValueError(
                    f"{type(self).__name__}: {name} has the shape {shape}, expected "
                    f"{'four sizes above 0' if name == 'weight' else outputs}"
                )
            # Before any rounding: in float32, .9999999999 is 1.
            fits = (
                tensor.dtype == torch.float32
                if name == "multiplier"
                else torch.equal(tensor, tensor.round())
            )
            values = tensor.to(torch.float32, copy=True)
            if not fits or not bool((values.abs() < EXACT).all()):
                raise ValueError(f"{type(self).__name__}: {name} holds other numbers than it may")
            self.register_buffer(name, values)

    @abstractmethod
    def range_of(self, *inputs: Range) -> Range:
        """The least and the largest of results for inputs in these ranges, logits with the first
        above the second; ValueError where a sum may not be exact.
        """

    @abstractmethod
    def onnx(self, writer: Any, inputs: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> str:
        """Add the layer's nodes to an ``export.Writer``; returns the name of the result.

        ``x`` is the first of the ``inputs``, ``y`` the result, of one image.
        """

    def stored(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The constructor's arguments: settings that are not default, tensors in the shortest type
        that holds them.
        """
        settings = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.settings.items()
            if value != self.SETTINGS[name]
        }
        tensors = {}
        for name, buffer in self.named_buffers():
            largest, kind = float(buffer.abs().max()), torch.float32
            if name != "multiplier":
                kind = next(kind for kind in _TYPES if largest <= torch.iinfo(kind).max)
            tensors[name] = buffer.detach().to("cpu", kind, copy=True)
        return settings, tensors

    def _clamped(self, size: float) -> Range:
        """The range after the clamp of integers up to ``size``."""
        if not self.low <= 0 <= self.high:
            raise ValueError(
                f"{type(self).__name__}: it clamps to {self.low}..{self.high}, which must contain 0"
            )
        return max(self.low, -int(size)), min(self.high, int(size))

    def _in_range(self, values: torch.Tensor) -> torch.Tensor:
        clamp = torch.clamp if values.requires_grad else torch.clamp_
        return clamp(values, self.low, self.high)


def _size(limits: Range) -> int:
    return max(map(abs, limits))


class Convolution(IntegerLayer):
    """clamp(round(m (w * x + b))): weight w [O, I / groups, h, w], bias b [O], multiplier m [O],
    float32.

    With ``shortcut`` 1 it reads a second value r, of the result's shape, and is
    clamp(round(m (w * x + b) + r)), where m are powers of 2 up to 1. With ``high`` < ``low`` the
    result is m (w * x + b), where m are powers of 2, too: the last layer, whose results are logits.
    """

    SETTINGS: ClassVar[dict[str, Any]] = {
        **_NO_CLAMP,
        "stride": (1, 1),
        "padding": (0, 0),
        "dilation": (1, 1),
        "groups": 1,
        "shortcut": 0,
    }
    TENSORS = ("weight", "bias", "multiplier")
    weight: torch.Tensor
    bias: torch.Tensor
    shortcut: int
    in_float64 = False
    """Whether the sum is computed in float64, whose kernels only multiply and add: slowly, to
    compare with.
    """

    @property
    def is_last(self) -> bool:
        """Whether the results are logits."""
        return self.high < self.low

    @property
    def has_powers(self) -> bool:
        """Whether all multipliers are powers of 2, with which a product is exact."""
        mantissas = self.multiplier.frexp()[0]
        # A smaller one is 0 to some kernels.
        return bool(((mantissas == 0.5) & (self.multiplier >= 2.0**-126)).all())

    def range_of(self, *inputs: Range) -> Range:
        """sum |w| times the size of an input, plus |b|; a sum that may reach 2^24 is divided into
        exact parts.

        ValueError, too, where a multiplier of the last layer is no power of 2.
        """
        self.largest_input = _size(inputs[0])
        totals = self.weight.double().abs().sum((2, 3)) * self.largest_input  # [O, I]
        channels, self.parts = totals.shape[1], 1
        while any(
            float(part.sum(1).max()) >= EXACT
            for part in totals.split(-(-channels // self.parts), 1)
        ):
            self.parts += 1
            if self.parts > channels or self.groups > 1:
                raise ValueError("a sum over a convolution's inputs may exceed 2^24")
        per_channel = totals.sum(1) + self.bias.double().abs()
        self.largest_sum = float(per_channel.max())
        if self.parts == 1 and self.largest_sum >= EXACT:
            self.parts = 2
        if self.largest_sum >= 2**31:
            raise ValueError("a sum over a convolution's inputs may exceed 2^31")
        if (self.is_last or self.shortcut) and not self.has_powers:
            raise ValueError(
                "a multiplier of the last layer, or of one with a shortcut, is no power of 2 from "
                "2^-126 on"
            )
        multipliers = self.multiplier.double().abs()
        size = float((per_channel * multipliers).max())
        if self.shortcut:
            # What is rounded is a multiple of the multiplier, of at most 24 bits, and so are all
            # partial sums, in any order.
            size += _size(inputs[1])
            if float(multipliers.max()) > 1:
                raise ValueError("a multiplier of a convolution with a shortcut is above 1")
            self.largest_sum = float((per_channel + _size(inputs[1]) / multipliers).max())
            if self.parts > 1 or self.is_last or self.largest_sum >= EXACT:
                raise ValueError("a sum of a convolution and a shortcut may exceed 2^24")
        return (self.low, self.high) if self.is_last else self._clamped(size * _ROUNDED + 1)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """w * x + b, in float64 also where float32's kernels may round and no gradient is asked
        for.
        """
        geometry = self.stride, self.padding, self.dilation, self.groups
        if self.in_float64 or not (torch.is_grad_enabled() or only_adds(x.device.type)):
            return F.conv2d(x.double(), self.weight.double(), self.bias.double(), *geometry).float()
        if self.parts == 1:
            return F.conv2d(x, self.weight, self.bias, *geometry)
        # With groups, only the bias is added apart.
        width = -(-x.shape[1] // self.parts) if self.groups == 1 else x.shape[1]
        pairs = zip(x.split(width, 1), self.weight.split(width, 1))
        return self.sum_of_parts(
            [F.conv2d(part, weight, None, *geometry) for part, weight in pairs]
        )

    def sum_of_parts(self, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sums and the bias, added in float64, where that is exact, and rounded once."""
        return (sum(one.double() for one in sums) + self.bias.double()[:, None, None]).float()

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[1] != self.weight.shape[1] * self.groups:
            raise ValueError(
                f"Convolution: weight has the shape {list(self.weight.shape)}, expected the second "
                f"size {x.shape[1]} / {self.groups} (channels / groups)"
            )
        total = self.total(x)
        if torch.compiler.is_compiling():
            total = rounded(
                total
            )  # changes no integer, and keeps the compiler from rounding multiplier * weight
        multiplier = self.multiplier[:, None, None]
        scaled = total * multiplier if total.requires_grad else total.mul_(multiplier)
        if shortcut is not None:
            if shortcut.shape != scaled.shape:
                raise ValueError(f"a shortcut of {tuple(shortcut.shape[1:])}")
            has_gradient = scaled.requires_grad or shortcut.requires_grad
            scaled = scaled + shortcut if has_gradient else scaled.add_(shortcut)
        return scaled if self.is_last else self._in_range(rounded(scaled))

    def compared(self, x: torch.Tensor, *shortcut: torch.Tensor) -> torch.Tensor:
        """What a check compares with float64: the sums, which show more than what is made of
        them.
        """
        return self.total(x)

    def onnx(self, writer: Any, inputs: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> str:
        geometry = {
            "strides": self.stride,
            "dilations": self.dilation,
            "group": self.groups,
            "pads": self.padding * 2,
        }
        if self.parts == 1 and self.has_powers:
            # The multipliers are in the weights, which rounds nothing.
            weight = writer.scaled(self.weight, self.multiplier)
            bias = writer.dequantized(self.bias, self.multiplier, torch.int32)
            scaled = writer.node("Conv", inputs[0], weight, bias, **geometry)
        else:
            multiplier = writer.constant(self.multiplier[:, None, None])
            scaled = writer.node("Mul", self._onnx_total(writer, inputs[0], geometry), multiplier)
        if self.shortcut:
            scaled = writer.node("Add", scaled, inputs[1])
        return scaled if self.is_last else writer.rounded(scaled, self)

    def _onnx_total(self, writer: Any, x: str, geometry: Mapping[str, Any]) -> str:
        """The name of w * x + b; parts are added as int32, since some runtimes have no float64. Its
        cast keeps the multiplier out of the weights.
        """
        parts, weights = [x], [self.weight]
        if self.parts > 1 and self.groups == 1:
            weights = list(self.weight.split(-(-self.weight.shape[1] // self.parts), 1))
            sizes = writer.constant([weight.shape[1] for weight in weights], torch.int64)
            parts = writer.split(x, sizes, len(weights))
        total = writer.constant(self.bias[:, None, None], torch.int32)
        for part, weight in zip(parts, weights):
            one = writer.node("Conv", part, writer.constant(weight), **geometry)
            total = writer.node("Add", total, writer.cast(one, "INT32"))
        return str(writer.cast(total, "FLOAT"))


@contextmanager
def in_float64(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within, the sums of convolutions among these layers are computed in float64."""
    convolutions = [layer for layer in layers if isinstance(layer, Convolution)]
    for layer in convolutions:
        layer.in_float64 = True
    yield
    for layer in convolutions:
        layer.in_float64 = False


class Rescaling(IntegerLayer):
    """clamp(round(m x)): multiplier m [1], float32."""

    SETTINGS: ClassVar[dict[str, Any]] = _NO_CLAMP
    TENSORS = ("multiplier",)

    def range_of(self, *inputs: Range) -> Range:
        return self._clamped(_size(*inputs) * abs(float(self.multiplier)) * _ROUNDED + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_range(rounded(x * self.multiplier))

    def onnx(self, writer: Any, inputs: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> str:
        scaled = writer.node("Mul", inputs[0], writer.constant(self.multiplier))
        return writer.rounded(scaled, self)


class Sum(IntegerLayer):
    """clamp(x + y)."""

    SETTINGS: ClassVar[dict[str, Any]] = _NO_CLAMP
    ARGUMENTS = 2

    def range_of(self, *inputs: Range) -> Range:
        size = sum(map(_size, inputs))
        if size >= EXACT:
            raise ValueError("a sum of two values may exceed 2^24")
        return self._clamped(size)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._in_range(x + y)

    def onnx(self, writer: Any, inputs: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> str:
        return writer.rounded(writer.node("Add", *inputs), self)


class Maximum(IntegerLayer):
    """The largest value in each window of ``kernel``, with padding that is smaller than all
    values.
    """

    SETTINGS: ClassVar[dict[str, Any]] = {
        "kernel": (1, 1),
        "stride": (1, 1),
        "padding": (0, 0),
        "dilation": (1, 1),
        "ceil_mode": 0,
    }

    def range_of(self, *inputs: Range) -> Range:
        if max(self.padding) > 0 and max(self.dilation) > 1:
            raise ValueError(
                "a window of a maximum may lie in the padding, where there is no value"
            )
        return inputs[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(
            x, self.kernel, self.stride, self.padding, self.dilation, bool(self.ceil_mode)
        )

    def onnx(self, writer: Any, inputs: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> str:
        reach = [size * step - step + 1 for size, step in zip(self.kernel, self.dilation)]
        each = zip(x.shape[2:], y.shape[2:], self.stride, reach, self.padding)
        # Padding behind the map that makes the size right, so that no rule for rounding it up is
        # needed.
        behind = [
            max(0, (new - 1) * step + size - old - before) for old, new, step, size, before in each
        ]
        return writer.node(
            "MaxPool",
            inputs[0],
            kernel_shape=self.kernel,
            strides=self.stride,
            dilations=self.dilation,
            pads=[*self.padding, *behind],
        )


class Total(IntegerLayer):
    """The sum over all positions, which are ``kernel`` in number: [B, C, h, w] gives [B, C, 1,
    1].
    """

    SETTINGS: ClassVar[dict[str, Any]] = {"kernel": (1, 1)}

    def range_of(self, *inputs: Range) -> Range:
        low, high = (limit * math.prod(self.kernel) for limit in inputs[0])
        if _size((low, high)) >= EXACT:
            raise ValueError("a sum over all positions may exceed 2^24")
        return low, high

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] != self.kernel:
            raise ValueError(f"maps of {tuple(x.shape[2:])}, expected {self.kernel}")
        return x.sum((2, 3), keepdim=True)

    def onnx(self, writer: Any, inputs: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> str:
        return writer.node("ReduceSum", inputs[0], writer.constant([2, 3], torch.int64), keepdims=1)


LAYERS: dict[str, type[IntegerLayer]] = {
    layer.__name__.lower(): layer for layer in (Convolution, Rescaling, Sum, Maximum, Total)
}


@dataclass(frozen=True)
class Step:
    """A layer and the numbers of the values that it reads: 0 is the image, n the result of step
    n.
    """

    layer: IntegerLayer
    inputs: tuple[int, ...]


class LayerGraph(nn.Module):
    """Maps images [B, C, H, W] of the shape ``image_shape``, float32, to logits [B, K]: integers
    times a power of 2.

    An image is rounded to grey levels, clamped to -clip..255 + clip, and loses the ``mean`` [C],
    integers, of its channel. ``steps`` follow in order. ValueError unless every sum is proven to be
    exact for all images.
    """

    def __init__(
        self, image_shape: Sequence[int], clip: int, mean: torch.Tensor, steps: Sequence[Step]
    ) -> None:
        super().__init__()
        self.image_shape, self.clip = tuple(image_shape), clip
        self.layers = nn.ModuleList(step.layer for step in steps)
        self.inputs = [step.inputs for step in steps]
        self.mean = nn.Buffer(mean.to(torch.float32, copy=True).view(-1, 1, 1))
        last = {used: number for number, inputs in enumerate(self.inputs, 1) for used in inputs}
        self.unused_after = [
            [used for used in last if last[used] == number] for number in range(len(steps) + 1)
        ]
        size = max(
            abs(edge - int(value))
            for edge in (-self.clip, WHITE + self.clip)
            for value in self.mean.flatten()
        )
        self.ranges = [(-size, size)]
        """The least and the largest integer of each value, by number."""
        for number, layer, inputs in self.steps():
            if len(inputs) != layer.arguments or not all(
                type(one) is int and 0 <= one < number for one in inputs
            ):
                raise ValueError(f"step {number} reads the values {inputs}")
            if getattr(layer, "is_last", False) != (number == len(self.layers)):
                raise ValueError(
                    f"the logits must come from the last step, and only there: found step {number}"
                )
            self.ranges.append(layer.range_of(*(self.ranges[used] for used in inputs)))

    def steps(self) -> Iterator[tuple[int, IntegerLayer, tuple[int, ...]]]:
        """Each layer with its number and the numbers of its inputs: 0 is the image, n the result of
        step n.
        """
        for number, (layer, inputs) in enumerate(zip(self.layers, self.inputs), 1):
            assert isinstance(layer, IntegerLayer)
            yield number, layer, inputs

    def entrance(self, images: torch.Tensor) -> torch.Tensor:
        """The integers [B, C, H, W] that stand for images."""
        return rounded(images * WHITE).clamp(-self.clip, WHITE + self.clip) - self.mean

    def given(self, layer: IntegerLayer, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values that a layer reads, in a type that it takes."""
        return list(values)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values: dict[int, torch.Tensor] = {0: self.entrance(images)}
        for number, layer, inputs in self.steps():
            values[number] = layer(*self.given(layer, [values[used] for used in inputs]))
            for used in self.unused_after[number]:
                del values[used]
        return numbers_of(values[len(self.layers)].flatten(1), images)

    def maps(self, images: torch.Tensor) -> list[torch.Tensor]:
        """All values of images, by number."""
        values = [self.entrance(images)]
        for _, layer, inputs in self.steps():
            values.append(layer(*(values[used] for used in inputs)))
        return values

    def probe_images(self) -> torch.Tensor:
        """Images [8, C, H, W] of random grey levels, float32: half of them in 0..255, half in the
        whole range.
        """
        words = _words(0, math.prod(self.image_shape) * _PROBES).astype(np.int64)
        levels = torch.from_numpy(words).view(_PROBES, *self.image_shape)
        inside = levels[: _PROBES // 2] % (WHITE + 1)
        outside = levels[_PROBES // 2 :] % (WHITE + 2 * self.clip + 1) - self.clip
        return torch.cat([inside, outside]).to(torch.float32) / WHITE

    @torch.inference_mode()
    def inexact_layer(self, images: torch.Tensor) -> int | None:
        """The number of the first convolution that sums inexactly here, None if none does, in
        batches like ``images``.

        Each one is given what it reads of the images, and random integers of the whole range: sums
        near their bounds, which images rarely cause, show rounding first. Compared with float64 are
        the first and the last row. Some rounding shows in few images: that there is none for any is
        proven by ``range_of``, ``only_adds`` and what chooses the form in bytes.
        """
        values = {0: self.entrance(images)}
        for number, layer, inputs in self.steps():
            given = self.given(layer, [values[used] for used in inputs])
            if isinstance(layer, Convolution):
                for x in (given[0], random_integers(number, given[0], *self.ranges[inputs[0]])):
                    found = ends(layer.compared(x, *given[1:]))
                    with in_float64([layer]):
                        expected = layer.compared(*map(ends, (x, *given[1:])))
                    if not torch.equal(found, expected):
                        return number
            values[number] = layer(*given)
            for used in self.unused_after[number]:
                del values[used]
        return None


def numbers_of(logits: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """The logits [B, K] of images that are numbers, and NaN for those that hold a NaN, which no
    type of integers can say.
    """
    return logits.masked_fill(images.detach().amax((1, 2, 3)).isnan()[:, None], math.nan)


def ends(x: torch.Tensor) -> torch.Tensor:
    """The first and the last row."""
    return torch.stack([x[0], x[-1]])


def _words(number: int, count: int) -> np.ndarray:
    """Random integers of 53 bits, uint64, the same with every version of NumPy."""
    return np.random.Philox(key=[DEFINITION, number]).random_raw(count) >> np.uint64(11)


def random_integers(number: int, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Integers in low..high, the same in each run, of the shape, type and device of ``x``, channels
    last.
    """
    some = x[:_PROBES]  # random numbers for all of a large batch would take gigabytes
    words = torch.from_numpy(
        (_words(number, some.numel()) % np.uint64(high - low + 1)).astype(np.int64)
    ) + int(low)
    rows = torch.arange(len(x), device=x.device) % len(some)
    return words.view(some.shape).to(x)[rows].contiguous(memory_format=torch.channels_last)
