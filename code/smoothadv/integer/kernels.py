"""Networks of integers on CUDA: Triton kernels that read and write values of one or two bytes,
channels last.

Integers are the same in every type that holds them, so the logits are those of the definition to
the last bit. A convolution, with its shortcut, is one kernel: an implicit matrix product of digits
in int8, whose sums in int32 are exact. A sum that float32 must
divide into parts is below 2^31, too (``Convolution.range_of``), and is rounded once, as the
definition says: from int32 to float32, to the nearest even. The product with the multiplier and the
rounding behind it are float32 operations, which the compiler must not fuse.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional as F

from smoothadv.base.errors import first_line, is_out_of_memory, warn
from smoothadv.integer.layers import (
    WHITE,
    Convolution,
    IntegerLayer,
    LayerGraph,
    ends,
    in_float64,
    numbers_of,
    random_integers,
)

_WHOLE = tl.constexpr(2.0**23)
"""From here to 2^24 float32 holds the integers and nothing between them: a sum in this range is
rounded to one.
"""
_BLOCK_ROWS = 128
_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32)
# The largest sizes that one and two digits of base 256 hold, from -128 to 127 each.
_DIGITS = (127, 127 * 257)
_SIZES = (
    "CHANNELS",
    "HEIGHT",
    "WIDTH",
    "OUT_CHANNELS",
    "OUT_HEIGHT",
    "OUT_WIDTH",
    "STRIDE_H",
    "STRIDE_W",
    "PADDING_H",
    "PADDING_W",
    "DILATION_H",
    "DILATION_W",
)
# Times 2^7 * 2^7: sums of products of digits stay below 2^31, where some instructions saturate.
_MOST_TERMS = 2**16


@triton.jit
def _rounded(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """clamp(rne(x)) of float32, as int32: clamped first, which gives the same, to at most 2^23 in
    size.
    """
    x = tl.minimum(tl.maximum(x, LOW), HIGH)
    whole = tl.where(x < 0, -_WHOLE, _WHOLE)
    return ((x + whole) - whole).to(tl.int32)


@triton.jit(do_not_specialize=["rows"])
def convolution(
    x,
    mean,
    weight,
    bias,
    multiplier,
    shortcut,
    out,
    rows,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    DEPTH: tl.constexpr,
    DIGITS: tl.constexpr,
    WEIGHT_DIGITS: tl.constexpr,
    IS_LAST: tl.constexpr,
    CLIP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out`` = convolution of ``x``, perhaps plus ``shortcut``; see ``_Convolution``.

    A row of the matrix product is a pixel of the result, a column one of its channels, and a term
    (tap, channel) one of the DEPTH inputs of a sum. With a ``mean``, ``x`` is the image.
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
        # Terms beyond the last tap have weight 0.
        is_inside = (y >= 0) & (y < HEIGHT) & (z >= 0) & (z < WIDTH) & is_row[:, None]
        offset = (down * WIDTH + right) * CHANNELS + channel
        value = tl.load(x + (start[:, None] + offset[None, :]), is_inside, 0)
        if mean is not None:
            value = _rounded(value * 255.0, -CLIP, 255 + CLIP) - tl.load(mean + channel)[None, :]
            value = tl.where(is_inside, value, 0)
        if x.dtype.element_ty == tl.uint8:
            value = (value ^ 128).to(
                tl.int8
            )  # minus 128, which ``bias`` makes good; also outside, where 0 is read
        own = weight + column[None, :] * DEPTH + term[:, None]
        if DIGITS * WEIGHT_DIGITS == 1:
            total = tl.dot(value, tl.load(own), total, out_dtype=tl.int32)
        else:
            value = value.to(tl.int32)
            for digit in tl.static_range(DIGITS):
                low = value.to(tl.int8)  # the last eight bits, with sign
                value = (value - low.to(tl.int32)) >> 8
                for other in tl.static_range(WEIGHT_DIGITS):
                    part = tl.load(own + other * (COLUMNS * BLOCK_N * DEPTH))
                    total += tl.dot(low, part, out_dtype=tl.int32) << (8 * (digit + other))
    total += tl.load(bias + column)[None, :]
    scaled = total.to(tl.float32) * tl.load(multiplier + column)[None, :]
    place = row.to(tl.int64)[:, None] * OUT_CHANNELS + column[None, :]
    keep = is_row[:, None] & (column < OUT_CHANNELS)[None, :]
    if IS_LAST:
        tl.store(out + place, scaled, keep)
    else:
        if shortcut is not None:
            scaled += tl.load(shortcut + place, keep, 0).to(tl.float32)
        tl.store(out + place, _rounded(scaled, LOW, HIGH).to(out.dtype.element_ty), keep)


def launch(kernel: Any, blocks: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel in so many programs, on the current stream of the device of its first
    argument.
    """
    with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
        kernel[(blocks,)](*arguments, **constants, enable_fp_fusion=False)


