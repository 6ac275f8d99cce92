"""A float network as a list of operations that have an integer form."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F

from smoothadv.architectures.input_layers import Center
from smoothadv.base.errors import UserError
from smoothadv.voting.folding import refresh, replace_norms, split_entrance
from smoothadv.voting.graphs import layer_of, traced_plainly

_RELUS, _MEANS = {F.relu, torch.relu, "relu", "relu_"}, {torch.mean, "mean"}
_SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_SAME = {torch.flatten, "flatten"}
_SAME_LAYERS = (nn.Identity, nn.Flatten, nn.Dropout)
_IN_PLACE = {operator.iadd, "add_", "relu_"}
_POOLING = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


@dataclass(eq=False)
class Operation:
    """One operation: ``kind`` is "image", "convolution" (also a linear layer), "relu", "sum",
    "maximum" or "mean".

    ``inputs`` are those that it reads, ``users`` those that read it; ``node`` has its result, whose
    ``shape`` is that for one image.
    """

    kind: str
    node: fx.Node
    shape: tuple[int, ...]
    inputs: list[Operation]
    users: list[Operation]
    layer: Any = None

    @property
    def only_user(self) -> Operation | None:
        return self.users[0] if len(self.users) == 1 else None

    @cached_property
    def is_settled(self) -> bool:
        """Whether its result is rounded: not that of a convolution or a sum which only a ReLU or a
        sum reads.
        """
        absorbing = {"convolution": ("relu", "sum"), "sum": ("relu",)}.get(self.kind, ())
        return self.only_user is None or self.only_user.kind not in absorbing

    @cached_property
    def settled(self) -> Operation:
        """The operation whose rounded result holds this one's."""
        return self if self.is_settled or self.only_user is None else self.only_user.settled

    @cached_property
    def is_positive(self) -> bool:
        """Whether its results are never negative."""
        return self.kind == "relu" or (
            self.kind in ("maximum", "mean") and self.inputs[0].is_positive
        )


@dataclass(frozen=True)
class FloatNetwork:
    """A base classifier in float64: the ``mean`` and ``std`` [C] of its input layer, and the
    ``graph`` of its network.

    Batch normalization is folded into convolutions; ``operations`` are in the order of the graph,
    the last one makes the logits.
    """

    mean: torch.Tensor
    std: torch.Tensor
    graph: fx.GraphModule
    operations: list[Operation]


def read_network(classifier: nn.Module, image_shape: tuple[int, ...]) -> FloatNetwork:
    """A copy of a base classifier of images of this shape as operations; UserError where it has no
    integer form.
    """
    entrance, network = split_entrance(
        copy.deepcopy(classifier).cpu().double().eval().requires_grad_(False)
    )
    traced = traced_plainly(network)
    if traced is None or not isinstance(entrance, Center):
        raise UserError(
            "the network has no integer form: it cannot be traced, shares weights, or has no input "
            "layer"
        )
    refresh(replace_norms(traced))
    ShapeProp(traced).propagate(torch.zeros(1, *image_shape, dtype=torch.float64))
    mean = entrance.mean.flatten()
    std = getattr(entrance, "std", torch.ones_like(mean)).flatten()
    operations = list(_operations(traced))
    if operations[-1].kind != "convolution" or operations[-1].users:
        raise UserError(
            "the network has no integer form: its logits do not come from a linear layer"
        )
    return FloatNetwork(mean, std, traced, operations)


def _operations(graph: fx.GraphModule) -> Iterator[Operation]:
    made: dict[fx.Node, Operation] = {}
    overwritten: set[Operation] = set()
    for node in graph.graph.nodes:
        if node.op == "output":
            return
        kind, layer = _kind(graph, node)
        inputs = [
            made[value]
            for value in (*node.args, *node.kwargs.values())
            if isinstance(value, fx.Node)
        ]
        if late := overwritten.intersection(inputs):
            name = late.pop().node.name
            raise UserError(
                f"the network has no integer form: '{node.name}' reads '{name}', which is "
                "overwritten before"
            )
        is_told = node.kwargs.get("inplace") or any(value is True for value in node.args)
        if node.target in _IN_PLACE or is_told or getattr(layer, "inplace", False):
            overwritten.add(inputs[0])
        if kind == "same":
            made[node] = inputs[0]
            continue
        made[node] = Operation(kind, node, tuple(node.meta["tensor_meta"].shape), inputs, [], layer)
        for one in inputs:
            one.users.append(made[node])
        yield made[node]


def _kind(graph: fx.GraphModule, node: fx.Node) -> tuple[str, Any]:
    """The kind of an operation, or "same" where it changes nothing, and its layer; UserError for
    others.
    """
    layer, target = layer_of(graph, node), node.target
    if node.op == "placeholder":
        return "image", None
    if (
        isinstance(layer, nn.Conv2d)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    ):
        return "convolution", layer
    if isinstance(layer, nn.Linear):
        return "convolution", layer
    if isinstance(layer, nn.ReLU) or target in _RELUS:
        return "relu", None
    if (
        target in _SUMS
        and not node.kwargs
        and all(isinstance(value, fx.Node) for value in node.args)
    ):
        return "sum", None
    if isinstance(layer, nn.MaxPool2d) and not layer.return_indices:
        return "maximum", {name: getattr(layer, name) for name in _POOLING}
    dimensions = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else ())
    is_mean = isinstance(layer, nn.AdaptiveAvgPool2d) and layer.output_size in (1, (1, 1))
    if is_mean or (target in _MEANS and dimensions in ((2, 3), [2, 3], (-2, -1), [-2, -1])):
        return "mean", None
    # F.dropout drops values unless it is told not to.
    is_off = target is F.dropout and not (node.args[2:3] or (node.kwargs.get("training", True),))[0]
    if isinstance(layer, _SAME_LAYERS) or target in _SAME or is_off:
        return "same", None
    what = type(layer).__name__ if layer is not None else getattr(target, "__name__", target)
    raise UserError(f"the network has no integer form: there is none of {what} ('{node.name}')")
