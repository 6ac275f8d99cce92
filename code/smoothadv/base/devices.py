"""Devices: that of a run, that of a module, how they round and which memory format suits them,
copies that do not wait for them, and batches that fit into their memory.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from smoothadv.base.distributed import Processes
from smoothadv.base.errors import UserError, first_line, is_out_of_memory

T = TypeVar("T")
_CPU_ELEMENTS = 100 * 3 * 32 * 32
_PROBE = 64
_MOST_ELEMENTS = 2**31 - 1  # of a tensor: some kernels count them with 32 bits


def usable_device(name: str | torch.device) -> torch.device:
    """The device called ``name``, like "cpu" or "cuda:1"; UserError where smoothing cannot run on
    it.
    """
    try:
        device = torch.device(name)
        torch.Generator(device=device)  # smoothing needs random numbers
        torch.zeros(
            (), dtype=torch.float64, device=device
        )  # and float64, which mps, for example, lacks
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"'{name}' is no device that can be used here: {reason}") from None
    return device


def default_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The device's name for manifests: a GPU's model, or the type, like "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_of_run(
    run: Any, recorded: Mapping[str, Any], processes: Processes, says: bool
) -> torch.device:
    """The device of a ``run``, a specification: the one that it asks for, else the one on which was
    made what it continues or repeats, if this machine has it, else the first GPU, else the CPU.

    Of several processes each has a GPU of its own, unless the run asks for one by its number.
    ``recorded`` has what was recorded: the name of the "device", and whether it used "tf32", as
    which PyTorch is set here, unless the run asks to do without. Where no device is asked for, a
    line on standard error names the one that is taken as before, or, with ``says``, any.
    """
    if isinstance(allowed := run.tf32 and recorded.get("tf32"), bool):
        torch.backends.cudnn.allow_tf32 = allowed
    device, gpus = run.device or default_device(), []
    if torch.cuda.is_available():  # the driver may count GPUs that PyTorch cannot use
        gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    rank = processes.local_rank
    needed = 1 if rank is None else int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if rank is not None and device.type == "cuda" and device.index is None:
        device = gpus[rank % len(gpus)]
    if run.device is not None:
        return device
    why = f": PyTorch {torch.__version__} finds no GPU" if device.type == "cpu" else ""
    before, kind = recorded.get("device"), device_name(device)
    same = [one for one in (*gpus, torch.device("cpu")) if before == device_name(one)]
    # All processes move, or none: two may not meet on one GPU.
    are_enough = before == "cpu" or len(same) >= needed
    if same and are_enough and (rank is not None or kind != before):
        device = same[(rank or 0) % len(same)]
        why = why if kind == before else ", as before (--device takes another)"
    if processes.is_first and (says or why.startswith(",")):
        print(f"on the {device_name(device).replace('cpu', 'CPU')}{why}", file=sys.stderr)
    return device


def device_of(module: Any, otherwise: torch.device) -> torch.device:
    """The device of a module: that of its parameters, else of its buffers; ``otherwise`` if it has
    neither, or is a function.

    Of several, it is that of the first parameter, where a module so divided takes its input.
    """
    tensors = chain(module.parameters(), module.buffers()) if isinstance(module, nn.Module) else ()
    return next((tensor.device for tensor in tensors), otherwise)


def allows_tf32() -> bool:
    """Whether PyTorch is set to let convolutions use TF32."""
    # Since PyTorch 2.9, allow_tf32 cannot be read where newer settings differ from it.
    conv = getattr(torch.backends.cudnn, "conv", None)
    return torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"


def uses_tf32(gpu: torch.device) -> bool:
    """Whether a GPU rounds what convolutions in float32 read to TF32, as those since Ampere do by
    default.
    """
    return (
        allows_tf32()
        and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"  # which NVIDIA's libraries obey
        and torch.cuda.get_device_capability(gpu) >= (8, 0)
    )


def layout_on(device: torch.device, dtype: torch.dtype | None = None) -> torch.memory_format:
    """The memory format in which convolutions of ``dtype`` (None: float32) are fast: channels last,
    but contiguous where a GPU computes in full float32, without its matrix units.
    """
    is_full = device.type == "cuda" and dtype in (None, torch.float32) and not uses_tf32(device)
    return torch.contiguous_format if is_full else torch.channels_last


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on the device. A copy from the host to a GPU does not wait for the work that the
    GPU has to do.
    """
    if values.device.type == "cpu" and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def to_host(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Queue a copy to the host: the function returned waits for that copy, not for later work of a
    GPU.
    """
    if values.device.type != "cuda":
        return values.cpu
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))

    def waited() -> torch.Tensor:
        copied.synchronize()
        return host

    return waited


def within_memory(compute: Callable[[], T], halve: Callable[[str], None]) -> T:
    """What ``compute`` returns; when memory runs out, calls ``halve``, with the reason in one line,
    and tries again.

    Cached memory of GPUs goes back to the driver then, so that blocks of other sizes can be
    allocated.
    """
    while True:
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        halve(reason)  # not above: the error there still refers to what was allocated
        torch.cuda.empty_cache()


def batch_that_suits(
    work: Callable[[torch.Tensor], object],
    image_shape: tuple[int, ...],
    device: torch.device,
    of_total: bool = False,
) -> int:
    """How many images to pass to ``work``, a function of images [B, C, H, W], at a time.

    On a CPU 16 to 200, which fit into its cache; on a GPU as many as its free memory allows, by a
    trial that measures the memory of an image; with ``of_total`` as its total memory allows, so
    that all GPUs of one kind get one batch.
    """
    if device.type == "cpu":
        return min(200, max(16, _CPU_ELEMENTS // math.prod(image_shape)))
    if device.type != "cuda":
        return _PROBE
    probe = _PROBE
    while probe:
        try:
            with LargestTensor() as largest:
                per_image = _bytes_per_image(work, (probe, *image_shape), device)
            free, total = torch.cuda.mem_get_info(device)
            return batch_that_fits(total if of_total else free, per_image, largest.elements / probe)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        probe //= 2
        torch.cuda.empty_cache()
    return 1


def _bytes_per_image(
    work: Callable[[torch.Tensor], object], shape: tuple[int, ...], device: torch.device
) -> float:
    """The peak memory of ``work`` on a batch of this ``shape``, in bytes per image."""
    images = torch.zeros(shape, device=device).to(memory_format=layout_on(device))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work(images)
    return (torch.cuda.max_memory_allocated(device) - before) / shape[0]


class LargestTensor(TorchFunctionMode):
    """Within, ``elements`` is the size of the largest tensor that a function of torch returned."""

    elements = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def batch_that_fits(
    free_bytes: float, bytes_per_image: float, elements_per_image: float = 1.0
) -> int:
    """The largest power of two, up to 4096, whose images take at most half of the free memory; at
    least 1.

    A tensor of ``elements_per_image`` elements for each image then has fewer than 2^31.
    """
    most = min(
        4096.0,
        free_bytes / 2 / max(bytes_per_image, 1.0),
        _MOST_ELEMENTS / max(elements_per_image, 1.0),
    )
    return 2 ** (max(1, int(most)).bit_length() - 1)
