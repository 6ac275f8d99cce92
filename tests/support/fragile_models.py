"""Models that betray how they are used: by the shape of their batches, or by running out of
memory.
"""

import weakref
from collections.abc import Callable

import torch
from torch import nn

OUT_OF_MEMORY: dict[str, Callable[[], Exception]] = {
    "accelerator": lambda: torch.OutOfMemoryError(
        "CUDA out of memory.\nTried to allocate 2.00 GiB."
    ),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 8000000000 bytes.\nError code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError,
}


class ShapeSensitive(nn.Module):
    """Another model whose answer depends on the size of the batch and the row there, as rounding
    does but grossly.
    """

    def __init__(self, model: Callable) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        row = torch.arange(len(inputs)).reshape(-1, *[1] * (inputs.dim() - 1))
        return self.model(inputs * (1 + 0.01 * len(inputs) + 0.003 * row))


class Forgetful(nn.Module):
    """Another model that raises ``make_error()`` for more than ``limit`` rows and at the passes
    numbered ``fails``.

    It holds no tensor, but knows which of those that it took and gave since ``forget`` are still
    alive.
    """

    def __init__(
        self,
        model: Callable,
        limit: float = float("inf"),
        make_error: Callable[[], Exception] = OUT_OF_MEMORY["accelerator"],
        fails: frozenset[int] | set[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.model, self.limit, self.make_error, self.fails = model, limit, make_error, fails
        self.passes, self.sizes, self.seen = 0, [], []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.sizes.append(len(inputs))
        self.seen.append(weakref.ref(inputs))
        if len(inputs) > self.limit or self.passes in self.fails:
            raise self.make_error()
        logits = self.model(inputs)
        self.seen.append(weakref.ref(logits))
        return logits

    def alive(self) -> int:
        """How many of the tensors seen since the last call are still held by someone."""
        count = sum(reference() is not None for reference in self.seen)
        self.seen = []
        return count
