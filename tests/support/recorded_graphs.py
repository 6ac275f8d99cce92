"""A stand-in for CUDA graphs on a CPU: operators are recorded with their tensors, and executed again on the same ones.

As on a GPU, recording changes no values, numbers of the host stay what they were, and nothing may wait for a value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smoothadv.attacks.shared.gradient_attack import Problem
from smoothadv.training import graphed, loop

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.equal, aten.masked_select)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class RecordedGraph(TorchDispatchMode):
    """Takes the place of torch.cuda.CUDAGraph: ``with graph:`` records, ``replay`` executes."""

    def __init__(self, lost: int) -> None:
        super().__init__()
        self.lost = lost
        self.calls: list[tuple[Any, tuple, dict, list[torch.Tensor]]] = []
        self.replays = 0
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in tensors_in(args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made | self._before.keys():
                self._before[storage._cdata] = storage, storage.clone()
        result = function(*args, **kwargs)
        made = tensors_in(result)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs)}
        self._made |= {tensor.untyped_storage()._cdata for tensor in made} - given
        self.calls.append((function, args, kwargs, made))
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for storage, values in self._before.values():
            storage.copy_(values)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, made in self.calls[: len(self.calls) - self.lost]:
            for old, new in zip(made, tensors_in(function(*args, **kwargs))):
                if old.untyped_storage()._cdata != new.untyped_storage()._cdata:  # neither a view nor in place
                    old.copy_(new)


class FakeCuda:
    """What training.graphed uses of torch.cuda, of a device with ``free`` memory; ``graphs`` are those recorded.

    Recording ``fails`` with that message, and graphs lack the last ``lost`` operators.
    """

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.free, self.fails, self.lost = 100, "", 0

    def CUDAGraph(self) -> RecordedGraph:
        self.graphs.append(RecordedGraph(self.lost))
        return self.graphs[-1]

    @contextlib.contextmanager
    def graph(self, graph: RecordedGraph, **options: Any) -> Iterator[None]:
        with graph:
            yield
        if self.fails:
            raise torch.OutOfMemoryError(self.fails)

    device = torch.device("cpu")
    Stream = current_stream = lambda self, device: self
    stream = lambda self, stream: contextlib.nullcontext()  # noqa: E731
    wait_stream = set_sync_debug_mode = lambda self, of: None
    get_sync_debug_mode = graph_pool_handle = lambda self: 0
    get_rng_state = lambda self, device: torch.get_rng_state()  # noqa: E731
    memory_allocated = memory_reserved = lambda self, device: 0
    mem_get_info = lambda self, device: (self.free, self.free)  # noqa: E731
    max_memory_allocated = lambda self, device: 50  # noqa: E731


@pytest.fixture
def recorded_graphs(monkeypatch) -> FakeCuda:
    """Within the test the CPU has graphs, and the host does not look at its results, as with a GPU."""
    fake = FakeCuda()
    monkeypatch.setattr(graphed, "cuda", fake)
    for module in (graphed, loop):
        monkeypatch.setattr(module, "are_offered_on", lambda device: True)
    monkeypatch.setattr(Problem, "may_look", False)
    return fake
