"""The processes that train one model together: torchrun starts them, one per GPU; mostly there is just this one."""

from __future__ import annotations

import contextlib
import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


class Processes:
    """This process among its equals. ``rank`` counts from 0; the first one writes and decides.

    ``restarted`` tells that torchrun started all of them again after one failed.
    """

    rank, local_rank, size, restarted = 0, 0, 1, False

    def __init__(self, launched: bool = False) -> None:
        if launched:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
            self.restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def connected(self, device: torch.device):
        """Within, they can exchange tensors on ``device``, NCCL's if it is a GPU, and on the CPU."""
        if self.size == 1:
            yield self
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        try:
            yield self
        finally:
            distributed.destroy_process_group()

    @contextlib.contextmanager
    def first_goes_first(self):
        """The first one is through with the block before the others enter it: it may download files for all."""
        if not self.is_first:
            distributed.barrier()
        yield
        if self.is_first and self.size > 1:
            distributed.barrier()

    def share(self, indices: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """This process's part of a batch of indices [B], and where in the batch it lies."""
        shares = indices.tensor_split(self.size)
        start = sum(map(len, shares[: self.rank]))
        return shares[self.rank], slice(start, start + len(shares[self.rank]))

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model as it is trained: gradients are averaged over the processes while they are computed."""
        if self.size == 1:
            return model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions rename an option that older ones need
            # Buffers are shared by ``share_buffers``, before the attack looks at them.
            return DistributedDataParallel(
                model, device_ids=[device] if device.type == "cuda" else None, broadcast_buffers=False
            )

    @staticmethod
    def without_averaging(wrapped: nn.Module, while_true: bool) -> AbstractContextManager:
        """Within, gradients stay each process's own: for all micro-batches but the last."""
        averages = while_true and isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync() if averages else contextlib.nullcontext()

    def share_buffers(self, model: nn.Module) -> None:
        """Give all the first one's statistics of batch normalization, as DataParallel does in the paper's code."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()] if self.size > 1 else []
        if buffers:
            together = torch.cat([buffer.flatten() for buffer in buffers])
            distributed.broadcast(together, 0)
            for buffer, values in zip(buffers, together.split([buffer.numel() for buffer in buffers])):
                buffer.copy_(values.view_as(buffer))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the processes' values."""
        if self.size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def decision(self, value: int) -> int:
        """The first one's value."""
        if self.size == 1:
            return value
        decided = torch.tensor(value)
        distributed.broadcast(decided, 0)
        return int(decided)

    def received(self, content: Any) -> Any:
        """The first one's content, which may be anything that can be pickled."""
        if self.size == 1:
            return content
        contents = [content]
        distributed.broadcast_object_list(contents, 0)
        return contents[0]


def join_processes() -> Processes:
    """The processes that torchrun started, or this one alone."""
    return Processes(launched=distributed.is_available() and distributed.is_torchelastic_launched())
