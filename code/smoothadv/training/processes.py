"""The processes that train one model together: torchrun starts them, one per GPU; mostly there is just this one."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

_PATIENCE = timedelta(days=1)


class Processes:
    """This process among its equals. ``rank`` counts from 0; the first one writes and decides."""

    rank, local_rank, size = 0, 0, 1
    launch: str | None = None
    """What the processes of one torchrun have in common, once connected: also those started in place of others."""
    # Torchrun starts all processes again after one has failed.
    _attempt = 0
    _blocks = 0

    def __init__(self, launched: bool = False) -> None:
        if launched:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
            self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

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
        self._store, *_ = next(iter(distributed.rendezvous("env://")))
        self.launch = self._store.compare_set("launch", "", secrets.token_hex(8)).decode()
        # torchrun's store outlives a restart, and with it the addresses of processes that are no more.
        self._exchange = distributed.PrefixStore(f"attempt {self._attempt}", self._store)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self._exchange,
            rank=self.rank,
            world_size=self.size,
        )
        try:
            yield self
            self.total(torch.zeros(1))  # none leaves before all are through
        finally:
            distributed.destroy_process_group()
            # Their threads must not outlive this: a process that ends before they do is aborted.
            del self._exchange, self._store

    @contextlib.contextmanager
    def first_goes_first(self):
        """The first one is through with the block before the others enter it: it may download files for all.

        Where it fails the others end without a word, for it has said what is wrong.
        """
        self._blocks += 1
        key = f"block {self._blocks}"
        if self.size == 1:
            yield
        elif self.is_first:
            try:
                yield
            except BaseException:
                self._exchange.set(key, "failed")
                raise
            self._exchange.set(key, "done")
        else:
            self._exchange.wait([key], _PATIENCE)
            if self._exchange.get(key) == b"failed":
                raise SystemExit(1)
            yield

    def share(self, indices: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """This process's part of a batch of indices [B], and where in the batch it lies."""
        shares = indices.tensor_split(self.size)
        start = sum(map(len, shares[: self.rank]))
        return shares[self.rank], slice(start, start + len(shares[self.rank]))

    def average_gradients(self, model: nn.Module) -> None:
        """Give all the mean of their gradients, once an update: attacks in between exchange nothing.

        DistributedDataParallel would hide the exchange behind the backward pass, but it sums in another order from its
        second update on, so that a resumed run of three processes or more would end with other weights.
        """
        if self.size > 1:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            together = torch.cat([gradient.flatten() for gradient in gradients])
            distributed.all_reduce(together)
            _spread(together / self.size, gradients)

    def share_state(self, model: nn.Module) -> None:
        """Give all the first one's weights and buffers."""
        self._share(list(model.state_dict().values()))

    def share_buffers(self, model: nn.Module) -> None:
        """Give all the first one's statistics of batch normalization, as DataParallel does in the paper's code."""
        self._share([buffer for buffer in model.buffers() if buffer.is_floating_point()])

    def _share(self, tensors: list[torch.Tensor]) -> None:
        """Set the tensors to those of the first process, in one exchange for each dtype."""
        if self.size == 1:
            return
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            together = torch.cat([tensor.flatten() for tensor in alike])
            distributed.broadcast(together, 0)
            _spread(together, alike)

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


def _spread(together: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Set the tensors to what stands for them, one after the other, in ``together``."""
    for tensor, values in zip(tensors, together.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(values.view(tensor.shape))


def join_processes() -> Processes:
    """The processes that torchrun started, or this one alone."""
    return Processes(launched=distributed.is_available() and distributed.is_torchelastic_launched())


def ended(code: int) -> int:
    """The exit code of this process; of several, each ends here with it.

    Python's own end may find a thread of gloo still at work, once in some thirty trainings on a busy machine, and would
    abort a process that has done all there was to do.
    """
    if join_processes().size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
