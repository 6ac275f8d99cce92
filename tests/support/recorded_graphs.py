"""A stand-in for CUDA graphs on a CPU: operators are recorded with their tensors, and executed
again on the same ones.

As on a GPU, recording changes no values, numbers of the host stay what they were, and nothing may
wait for a value.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smoothadv.training import graphed, run, schedule

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

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
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
                if (
                    old.untyped_storage()._cdata != new.untyped_storage()._cdata
                ):  # neither a view nor in place
                    old.copy_(new)


@pytest.fixture
def recorded_graphs(monkeypatch) -> mock.Mock:
    """Within the test the CPU has graphs, and the host does not look at its results, as with a GPU.

    ``graphs`` are those recorded; they lack the last ``lost`` operators. There is so much ``free``
    memory (an update takes 50), and recording ``fails`` with that message.
    """
    fake = mock.Mock(graphs=[], lost=0, free=100, fails="", memory_allocated=lambda device: 0)

    def made() -> RecordedGraph:
        fake.graphs.append(RecordedGraph(fake.lost))
        return fake.graphs[-1]

    @contextlib.contextmanager
    def recording(graph: RecordedGraph, **options: Any) -> Iterator[None]:
        with graph:
            yield
        if fake.fails:
            raise torch.OutOfMemoryError(fake.fails)

    fake.CUDAGraph, fake.graph, fake.stream = (
        made,
        recording,
        lambda stream: contextlib.nullcontext(),
    )
    fake.get_rng_state = lambda device: torch.get_rng_state()
    fake.memory_reserved, fake.mem_get_info = (
        fake.memory_allocated,
        lambda device: (fake.free, fake.free),
    )
    fake.max_memory_allocated = lambda device: 50
    monkeypatch.setattr(graphed, "cuda", fake)
    for module in (run, schedule):
        monkeypatch.setattr(module, "has_cuda_graphs", lambda device: True)
    return fake
