"""Running out of memory: how it shows, and which batch avoids it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

_SIGNS = ("can't allocate memory", "STATUS_ALLOC_FAILED", "ALLOCATION_FAILED", "out of memory")
_CPU_ELEMENTS = 100 * 3 * 32 * 32
_PROBE = 64


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed, on an accelerator or on the host."""
    # Allocators raise a RuntimeError like any other: that of the host, the CUDA driver's and those of its libraries.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(sign in str(error) for sign in _SIGNS)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def free_cached_memory(device: torch.device) -> None:
    """Give an accelerator's cached blocks back, so that others can be cut from them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def batch_that_suits(
    work: Callable[[torch.Tensor], object], image_shape: tuple[int, ...], device: torch.device, alike: bool = False
) -> int:
    """How many images ``work``, a function of images [B, C, H, W], should get at a time.

    16 to 200 on a CPU, whose cache they should not leave; on a GPU by free memory, of which a trial tells how much an
    image takes. ``alike`` counts all memory, so that devices of one kind choose alike.
    """
    if device.type == "cpu":
        return min(200, max(16, _CPU_ELEMENTS // math.prod(image_shape)))
    if device.type != "cuda":
        return _PROBE
    probe = _PROBE
    while probe:
        try:
            per_image = _bytes_per_image(work, (probe, *image_shape), device)
            free, total = torch.cuda.mem_get_info(device)
            return batch_that_fits(total if alike else free, per_image)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        probe //= 2
        free_cached_memory(device)
    return 1


def _bytes_per_image(work: Callable[[torch.Tensor], object], shape: tuple[int, ...], device: torch.device) -> float:
    """How much memory an image of a batch takes at most while ``work`` is on it."""
    images = torch.zeros(shape, device=device).to(memory_format=torch.channels_last)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work(images)
    return (torch.cuda.max_memory_allocated(device) - before) / shape[0]


def batch_that_fits(free_bytes: float, bytes_per_image: float) -> int:
    """The largest power of two, up to 4096, whose images take at most half of the free memory; at least 1."""
    most = max(1.0, min(4096.0, free_bytes / 2 / max(bytes_per_image, 1.0)))
    return 2 ** (int(most).bit_length() - 1)
