"""The noise of a whole batch in one launch: Triton kernels, for CUDA.

They draw the words of ``noise.philox``. Rounded noise is that of ``RoundedGaussianNoise``, bit for
bit. Gaussian noise follows Box and Muller in float64, by operations that IEEE 754 specifies and
that are never fused, and is rounded to float32 once. Of a float64 Box-Muller of the same words it
lies within 2.4e-7 sigma where sigma is a power of two, else within half a unit in the last place,
6e-8 of its size: within 4e-7 sigma up to 6.7 sigma, beyond which one draw in 5 * 10^10 lies.
Measured at 2 * 10^7 draws: 2.5e-7 sigma.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from smoothadv.noise.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(each) for each in MULTIPLIERS)
_KEY_STEP_0, _KEY_STEP_1 = (tl.constexpr(each) for each in KEY_STEPS)
_ROUNDS = tl.constexpr(ROUNDS)
# A literal would become float32 first in some versions of Triton.
_LOG_2, _ANGLE = tl.constexpr(math.log(2)), tl.constexpr(2 * math.pi * 2.0**-32)
_UNIT = tl.constexpr(2.0**-32)
_BLOCK = 256
VERSION = f"Triton {triton.__version__}"


@triton.jit
def words_at(counter, draw, example, purpose, k0, k1):
    """The four words of each counter: as ``philox``, of uint32."""
    c0, c1, c2, c3 = counter, draw, example, purpose
    for _ in tl.static_range(_ROUNDS):
        h0, l0 = tl.umulhi(c0, _MULTIPLIER_0), c0 * _MULTIPLIER_0
        h1, l1 = tl.umulhi(c2, _MULTIPLIER_1), c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 = (k0 + _KEY_STEP_0).to(tl.uint32)
        k1 = (k1 + _KEY_STEP_1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _radius(word, sigma):
    """sigma * sqrt(-2 log u) for u = (word + 1/2) / 2^32, in float64, to 3e-9 sigma."""
    u = (word.to(tl.float64) + 0.5) * _UNIT
    bits = u.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    is_large = mantissa > 1.5
    mantissa = tl.where(is_large, mantissa * 0.5, mantissa)
    exponent = tl.where(is_large, exponent + 1, exponent)
    # log m = 2 artanh s for s = (m - 1) / (m + 1), |s| <= 1/5: the next term of the series is below
    # 2e-10.
    s = (mantissa - 1.0) / (mantissa + 1.0)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11)))))
    log = exponent.to(tl.float64) * tl.full([1], _LOG_2, tl.float64) + 2.0 * s * series
    return sigma * tl.sqrt(-2.0 * log)


@triton.jit
def _cosine_and_sine(word):
    """Of the angle word / 2^32 of a turn, in float64: Taylor's series at the nearest quarter turn,
    to 2e-10.
    """
    quarter = (word + 0x20000000) >> 30
    angle = (word - (quarter << 30)).to(tl.int32).to(tl.float64) * tl.full([1], _ANGLE, tl.float64)
    q = angle * angle
    cosine = 1.0 - q * (1 / 2 - q * (1 / 24 - q * (1 / 720 - q * (1 / 40320 - q * (1 / 3628800)))))
    sine = angle * (
        1.0 - q * (1 / 6 - q * (1 / 120 - q * (1 / 5040 - q * (1 / 362880 - q * (1 / 39916800)))))
    )
    is_even, sign = (quarter & 1) == 0, tl.where((quarter & 2) == 0, 1.0, -1.0).to(tl.float64)
    return tl.where(is_even, cosine, -sine) * sign, tl.where(is_even, sine, cosine) * sign


@triton.jit
def _counters(plan, rows, counters, lane, block):
    """What the lanes of a program compute: rows, their images, counters of the rows, and these
    counters' words.
    """
    start = tl.program_id(0).to(tl.int64) * block
    row = start // counters
    lane += (start - row * counters).to(tl.int32)
    row, counter = row + lane // counters, lane % counters
    at = (
        plan + (tl.minimum(row, rows - 1) + 1) * 4
    )  # lanes beyond the last row read that of the last one
    draw, example, purpose = (
        tl.load(at + 1).to(tl.uint32),
        tl.load(at + 2).to(tl.uint32),
        tl.load(at + 3).to(tl.uint32),
    )
    k0, k1 = tl.load(plan).to(tl.uint32), tl.load(plan + 1).to(tl.uint32)
    w0, w1, w2, w3 = words_at(counter.to(tl.uint32), draw, example, purpose, k0, k1)
    return row, tl.load(at).to(tl.pointer_type(tl.float32)), counter, w0, w1, w2, w3


@triton.jit
def _place(out, row, coordinate, plane, row_stride, channel_stride, pixel_stride):
    """Where a coordinate, counted in [C, H, W], lies in a row."""
    channel, pixel = coordinate // plane, coordinate % plane
    return (
        out
        + row * row_stride
        + channel.to(tl.int64) * channel_stride
        + pixel.to(tl.int64) * pixel_stride
    )


@triton.jit
def gaussian(
    out,
    plan,
    rows,
    counters,
    dimension,
    plane,
    row_stride,
    channel_stride,
    pixel_stride,
    BLOCK: tl.constexpr,
):
    """``out`` = image + N(0, sigma^2): summed in float32, then rounded to the type of ``out``."""
    row, image, counter, w0, w1, w2, w3 = _counters(
        plan, rows, counters, tl.arange(0, BLOCK), BLOCK
    )
    sigma = tl.load(plan + 2).to(tl.float64, bitcast=True)
    for half in tl.static_range(2):
        radius = _radius(w0 if half == 0 else w2, sigma)
        cosine, sine = _cosine_and_sine(w1 if half == 0 else w3)
        for part in tl.static_range(2):
            normal = (radius * (cosine if part == 0 else sine)).to(tl.float32)
            coordinate = (2 * half + part) * counters + counter
            keep = (row < rows) & (coordinate < dimension)
            noisy = tl.load(image + coordinate, keep, 0.0) + normal
            place = _place(out, row, coordinate, plane, row_stride, channel_stride, pixel_stride)
            tl.store(place, noisy.to(out.dtype.element_ty), keep)


@triton.jit
def rounded(
    out,
    plan,
    rows,
    counters,
    dimension,
    plane,
    row_stride,
    channel_stride,
    pixel_stride,
    thresholds,
    starts,
    clip,
    SHIFT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out`` = image + round(N(0, (255 sigma)^2)) / 255, clipped: summed in integers."""
    row, image, counter, w0, w1, w2, w3 = _counters(
        plan, rows, counters, tl.arange(0, BLOCK), BLOCK
    )
    for half in tl.static_range(2):
        high, low = (w0 if half == 0 else w2).to(tl.int64), (w1 if half == 0 else w3).to(tl.int64)
        uniform = (high << 30) | (low >> 2)
        coordinate = half * counters + counter
        keep = (row < rows) & (coordinate < dimension)
        # The number of thresholds that are at most the uniform lies between these two, which mostly
        # are the same.
        first = (uniform >> SHIFT).to(tl.int32)
        rank, last = tl.load(starts + first), tl.load(starts + first + 1)
        for _ in tl.static_range(STEPS):
            middle = (rank + last) // 2
            is_open = keep & (rank < last)
            is_above = tl.load(thresholds + middle, is_open, 0) > uniform
            rank = tl.where(is_open & (is_above == 0), middle + 1, rank)
            last = tl.where(is_open & is_above, middle, last)
        grey = (tl.load(image + coordinate, keep, 0.0) * 255.0 + 0.5).to(tl.int32)
        noisy = tl.minimum(tl.maximum(rank - (255 + clip) + grey, -clip), 255 + clip)
        value = tl.div_rn(noisy.to(tl.float32), 255.0)
        place = _place(out, row, coordinate, plane, row_stride, channel_stride, pixel_stride)
        tl.store(place, value.to(out.dtype.element_ty), keep)


