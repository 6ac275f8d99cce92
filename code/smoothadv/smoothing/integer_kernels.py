"""Networks of integers on CUDA: Triton kernels that read and write values of one or two bytes, channels last.

Integers are the same in every type that holds them, so the logits are those of the definition to the last bit. A
convolution, the sum with a shortcut and the rescaling of the result are one kernel: an implicit matrix product of
digits in int8, whose sums in int32 are exact. A sum that float32 must divide into parts is below 2^31, too
(``Convolution.bound``), and is rounded once, as the definition says: from int32 to float32, to the nearest even. The
product with the multiplier and the rounding behind it are float32 operations, which the compiler must not fuse.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures.integer_layers import Convolution, IntegerLayer, Maximum, Rescaling, Sum, in_float64
from smoothadv.architectures.integer_network import WHITE, IntegerNetwork, digest_of_logits, random_integers
from smoothadv.errors import first_line, warn

_WHOLE = tl.constexpr(2.0**23)
"""From here to 2^24 float32 holds the integers and nothing between them: a sum in this range is rounded to one."""
_BLOCK_ROWS, _BLOCK_VALUES = 128, 1024
_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32)
_DIGITS = (127, 127 * 257)  # the largest sizes that one and two digits of base 256 hold, which go from -128 to 127
_PAIRS = "STRIDE_H", "STRIDE_W", "PADDING_H", "PADDING_W", "DILATION_H", "DILATION_W"
_MOST_TERMS = 2**16  # times 2^7 * 2^7: sums of products of digits stay below 2^31, where some instructions saturate


@triton.jit
def _rounded(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """clamp(rne(x)) of float32, as int32: clamped first, which gives the same, to at most 2^23 in size."""
    x = tl.minimum(tl.maximum(x, LOW), HIGH)
    whole = tl.where(x < 0, -_WHOLE, _WHOLE)
    return ((x + whole) - whole).to(tl.int32)


@triton.jit
def convolution(
    x, mean, weight, bias, multiplier, shortcut, wide, narrow, narrow_multiplier, rows,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    DEPTH: tl.constexpr, DIGITS: tl.constexpr, WEIGHT_DIGITS: tl.constexpr, IS_LAST: tl.constexpr, CLIP: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, SUM_LOW: tl.constexpr, SUM_HIGH: tl.constexpr,
    NARROW_LOW: tl.constexpr, NARROW_HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``wide`` = convolution of ``x``, perhaps plus ``shortcut``; ``narrow`` = that, rescaled; see ``_Convolution``.

    A row of the matrix product is a pixel of the result, a column one of its channels, and a term (tap, channel) one of
    the DEPTH inputs of a sum. With a ``mean``, ``x`` is the image.
    """
    COLUMNS: tl.constexpr = (OUT_CHANNELS + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0)
    row = (block // COLUMNS) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (block % COLUMNS) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < rows
    pixel = row % (OUT_HEIGHT * OUT_WIDTH)
    top = (pixel // OUT_WIDTH) * STRIDE_H - PADDING_H
    left = (pixel % OUT_WIDTH) * STRIDE_W - PADDING_W
    image = (row // (OUT_HEIGHT * OUT_WIDTH)).to(tl.int64)
    start = ((image * HEIGHT + top) * WIDTH + left) * CHANNELS
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(0, DEPTH, BLOCK_K):
        term = first + tl.arange(0, BLOCK_K)
        if CHANNELS % BLOCK_K == 0:  # one tap: a number
            tap = first // CHANNELS
            down, right = (tap // KERNEL_WIDTH) * DILATION_H, (tap % KERNEL_WIDTH) * DILATION_W
            y, z = (top + down)[:, None], (left + right)[:, None]
            channel = first % CHANNELS + tl.arange(0, BLOCK_K)
        else:
            tap = term // CHANNELS
            down, right = (tap // KERNEL_WIDTH) * DILATION_H, (tap % KERNEL_WIDTH) * DILATION_W
            y, z = top[:, None] + down[None, :], left[:, None] + right[None, :]
            channel = term % CHANNELS
        # Terms whole the last tap have weights of 0.
        is_inside = (y >= 0) & (y < HEIGHT) & (z >= 0) & (z < WIDTH) & is_row[:, None]
        offset = (down * WIDTH + right) * CHANNELS + channel
        value = tl.load(x + (start[:, None] + offset[None, :]), is_inside, 0)
        if mean is not None:
            value = _rounded(value * 255.0, -CLIP, 255 + CLIP) - tl.load(mean + channel)[None, :]
            value = tl.where(is_inside, value, 0)
        if x.dtype.element_ty == tl.uint8:
            value = (value ^ 128).to(tl.int8)  # minus 128, which ``bias`` makes good; also outside, where 0 is read
        own = weight + column[None, :] * DEPTH + term[:, None]
        if DIGITS * WEIGHT_DIGITS == 1:
            total = tl.dot(value, tl.load(own), total, out_dtype=tl.int32)
        else:
            value = value.to(tl.int32)
            for digit in tl.static_range(DIGITS):
                low = value.to(tl.int8)  # the last eight bits, with sign
                value = (value - low.to(tl.int32)) >> 8
                for of_weight in tl.static_range(WEIGHT_DIGITS):
                    part = tl.load(own + of_weight * (COLUMNS * BLOCK_N * DEPTH))
                    total += tl.dot(low, part, out_dtype=tl.int32) << (8 * (digit + of_weight))
    total += tl.load(bias + column)[None, :]
    scaled = total.to(tl.float32) * tl.load(multiplier + column)[None, :]
    place = row.to(tl.int64)[:, None] * OUT_CHANNELS + column[None, :]
    keep = is_row[:, None] & (column < OUT_CHANNELS)[None, :]
    if IS_LAST:
        tl.store(wide + place, scaled, keep)
    else:
        result = _rounded(scaled, LOW, HIGH)
        if shortcut is not None:
            result += tl.load(shortcut + place, keep, 0).to(tl.int32)
            result = tl.minimum(tl.maximum(result, SUM_LOW), SUM_HIGH)
        if wide is not None:
            tl.store(wide + place, result.to(wide.dtype.element_ty), keep)
        if narrow is not None:
            result = _rounded(result.to(tl.float32) * tl.load(narrow_multiplier), NARROW_LOW, NARROW_HIGH)
            tl.store(narrow + place, result.to(narrow.dtype.element_ty), keep)


@triton.jit
def maximum(
    x, out, number, lowest,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr, KERNEL_WIDTH: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``out`` = the largest value in each window of ``x``; no value is below ``lowest``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pixel, channel = at // CHANNELS, at % CHANNELS
    image, pixel = pixel // (OUT_HEIGHT * OUT_WIDTH), pixel % (OUT_HEIGHT * OUT_WIDTH)
    top, left = (pixel // OUT_WIDTH) * STRIDE_H - PADDING_H, (pixel % OUT_WIDTH) * STRIDE_W - PADDING_W
    largest = tl.zeros([BLOCK], tl.int32) + lowest
    for tap in tl.static_range(KERNEL_HEIGHT * KERNEL_WIDTH):
        y, z = top + (tap // KERNEL_WIDTH) * DILATION_H, left + (tap % KERNEL_WIDTH) * DILATION_W
        is_inside = (at < number) & (y >= 0) & (y < HEIGHT) & (z >= 0) & (z < WIDTH)
        value = tl.load(x + ((image * HEIGHT + y) * WIDTH + z) * CHANNELS + channel, is_inside, 0).to(tl.int32)
        largest = tl.maximum(largest, tl.where(is_inside, value, lowest))
    tl.store(out + at, largest.to(out.dtype.element_ty), at < number)


def launch(kernel: Any, blocks: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel in so many programs, on the current stream of the device of its first argument."""
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
        kernel[(blocks,)](*arguments, **constants, enable_fp_fusion=False)


@dataclass(frozen=True)
class _Value:
    """A value of the network: maps of ``shape`` [C, H, W] of integers in low..high; logits have low > high."""

    shape: tuple[int, ...]
    low: int
    high: int

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest type."""
        fitting = (kind for kind in _TYPES if self.low >= torch.iinfo(kind).min and self.high <= torch.iinfo(kind).max)
        return torch.float32 if self.high < self.low else next(fitting)

    @property
    def digits(self) -> int:
        """How many digits hold these integers, 0 if two do not; one those of 0..255, after 128 was subtracted."""
        return 1 if self.dtype == torch.uint8 else _digits(max(-self.low, self.high))

    def empty(self, rows: int, device: torch.device) -> torch.Tensor:
        """Memory for the maps of so many images."""
        shape = (rows, *self.shape)
        return torch.empty(shape, dtype=self.dtype, device=device, memory_format=torch.channels_last)


def _digits(size: float) -> int:
    return next((number for number, most in enumerate(_DIGITS, 1) if size <= most), 0)


class _Operation(nn.Module):
    """Reads the values ``reads`` of a network of integers and makes the values ``makes``: numbers of ``values``.

    Value 0 is the images. The first of ``layers`` reads the first values, each other one the result before it and what
    is left of the values. What is made are the last results. This class has the layers compute them, in float32.
    """

    layers: nn.ModuleList

    def __init__(
        self,
        network: IntegerNetwork,
        layers: Sequence[IntegerLayer],
        reads: Sequence[int],
        makes: Sequence[int],
        values: Sequence[_Value],
    ) -> None:
        super().__init__()
        self.layers, self.reads, self.makes = nn.ModuleList(layers), tuple(reads), tuple(makes)
        self.entrance = network.entrance
        self.read, self.made = ([values[number] for number in numbers] for numbers in (reads, makes))

    def defined(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """What the definition makes of the values, float32."""
        floats = (x.float() if number else self.entrance(x) for number, x in zip(self.reads, values))
        results: list[torch.Tensor] = []
        for layer in self.layers:
            given = results[-1:]
            given += [next(floats) for _ in range(int(layer.ARGUMENTS) - len(given))]
            results.append(layer(*given))
        return results[-len(self.makes) :]

    def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(made.dtype) for x, made in zip(self.defined(*values), self.made)]

    def _geometry(self) -> dict[str, int]:
        """What the kernels have to know of the first layer."""
        layer, shape = self.layers[0], (*self.read[0].shape, *self.made[0].shape[1:])
        names = "CHANNELS", "HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH"
        return dict(zip((*names, *_PAIRS), (*shape, *layer.stride, *layer.padding, *layer.dilation)))


class _Maximum(_Operation):
    """A Maximum, by a kernel."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        kernel = dict(zip(("KERNEL_HEIGHT", "KERNEL_WIDTH"), self.layers[0].kernel))
        self.constants = {**kernel, **self._geometry(), "BLOCK": _BLOCK_VALUES}

    def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        (x,), (made,) = values, self.made
        out = made.empty(len(x), x.device)
        launch(maximum, -(-out.numel() // _BLOCK_VALUES), x, out, out.numel(), made.low, **self.constants)
        return [out]


class _Convolution(_Operation):
    """A Convolution, with the Sum and the Rescaling behind it where there are such layers, by one kernel."""

    weight: torch.Tensor
    bias: torch.Tensor
    multiplier: torch.Tensor
    mean: torch.Tensor

    def __init__(self, network: IntegerNetwork, *given: Any) -> None:
        super().__init__(network, *given)
        layer, before = self.layers[0], self.read[0]
        assert isinstance(layer, Convolution)
        outputs, inputs, height, width = layer.weight.shape
        columns = min(128, max(16, 1 << (outputs - 1).bit_length()))
        terms, depth = inputs * height * width, 64 if inputs % 64 == 0 else 32
        # A row for each output, the channels of one tap after those of another; zeros fill the blocks.
        weight = layer.weight.permute(0, 2, 3, 1).reshape(outputs, terms).to(torch.int64)
        bias, fill = layer.bias.to(torch.int64), -outputs % columns
        if before.dtype == torch.uint8:
            bias = bias + 128 * weight.sum(1)
        weight, digits = F.pad(weight, (0, -terms % depth, 0, fill)), list[torch.Tensor]()
        for _ in range(_digits(float(layer.weight.abs().max()))):
            digits.append((weight + 128) % 256 - 128)
            weight = (weight - digits[-1]) // 256
        tensors = {"weight": torch.stack(digits).to(torch.int8), "bias": F.pad(bias, (0, fill)).to(torch.int32)}
        tensors |= {"multiplier": F.pad(layer.multiplier, (0, fill)), "mean": network.mean.flatten().to(torch.int32)}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        by_kind = {type(each): each for each in self.layers}
        self.has_narrow = Rescaling in by_kind
        self.has_wide = len(self.makes) > self.has_narrow
        ranges = {"": layer, "SUM_": by_kind.get(Sum, layer), "NARROW_": by_kind.get(Rescaling, layer)}
        self.constants = {
            **self._geometry(),
            **{"OUT_CHANNELS": outputs, "KERNEL_WIDTH": width, "DEPTH": self.weight.shape[2], "DIGITS": before.digits},
            **{"WEIGHT_DIGITS": len(digits), "IS_LAST": layer.is_last, "CLIP": network.clip},
            **{
                name + limit: getattr(each, limit.lower()) for name, each in ranges.items() for limit in ("LOW", "HIGH")
            },
            **{"BLOCK_M": _BLOCK_ROWS, "BLOCK_N": columns, "BLOCK_K": depth, "num_warps": 8 if columns == 128 else 4},
        }

    def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        x, *shortcut = values
        made = [value.empty(len(x), x.device) for value in self.made]
        rows = made[0].numel() // made[0].shape[1]
        launch(
            convolution,
            -(-rows // self.constants["BLOCK_M"]) * (len(self.bias) // self.constants["BLOCK_N"]),
            *(x, None if self.reads[0] else self.mean, self.weight, self.bias, self.multiplier),
            *(shortcut or [None]),
            made[0] if self.has_wide else None,
            *((made[-1], self.layers[-1].multiplier) if self.has_narrow else (None, None)),
            rows,
            **self.constants,
        )
        return made


def _values(network: IntegerNetwork) -> list[_Value]:
    """The values of a network, by number; their ranges are proven."""
    most = int(network.sizes[0])
    maps = [network.entrance(network.mean.new_zeros(1, *network.image_shape))]
    values = [_Value(tuple(maps[0].shape[1:]), -most, most)]
    for number, layer, inputs in network.steps():
        maps.append(layer(*(maps[used] for used in inputs)))
        most, is_positive = int(network.sizes[number]), values[inputs[0]].low >= 0
        low, high = getattr(layer, "low", 0 if is_positive else -most), getattr(layer, "high", most)
        values.append(_Value(tuple(maps[-1].shape[1:]), max(low, -most), min(high, most)))
    return values


def _is_rounded(layer: IntegerLayer) -> bool:
    """Whether ``_rounded`` knows the range of a layer."""
    return max(-layer.low, layer.high) <= _WHOLE.value


def _is_suitable(layer: IntegerLayer, before: _Value) -> bool:
    """Whether ``_Convolution`` computes a layer that reads this value."""
    if not isinstance(layer, Convolution) or layer.groups > 1 or layer.weight[0].numel() > _MOST_TERMS:
        return False
    return bool(before.digits and _digits(float(layer.weight.abs().max())) and _is_rounded(layer))


class KernelNetwork(nn.Module):
    """A network of integers, by these kernels: maps images [B, C, H, W], float32, to logits [B, K]. No gradients.

    It shares the layers of the ``network``, whose values have the same numbers here, and leaves those as they are that
    have no kernel.
    """

    def __init__(self, network: IntegerNetwork) -> None:
        super().__init__()
        values, steps = _values(network), {number: (layer, inputs) for number, layer, inputs in network.steps()}
        readers = Counter(used for inputs in network.inputs for used in inputs)
        # The later one of the convolutions that a sum alone reads takes the sum along, and what makes a value for
        # several readers also rescales it, if one of them does.
        makers = {number: number for number, (layer, of) in steps.items() if _is_suitable(layer, values[of[0]])}
        for number, (layer, inputs) in steps.items():
            own = [used for used in inputs if makers.get(used) == used and readers[used] == 1]
            if isinstance(layer, Sum) and own:
                makers[number] = makers.pop(max(own))
        along = {
            inputs[0]: number
            for number, (layer, inputs) in reversed(steps.items())
            if isinstance(layer, Rescaling) and inputs[0] in makers and _is_rounded(layer)
        }
        done, self.operations = {*along.values(), *makers.values()} - makers.keys(), nn.ModuleList()
        for number, (layer, inputs) in steps.items():
            if number in done:
                continue
            first, rescaled = makers.get(number, number), [along[number]] if number in along else []
            merged = [steps[each][0] for each in dict.fromkeys((first, number, *rescaled))]
            reads = [*steps[first][1], *(used for used in inputs if first != number and used != first)]
            makes = [number] * (not rescaled or readers[number] > 1) + rescaled
            kind = _Maximum if isinstance(layer, Maximum) and inputs[0] else _Operation
            kind = _Convolution if number in makers else kind
            self.operations.append(kind(network, merged, reads, makes, values))
        self.clip = network.clip

    def _run(self, images: torch.Tensor) -> Iterator[tuple[_Operation, list[torch.Tensor], list[torch.Tensor]]]:
        """Each operation with the values that it reads and those that it makes."""
        values = {0: images.contiguous(memory_format=torch.channels_last)}
        last = {used: index for index, operation in enumerate(self.operations) for used in operation.reads}
        for index, operation in enumerate(self.operations):
            read = [values[used] for used in operation.reads]
            made = operation(*read)
            values.update(zip(operation.makes, made))
            yield operation, read, made
            for used in operation.reads:
                if last[used] == index:
                    values.pop(used, None)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for _, _, made in self._run(images):
            pass
        # An integer cannot tell that the image held a NaN.
        return made[0].flatten(1).masked_fill_(images.amax((1, 2, 3)).isnan()[:, None], math.nan)

    @torch.inference_mode()
    def inexact_layer(self, images: torch.Tensor) -> int | None:
        """The number of a value that is not the defined one here, None if there is none, in batches like ``images``.

        As ``IntegerNetwork.inexact_layer``: of each operation, what it makes of the images and of random integers of
        the whole range is compared with the definition, whose sums are then in float64, in the first and last row.
        """
        for operation, read, made in self._run(images):
            random = [
                random_integers(number, x, each.low, each.high)
                if number
                else random_integers(0, x, -self.clip, WHITE + self.clip) / WHITE
                for number, x, each in zip(operation.reads, read, operation.read)
            ]
            for given, found in ((read, made), (random, operation(*random))):
                with in_float64(operation.layers):
                    expected = operation.defined(*(_ends(x) for x in given))
                for number, one, other in zip(operation.makes, found, expected):
                    if not torch.equal(_ends(one).float(), other):
                        return number
        return None


def _ends(x: torch.Tensor) -> torch.Tensor:
    """The first and the last row, or the only one."""
    return x[:: max(1, len(x) - 1)]


def fast_form(network: IntegerNetwork, device: torch.device) -> KernelNetwork | None:
    """The ``network``, on this device, by these kernels; None where they do not run or give other logits."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    try:
        form = KernelNetwork(network).eval()
        with torch.inference_mode():
            if digest_of_logits(form(network.probe_images().to(device))) == network.probe:
                return form
        reason = "they compute something else"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may fail with any exception
        reason = first_line(error)
    warn(f"Triton's kernels for networks of integers do not run here, which costs speed: {reason}")
    return None
