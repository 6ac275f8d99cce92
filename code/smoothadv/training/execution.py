"""How training is executed: precision, compilation, memory layout. Only rounding depends on it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from smoothadv.graphs import call_compiled

# The dtype of convolutions; None leaves them as they are, in float32.
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Execution:
    """``precision`` of convolutions, in PRECISIONS; weights, losses and sums stay float32. ``compile``: whether.

    ``synchronized_norm`` computes the statistics of batch normalization over all processes. ``checkpoint_minutes`` pass
    at most between checkpoints.
    """

    precision: str = "fp32"
    compile: bool = False
    synchronized_norm: bool = False
    checkpoint_minutes: float = 10.0

    def record(self) -> dict[str, Any]:
        """What decides the weights, down to rounding."""
        return {name: value for name, value in asdict(self).items() if name != "checkpoint_minutes"}

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model on the device, channels last."""
        model = model.to(device)
        if self.synchronized_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model.to(memory_format=torch.channels_last)

    def compiled(self, model: nn.Module, sizes: set[int] | None = None) -> nn.Module:
        """The model, compiled for batches of these sizes (None: all) if that is wanted."""
        return CompiledForSizes(model, sizes) if self.compile else model

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """Within, convolutions compute in the precision."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=PRECISIONS[self.precision])


class CompiledForSizes(nn.Module):
    """A module compiled for the sizes that nearly all batches have (None: all); those of other sizes run as they are.

    Compiling anew for the rest of an epoch's last batch would take longer than it saves. What is compiled must not
    depend on which batch comes first, or a resumed run would compute otherwise.
    """

    def __init__(self, module: nn.Module, sizes: set[int] | None) -> None:
        super().__init__()
        self.module, self._sizes = module, sizes
        self._compiled = (torch.compile(module, dynamic=False),)  # a tuple: its weights are those of ``module``

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self._sizes is not None and len(images) not in self._sizes:
            return self.module(images)
        return call_compiled(self._compiled[0], images)
