"""Devices: the default one, their names, one GPU for each process, and copies that do not wait for
the device.
"""

from collections.abc import Callable

import torch

from smoothadv.base.errors import UserError, first_line
from smoothadv.base.settings import found_value


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
        reason = f"which is no device that can be used here: {first_line(error)}"
        raise UserError(f"device: {found_value(name)}, {reason}") from None
    return device


def default_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The device's name for manifests: a GPU's model, or the type, like "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_of_process(device: torch.device, local_rank: int | None) -> torch.device:
    """``device``; for "cuda" without a number, the GPU of process ``local_rank`` of this machine
    (None: one).
    """
    if local_rank is None or device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", local_rank % torch.cuda.device_count())


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
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))

    def waited() -> torch.Tensor:
        copied.synchronize()
        return host

    return waited
