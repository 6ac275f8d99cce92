"""Networks of integers in int64, one loop for each place of a kernel; the definition is written
down a second time.

Takes what a checkpoint holds: the record, and the tensors as arrays. No torch, and no limit to the
size of a sum.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Settings = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]
LOWEST = -(2**40)


def logits(record: Mapping[str, Any], arrays: Arrays, images: np.ndarray) -> np.ndarray:
    """Float32 [B, K], of float32 images [B, C, H, W]."""
    assert record["definition"] == 2
    grey = (
        np.rint(images * np.float32(255))
        .astype(np.int64)
        .clip(-record["clip"], 255 + record["clip"])
    )
    values: list[np.ndarray] = [grey - arrays["mean"].astype(np.int64)[:, None, None]]
    for number, (kind, inputs, settings) in enumerate(record["steps"], 1):
        own = {
            name.split(".")[1]: value
            for name, value in arrays.items()
            if name.startswith(f"{number}.")
        }
        values.append(LAYERS[kind](settings, own, *(values[index] for index in inputs)))
    return values[-1].reshape(len(images), -1)


def _scaled(totals: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """One product in float32 of a sum that is rounded to float32; channels are the second axis."""
    return totals.astype(np.float32) * multipliers.astype(np.float32)[:, None, None]


def _clamped(settings: Settings, values: np.ndarray) -> np.ndarray:
    return np.rint(values).clip(settings.get("low", 0), settings["high"]).astype(np.int64)


def _windows(
    settings: Settings, x: np.ndarray, kernel: tuple[int, int], fill: int, is_ceiled: bool = False
) -> list:
    """For each place of the kernel what lies there in all windows: arrays [B, C, h, w]."""
    strides, paddings, dilations = (settings.get(name, default) for name, default in _GEOMETRY)
    starts: list[np.ndarray] = []
    for axis, stride, padding, dilation, size in zip((2, 3), strides, paddings, dilations, kernel):
        length, extent = x.shape[axis], dilation * (size - 1) + 1
        last = length + padding - extent
        if is_ceiled:  # a further window that reaches beyond the end, if it begins before
            further = -padding + (last + padding) // stride * stride + stride
            last = further if further - stride < last and further < length else last
        starts.append(np.arange(-padding, last + 1, stride))
        wide = [(0, 0)] * 4
        wide[axis] = (padding, padding + extent + stride)
        x = np.pad(x, wide, constant_values=fill)
    places = itertools.product(range(kernel[0]), range(kernel[1]))
    rows, columns = (axis + padding for axis, padding in zip(starts, paddings))
    return [x[:, :, rows + i * dilations[0]][..., columns + j * dilations[1]] for i, j in places]


_GEOMETRY = (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)))


def totals(settings: Settings, weight: np.ndarray, bias: np.ndarray, x: np.ndarray) -> np.ndarray:
    """w * x + b, int64 [B, O, h, w]."""
    weight, groups = weight.astype(np.int64), settings.get("groups", 1)
    found: list[np.ndarray] = []
    windows = _windows(settings, x, weight.shape[2:], 0)
    for number, outputs in enumerate(np.split(weight, groups)):
        total, own = 0, slice(number * weight.shape[1], (number + 1) * weight.shape[1])
        for place, window in enumerate(windows):
            of_place = outputs.reshape(*outputs.shape[:2], -1)[..., place]
            total = total + _product(of_place, window[:, own].reshape(len(x), weight.shape[1], -1))
        found.append(total.reshape(len(x), len(outputs), *windows[0].shape[2:]))
    return np.concatenate(found, 1) + bias.astype(np.int64)[:, None, None]


def _product(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The product of matrices of integers; NumPy has a fast one for float64 only, which holds them
    up to 2^53.
    """
    assert float(np.abs(one).max()) * float(np.abs(other).max()) * one.shape[-1] < 2**53
    return (one.astype(np.float64) @ other.astype(np.float64)).astype(np.int64)


def _convolution(
    settings: Settings, own: Arrays, x: np.ndarray, shortcut: np.ndarray | None = None
) -> np.ndarray:
    scaled = _scaled(totals(settings, own["weight"], own["bias"], x), own["multiplier"])
    if shortcut is not None:  # exact: in float64, too
        assert settings["shortcut"] == 1
        scaled = scaled.astype(np.float64) + shortcut
    return (
        scaled if settings.get("high", -1) < settings.get("low", 0) else _clamped(settings, scaled)
    )


def _maximum(settings: Settings, own: Arrays, x: np.ndarray) -> np.ndarray:
    return np.max(
        _windows(
            settings, x, settings.get("kernel", (1, 1)), LOWEST, bool(settings.get("ceil_mode"))
        ),
        axis=0,
    )


LAYERS: dict[str, Callable[..., np.ndarray]] = {
    "convolution": _convolution,
    "maximum": _maximum,
    "rescaling": lambda settings, own, x: _clamped(settings, _scaled(x, own["multiplier"])),
    "sum": lambda settings, own, x, y: _clamped(settings, x + y),
    "total": lambda settings, own, x: x.sum((2, 3), keepdims=True),
}