def launch(
    kernel: Any, out: torch.Tensor, plan: torch.Tensor, per_counter: int, *tables: Any, **sizes: int
) -> None:
    """Fill ``out`` [B, C, ...], of any float type, by one launch on the current stream of its
    device.

    ``plan`` is that of ``Noise._plan``; a counter makes ``per_counter`` coordinates; ``tables`` and
    ``sizes`` are the further arguments of the kernel. The coordinates of a channel must lie at one
    stride, as they do in contiguous and in channels-last tensors. ValueError for images of more
    than 2^30 coordinates.
    """
    flat = out.view(len(out), out.shape[1] if out.dim() > 2 else 1, -1)
    dimension, plane = flat[:1].numel(), flat.shape[2]
    if dimension > 2**30:
        raise ValueError(f"an image has {dimension} coordinates, at most 2^30 can get noise")
    counters = -(-dimension // per_counter)
    grid = (-(-len(out) * counters // _BLOCK),)
    shape = len(out), counters, dimension, plane, *flat.stride()
    with torch.cuda.device_of(out):  # Triton launches on the current device
        # A product and a sum must not be fused: their bits are promised.
        kernel[grid](flat, plan, *shape, *tables, **sizes, BLOCK=_BLOCK, enable_fp_fusion=False)


def try_out(device: torch.device) -> None:
    """Compile a kernel and launch it on the device; an exception of any kind where that is not
    possible.
    """
    image = torch.zeros(1, device=device)
    plan = torch.tensor([[1, 2, 3, 4], [image.data_ptr(), 0, 0, 0]], device=device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        launch(gaussian, torch.empty(1, 1, dtype=dtype, device=device), plan, 4)
    torch.cuda.synchronize(device)
