"""How training is executed: precision, compilation, memory layout. These choices change rounding
only.
"""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from smoothadv.base.settings import Checked, checked_field, one_of, positive_float
from smoothadv.voting.classifier import call_compiled, let_compiler_choose_alike

# None leaves convolutions in float32.
CONVOLUTION_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Execution(Checked):
    """How to train: ``precision`` of convolutions, a key of CONVOLUTION_DTYPES; weights, losses and
    sums stay float32.

    ``compile`` compiles the network. ``synchronized_norm`` computes the statistics of batch
    normalization over all processes. A checkpoint is written at least every ``checkpoint_minutes``.
    ``cuda_graph`` makes updates as CUDA graphs (None: where there are such, unless compiled).
    """

    precision: str = checked_field(one_of(CONVOLUTION_DTYPES), "fp32")
    compile: bool = checked_field(None, False)
    synchronized_norm: bool = checked_field(None, False)
    checkpoint_minutes: float = checked_field(positive_float, 10.0)
    cuda_graph: bool | None = checked_field(None, None)

    def record(self) -> dict[str, Any]:
        """The settings that decide the weights, including their rounding."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("checkpoint_minutes", "cuda_graph")
        }

    @property
    def tries_graphs(self) -> bool:
        """Whether to make updates as CUDA graphs, where there are such: never if processes wait
        within for others.
        """
        wanted = not self.compile if self.cuda_graph is None else self.cuda_graph
        return wanted and not self.synchronized_norm

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model on the device, channels last."""
        model = model.to(device)
        if self.synchronized_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model.to(memory_format=torch.channels_last)

    def compiled(self, model: nn.Module, sizes: set[int]) -> nn.Module:
        """The model; with ``compile``, compiled for batches of these sizes."""
        return CompiledForSizes(model, sizes) if self.compile else model

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """A context within which convolutions compute in ``precision``."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=CONVOLUTION_DTYPES[self.precision])


class CompiledForSizes(nn.Module):
    """A module compiled for the sizes that nearly all batches have; other batches run uncompiled.

    To compile again for the smaller last batch of an epoch would take longer than it saves. Which
    sizes are compiled must not depend on which batch comes first: otherwise a resumed run would
    compute differently.
    """

    def __init__(self, module: nn.Module, sizes: set[int]) -> None:
        super().__init__()
        self.module, self._sizes = module, sizes
        let_compiler_choose_alike(module)
        self._compiled = (
            torch.compile(module, dynamic=False),
        )  # in a tuple: it has the weights of ``module``

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (
            call_compiled(self._compiled[0], images)
            if len(images) in self._sizes
            else self.module(images)
        )
