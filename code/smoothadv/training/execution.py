"""How training is executed: precision, compilation, memory layout, and the form of the classifier
that is attacked. These choices change rounding only.
"""

import contextlib
import copy
from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.architectures.logits import frozen
from smoothadv.base.devices import device_of, layout_on
from smoothadv.base.errors import UserError
from smoothadv.base.settings import Checked, positive_float, setting
from smoothadv.voting import folding
from smoothadv.voting.classifier import call_compiled
from smoothadv.voting.folding import (
    are_offered_on,
    fuse_epilogues,
    overwrite_in_place,
    runs,
    traced_plainly,
)

# None leaves convolutions in float32.
CONVOLUTION_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
_GROUP = "execution"


@dataclass(frozen=True)
class Execution(Checked):
    """How to train. Weights, losses and sums are float32 in any ``precision``."""

    precision: str = setting(
        "fp32",
        choices=tuple(CONVOLUTION_DTYPES),
        group=_GROUP,
        records="precision",
        help="precision of convolutions, in fp32 with TF32 on GPUs that have it; weights and "
        "losses stay float32",
    )
    compile: bool = setting(
        False,
        group=_GROUP,
        records="compile",
        help="compile the network first, on a CPU: takes minutes, then runs faster",
    )
    synchronized_norm: bool = setting(
        False,
        flag="--sync-bn",
        group=_GROUP,
        records="synchronized_norm",
        help="with several GPUs: statistics of batch normalization over all of them (default: on "
        "each GPU separately, as in the paper)",
    )
    checkpoint_minutes: float = setting(
        10.0,
        parse=positive_float,
        metavar="MIN",
        group=_GROUP,
        help="minutes between checkpoints within an epoch; there is one after each",
    )
    cuda_graph: bool | None = setting(
        None,
        group=_GROUP,
        help="launch all kernels of an update together, as a CUDA graph that was found to compute "
        "the same (default: on a GPU, without --sync-bn)",
    )

    def check(self, device: torch.device) -> None:
        """UserError where nothing trains like this on the device."""
        for_gpus = {"--sync-bn": self.synchronized_norm, "--cuda-graph": self.cuda_graph}
        for flag, is_asked_for in for_gpus.items():
            if is_asked_for and device.type != "cuda":
                raise UserError(
                    f"{flag} is for GPUs, and this trains on {device.type}: leave it out"
                )
        if self.compile and device.type != "cpu":
            raise UserError(
                f"--compile is for training on a CPU, and this trains on {device.type}, where CUDA "
                "graphs, the default, are four times as fast: leave it out"
            )

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model on the device, in the memory format that is fast there."""
        model = model.to(device)
        if self.synchronized_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model.to(memory_format=layout_on(device, CONVOLUTION_DTYPES[self.precision]))

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
        # In a tuple: it has the weights of ``module``.
        self._compiled = (torch.compile(module, dynamic=False),)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) in self._sizes:
            return call_compiled(self._compiled[0], images)
        return self.module(images)


class FoldedModel(nn.Sequential):
    """Maps images to the logits that ``model`` gives in eval mode, for gradients with respect to
    the images.

    Call ``refresh`` whenever the model has changed. Convolutions followed by batch normalization
    are replaced by folded ones of ``dtype`` (None: the model's), with ``epilogues`` in one call
    with the ReLU behind them. Other layers are the model's own. ValueError where that cannot be
    done.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None = None, epilogues: bool = False
    ) -> None:
        entrance, network = folding.split_entrance(model)
        with frozen(model):  # a network may look at its mode while it is traced
            graph = traced_plainly(network)
        if graph is None:
            raise ValueError("the network cannot be traced, or its layers share weights")
        folded = folding.replace_norms(graph, dtype)
        graph = fuse_epilogues(graph) if epilogues else graph
        parts = {"entrance": entrance or nn.Identity(), "network": overwrite_in_place(graph)}
        super().__init__(OrderedDict(parts))
        # In a list of tuples: the model's layers must not become this module's.
        self._folded = folded
        self.refresh()

    def refresh(self) -> None:
        """Take over the model's present weights and statistics."""
        folding.refresh(self._folded)


def folded_form(
    model: nn.Module, example: torch.Tensor, dtype: torch.dtype | None = None
) -> FoldedModel | None:
    """A FoldedModel of ``model``; None where there is none or it does not give the same logits.

    ``example`` [B, C, H, W] holds images on which that is tried, in float64, where only rounding is
    allowed to differ.
    """
    device = device_of(model, example.device)
    try:
        trial, images = copy.deepcopy(model).cpu().double().eval(), example.cpu().double()
        for epilogues in (True, False) if are_offered_on(device, dtype) else (False,):
            if folding.agree(trial, FoldedModel(trial, None, epilogues), images):
                form = FoldedModel(model, dtype, epilogues)
                if not epilogues or runs(form, example.to(device), dtype):
                    return form
    except (ValueError, RuntimeError, TypeError):
        pass  # the network cannot be copied or traced, or tracing broke it
    return None
