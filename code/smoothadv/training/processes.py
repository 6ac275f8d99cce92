"""The processes that train one model together: torchrun starts them, one per GPU. Without it there
is only one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed, nn

_PATIENCE = timedelta(days=1)
_Content = TypeVar("_Content")


class Processes:
    """This process and those that train with it. ``rank`` counts from 0; the first process writes
    and decides.
    """

    rank, local_rank, size = 0, 0, 1
    launch: str | None = None
    """An identifier that all processes of one torchrun share once connected, also after torchrun
    has restarted them.
    """
    # Torchrun restarts all processes after one has failed.
    _attempt = 0
    _blocks = 0
    _store: distributed.Store
    _exchange: distributed.Store

    def __init__(self, launched: bool = False) -> None:
        if launched:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
            self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def connected(self, device: torch.device) -> Iterator[Processes]:
        """A context in which processes can exchange tensors on the CPU and on ``device`` (by NCCL
        if it is a GPU).
        """
        if self.size == 1:
            yield self
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._store, *_ = next(iter(distributed.rendezvous("env://")))
        self.launch = self._store.compare_set("launch", "", secrets.token_hex(8)).decode()
        # torchrun's store survives a restart, and still holds the addresses of processes that have
        # ended.
        self._exchange = distributed.PrefixStore(f"attempt {self._attempt}", self._store)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self._exchange,
            rank=self.rank,
            world_size=self.size,
        )
        try:
            yield self
            self.total(torch.zeros(1))  # each process waits here until all have finished
        finally:
            distributed.destroy_process_group()
            # Delete the stores to end their threads: a process that ends before its threads is
            # aborted.
            del self._exchange, self._store

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first process finishes the block before the others enter it: it may download files
        for all.

        If it fails, the others exit without a message, since the first process reports the error.
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
        """This process's part of a batch of indices [B], and the slice of the batch that it is."""
        shares = indices.tensor_split(self.size)
        start = sum(map(len, shares[: self.rank]))
        return shares[self.rank], slice(start, start + len(shares[self.rank]))

    def average_gradients(self, model: nn.Module) -> None:
        """Set the gradients of all processes to their mean: once per update, since attacks exchange
        nothing.

        DistributedDataParallel would overlap the exchange with the backward pass, but it changes
        the order of summation at its second update, so that a resumed run of three processes or
        more would end with other weights.
        """
        if self.size > 1:
            gradients = [
                parameter.grad for parameter in model.parameters() if parameter.grad is not None
            ]
            flat, views = _in_one_tensor(gradients, gradients[0].device.type != "cpu")
            distributed.all_reduce(flat)
            flat /= self.size
            torch._foreach_copy_(gradients, views)

    def share_state(self, model: nn.Module) -> None:
        """Copy the weights and buffers of the first process to all others."""
        self._share(list(model.state_dict().values()))

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the first process's batch normalization statistics to all, as DataParallel does in
        the paper's code.
        """
        self._share([buffer for buffer in model.buffers() if buffer.is_floating_point()])

    def _share(self, tensors: list[torch.Tensor]) -> None:
        """Set the tensors to those of the first process, in one exchange for each dtype."""
        if self.size == 1:
            return
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat, views = _in_one_tensor(of_dtype, of_dtype[0].device.type != "cpu")
            distributed.broadcast(flat, 0)
            torch._foreach_copy_(of_dtype, views)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of ``values`` over all processes."""
        if self.size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def received(self, content: _Content) -> _Content:
        """The ``content`` of the first process: any object that can be pickled."""
        if self.size == 1:
            return content
        contents = [content]
        distributed.broadcast_object_list(contents, 0)
        return contents[0]


def _in_one_tensor(
    tensors: list[torch.Tensor], as_stored: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A tensor [N] with all values, and its parts in the shapes of the ``tensors``, of one dtype.
    With ``as_stored`` values are in the order in which they lie in memory: a GPU then copies many
    in one kernel.
    """
    form = torch.preserve_format if as_stored else torch.contiguous_format
    strides = [
        torch.empty_like(tensor, device="meta", memory_format=form).stride() for tensor in tensors
    ]
    dense = [
        t if t.stride() == stride else t.clone(memory_format=form)
        for t, stride in zip(tensors, strides)
    ]
    flat = torch.cat(
        [tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()) for tensor in dense]
    )
    parts = zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strides)
    return flat, [
        part.as_strided(tensor.shape, stride, part.storage_offset())
        for part, tensor, stride in parts
    ]


def join_processes() -> Processes:
    """The processes that torchrun started, or this one alone."""
    return Processes(launched=distributed.is_available() and distributed.is_torchelastic_launched())


def ended(code: int) -> int:
    """The exit code of this process; where several train together, this ends the process with that
    code.

    At Python's regular exit a thread of gloo may still be running (about once in thirty trainings
    on a busy machine), which would abort a process that has finished its work.
    """
    if join_processes().size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
