"""The processes that torchrun started together, which share one piece of work; without torchrun
there is only one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import secrets
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed, nn

_PATIENCE = timedelta(days=1)
_PAUSE_SECONDS = 0.2
_Content = TypeVar("_Content")
_connections = itertools.count()


class Processes:
    """This process and those that torchrun started with it.

    ``rank`` counts all processes from 0, ``local_rank`` those of this machine (None without
    torchrun). The first process decides for all, and writes what is written once. All processes
    call the methods in the same order.
    """

    rank, size = 0, 1
    local_rank: int | None = None
    launch: str | None = None
    """An identifier that all processes of one torchrun share once connected, also after torchrun
    has restarted them.
    """
    _group = False
    _step = 0
    _connection = 0
    _launch_store: distributed.Store
    _store: distributed.Store

    def __init__(self, launched: bool = False) -> None:
        if launched:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def connect(self) -> Processes:
        """Let processes exchange messages, through the store of torchrun; returns this object."""
        if self.size > 1:
            self._launch_store, *_ = next(iter(distributed.rendezvous("env://")))
            self.launch = self._launch_store.compare_set(
                "launch", "", secrets.token_hex(8)
            ).decode()
            # The store survives a restart of all processes, which torchrun does after one has
            # failed; and a program may share several pieces of work.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._connection = next(_connections)
            self._store = distributed.PrefixStore(
                f"attempt {attempt}, connection {self._connection}", self._launch_store
            )
        return self

    @contextlib.contextmanager
    def connected(self, device: torch.device) -> Iterator[Processes]:
        """A context in which processes can also exchange tensors on the CPU and on ``device`` (by
        NCCL if it is a GPU).
        """
        if self.size == 1:
            yield self
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.connect()
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
        )
        self._group = True
        try:
            yield self
            self.total(torch.zeros(1))  # each process waits here until all have finished
        finally:
            self._group = False
            distributed.destroy_process_group()
            # Delete the stores to end their threads: a process that ends before its threads is
            # aborted.
            del self._store, self._launch_store

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first process finishes the block before the others enter it: it may download files
        for all.

        If it fails, the others exit without a message, since the first process reports the error.
        """
        if self.size == 1:
            yield
        elif self.is_first:
            try:
                yield
            except BaseException:
                self._from_first(b"failed")
                raise
            self._from_first(b"done")
        else:
            if self._from_first(b"") == b"failed":
                raise SystemExit(1)
            yield

    def wait(self) -> None:
        """Return once every process has called this."""
        if self.size == 1:
            return
        self._step += 1
        self._store.add(f"{self._step} reached", 1)
        while self._store.add(f"{self._step} reached", 0) < self.size:
            time.sleep(_PAUSE_SECONDS)
        # The first process may host the store: it must return last.
        self._store.add(f"{self._step} left", 1)
        while self.is_first and self._store.add(f"{self._step} left", 0) < self.size:
            time.sleep(_PAUSE_SECONDS)

    def is_new(self, name: str) -> bool:
        """Whether this is the first call with ``name`` by any process of this torchrun in this
        piece of work, also before a restart.
        """
        key = f"connection {self._connection}, {name}"
        return self.size == 1 or self._launch_store.add(key, 1) == 1

    def received(self, content: _Content) -> _Content:
        """The ``content`` of the first process: any object that can be pickled."""
        if self.size == 1:
            return content
        if not self._group:
            return pickle.loads(self._from_first(pickle.dumps(content)))
        contents = [content]
        distributed.broadcast_object_list(contents, 0)
        return contents[0]

    def _from_first(self, message: bytes) -> bytes:
        """The ``message`` of the first process, for which the others wait."""
        self._step += 1
        key = f"{self._step} message"
        if self.is_first:
            self._store.set(key, message)  # type: ignore[arg-type]
            return message
        self._store.wait([key], _PATIENCE)
        return self._store.get(key)

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

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the first process's batch normalization statistics to all, as DataParallel does in
        the paper's code.
        """
        self.copy_from_first([one for one in model.buffers() if one.is_floating_point()])

    def copy_from_first(self, tensors: list[torch.Tensor]) -> None:
        """Set the tensors to those of the first process, in one exchange for each dtype."""
        if self.size == 1:
            return
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            equal = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat, views = _in_one_tensor(equal, equal[0].device.type != "cpu")
            distributed.broadcast(flat, 0)
            torch._foreach_copy_(equal, views)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of ``values`` over all processes."""
        if self.size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values


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


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def ended(code: int) -> int:
    """The exit code of this process; where several work together, this ends the process with that
    code.

    At Python's regular exit a thread of gloo may still be running (about once in thirty trainings
    on a busy machine), which would abort a process that has finished its work.
    """
    if Processes(is_launched()).size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