@dataclass(frozen=True)
class _Value:
    """A value of the network: maps of ``shape`` [C, H, W] of integers in low..high; logits have low
    > high.
    """

    shape: tuple[int, ...]
    low: int
    high: int

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest type."""
        fitting = (
            kind
            for kind in _TYPES
            if self.low >= torch.iinfo(kind).min and self.high <= torch.iinfo(kind).max
        )
        return torch.float32 if self.high < self.low else next(fitting)

    @property
    def digits(self) -> int:
        """How many digits hold these integers, 0 if two do not; one those of 0..255, after 128 was
        subtracted.
        """
        return 1 if self.dtype == torch.uint8 else _digits(max(-self.low, self.high))


def _digits(size: float) -> int:
    return next((number for number, most in enumerate(_DIGITS, 1) if size <= most), 0)


class _Operation(nn.Module):
    """Reads the ``values`` of a network of integers with the numbers ``reads``, and makes the next
    one, ``made``, in the narrowest type.

    Value 0 is the images. This class has the layer compute it, in float32.
    """

    layer: Any
    bias: torch.Tensor

    def __init__(self, network: LayerGraph, number: int, values: Sequence[_Value]) -> None:
        super().__init__()
        self.layer, self.entrance = network.layers[number - 1], network.entrance
        self.reads = network.inputs[number - 1]
        self.read, self.made = [values[used] for used in self.reads], values[number]

    def defined(self, *values: torch.Tensor) -> torch.Tensor:
        """What the definition makes of the values, float32."""
        pairs = zip(self.reads, values)
        return self.layer(*(x.float() if used else self.entrance(x) for used, x in pairs))

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        made = self.defined(*values).to(self.made.dtype)
        return made.contiguous(memory_format=torch.channels_last)


class _Convolution(_Operation):
    """A Convolution, perhaps with a shortcut, by one kernel."""

    def __init__(self, network: LayerGraph, number: int, values: Sequence[_Value]) -> None:
        super().__init__(network, number, values)
        layer, before = self.layer, self.read[0]
        outputs, inputs, height, width = layer.weight.shape
        columns = min(128, max(16, 1 << (outputs - 1).bit_length()))
        terms, depth = inputs * height * width, 64 if inputs % 64 == 0 else 32
        # A row for each output, the channels of one tap after those of another; zeros fill the
        # blocks.
        weight = layer.weight.permute(0, 2, 3, 1).reshape(outputs, terms).to(torch.int64)
        bias, fill = layer.bias.to(torch.int64), -outputs % columns
        if before.dtype == torch.uint8:
            bias = bias + 128 * weight.sum(1)
        weight, digits = F.pad(weight, (0, -terms % depth, 0, fill)), list[torch.Tensor]()
        for _ in range(_digits(float(layer.weight.abs().max()))):
            digits.append((weight + 128) % 256 - 128)
            weight = (weight - digits[-1]) // 256
        self.register_buffer("weight", torch.stack(digits).to(torch.int8))
        self.register_buffer("bias", F.pad(bias, (0, fill)).to(torch.int32))
        self.register_buffer("multiplier", F.pad(layer.multiplier, (0, fill)))
        self.register_buffer(
            "mean", None if self.reads[0] else network.mean.flatten().to(torch.int32)
        )
        sizes = *before.shape, *self.made.shape, *layer.stride, *layer.padding, *layer.dilation
        self.constants = {
            **dict(zip(_SIZES, sizes)),
            "KERNEL_WIDTH": width,
            "DEPTH": terms + -terms % depth,
            "IS_LAST": layer.is_last,
            "CLIP": network.clip,
            "LOW": layer.low,
            "HIGH": layer.high,
            "DIGITS": before.digits,
            "WEIGHT_DIGITS": len(digits),
            "num_warps": 4 if self.reads[0] and columns < 128 else 8,
            "BLOCK_M": _BLOCK_ROWS,
            "BLOCK_N": columns,
            "BLOCK_K": depth,
        }

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        x, shortcut = values[0], values[1] if len(values) > 1 else None
        made = torch.empty(
            (len(x), *self.made.shape),
            dtype=self.made.dtype,
            device=x.device,
            memory_format=torch.channels_last,
        )
        blocks = -(-(made.numel() // made.shape[1]) // self.constants["BLOCK_M"])
        launch(
            convolution,
            blocks * (len(self.bias) // self.constants["BLOCK_N"]),
            x,
            self.mean,
            self.weight,
            self.bias,
            self.multiplier,
            shortcut,
            made,
            made.numel() // made.shape[1],
            **self.constants,
        )
        return made


def _is_suitable(layer: IntegerLayer, before: _Value) -> bool:
    """Whether the kernel computes this layer of this value."""
    if not isinstance(layer, Convolution) or max(-layer.low, layer.high) > _WHOLE.value:
        return False
    is_small = layer.groups == 1 and layer.weight[0].numel() <= _MOST_TERMS
    return bool(is_small and before.digits and _digits(float(layer.weight.abs().max())))


class KernelNetwork(nn.Module):
    """A network of integers, by these kernels: maps images [B, C, H, W], float32, to logits [B, K].
    No gradients.

    It shares the layers of the ``network``. Layers without a kernel compute as they are.
    """

    operations: Any

    def __init__(self, network: LayerGraph) -> None:
        super().__init__()
        maps = network.maps(network.mean.new_zeros(1, *network.image_shape))
        values = [_Value(tuple(x.shape[1:]), *each) for x, each in zip(maps, network.ranges)]
        self.clip, self.unused_after = network.clip, network.unused_after
        self.operations = nn.ModuleList(
            (_Convolution if _is_suitable(layer, values[inputs[0]]) else _Operation)(
                network, number, values
            )
            for number, layer, inputs in network.steps()
        )

    @torch.compiler.disable
    def forward(
        self, images: torch.Tensor, look: Callable[..., None] = lambda *seen: None
    ) -> torch.Tensor:
        """The logits; ``look`` is called with the number of each value, the operation that made it,
        what that read, and the value.
        """
        values = {0: images.contiguous(memory_format=torch.channels_last)}
        for number, operation in enumerate(self.operations, 1):
            read = [values[used] for used in operation.reads]
            values[number] = operation(*read)
            look(number, operation, read, values[number])
            for used in self.unused_after[number]:
                del values[used]
        return numbers_of(values[len(self.operations)].flatten(1), images)

    @torch.inference_mode()
    def inexact_layer(self, images: torch.Tensor) -> int | None:
        """The number of a value that is not as defined here, None if there is none, in batches like
        ``images``.

        As ``LayerGraph.inexact_layer``: each operation is given what it reads of the images,
        and random integers of the whole range. What it makes is compared with the definition, in
        float64, in the first and the last row.
        """
        inexact: list[int] = []

        def compare(
            number: int, operation: _Operation, read: list[torch.Tensor], made: torch.Tensor
        ) -> None:
            random = []
            for used, value, x in zip(operation.reads, operation.read, read):
                limits = (value.low, value.high) if used else (-self.clip, WHITE + self.clip)
                integers = random_integers(1, x, *limits)
                random.append(integers if used else integers / WHITE)
            for given, found in ((read, made), (random, operation(*random))):
                with in_float64([operation.layer]):
                    expected = operation.defined(*(ends(x) for x in given))
                if not torch.equal(ends(found).float(), expected):
                    inexact.append(number)

        self(images, compare)
        return min(inexact, default=None)


def kernel_form(network: LayerGraph, device: torch.device) -> KernelNetwork | None:
    """The same network by these kernels, for inference; None, with a warning, where they do not
    run.

    ``voting.counter.check_integers`` says whether it computes exactly.
    """
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    try:
        with torch.inference_mode():
            form = KernelNetwork(network).eval()
            form(network.probe_images().to(device))
    except Exception as error:  # a compiler may fail with any exception
        if is_out_of_memory(error):
            raise
        warn(
            f"Triton's kernels for integers do not run here, which costs speed: {first_line(error)}"
        )
        return None
    return form
