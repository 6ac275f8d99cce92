"""The classifier in training as it is attacked: its eval mode, with batch normalization folded into convolutions."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from smoothadv.attacks.estimators import frozen
from smoothadv.graphs import overwrite_in_place, traced_plainly

_ROUNDING = 1e-6
_Pair = tuple[nn.Conv2d, nn.Conv2d, nn.BatchNorm2d]


class AttackedModel(nn.Module):
    """Maps images to the logits that ``model`` gives in eval mode, for gradients with respect to the images.

    Call ``refresh`` whenever the model has changed. Convolutions followed by batch normalization are replaced by folded
    ones of ``dtype`` (None: the model's); all other layers are the model's own. ValueError where the model cannot be
    rewritten like that.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        layers = list(model) if isinstance(model, nn.Sequential) and len(model) == 2 else [nn.Identity(), model]
        with frozen(model):  # a network may look at its mode while it is traced
            graph = traced_plainly(layers[1])
        if graph is None:
            raise ValueError("the network cannot be traced, or its layers share weights")
        # In a list of its own: the model's layers must not become this module's.
        self._pairs: list[_Pair] = _fold(graph, dtype)
        self.entrance, self.network = layers[0], overwrite_in_place(graph)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's present weights and statistics."""
        if not self._pairs:
            return
        folded, convolutions, norms = (list(layers) for layers in zip(*self._pairs))
        # The foreach functions need a few kernels for all layers together.
        deviations = torch._foreach_add([norm.running_var for norm in norms], [norm.eps for norm in norms])
        scales = torch._foreach_div([norm.weight for norm in norms], torch._foreach_sqrt(deviations))
        by_channel = [scale[:, None, None, None] for scale in scales]
        weights = torch._foreach_mul([layer.weight for layer in convolutions], by_channel)
        shifts = torch._foreach_mul([norm.running_mean for norm in norms], scales)
        biases = torch._foreach_sub([norm.bias for norm in norms], shifts)
        for bias, scale, layer in zip(biases, scales, convolutions):
            if layer.bias is not None:
                bias += layer.bias * scale
        torch._foreach_copy_([layer.weight for layer in folded], weights)
        torch._foreach_copy_([layer.bias for layer in folded], biases)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(self.entrance(images))


def attacked_form(model: nn.Module, example: torch.Tensor, dtype: torch.dtype | None = None) -> AttackedModel | None:
    """An AttackedModel of ``model``; None where there is none or it does not give the same logits.

    ``example`` [B, C, H, W] holds images on which that is tried, in float64, where only rounding is allowed to differ.
    """
    trial = copy.deepcopy(model).cpu().double().eval()
    try:
        with torch.no_grad():
            before, after = (form(example.cpu().double()) for form in (trial, AttackedModel(trial)))
        scale = float(before.abs().max())
        if not (scale < math.inf and torch.allclose(before, after, rtol=_ROUNDING, atol=_ROUNDING * scale)):
            return None
        return AttackedModel(model, dtype)
    except (ValueError, RuntimeError, TypeError):  # a network that insists on its dtype, or that its tracing broke
        return None


def _fold(graph: torch.fx.GraphModule, dtype: torch.dtype | None) -> list[_Pair]:
    """Put one convolution in the place of each with its batch normalization: (the new one, the two old ones) each."""
    pairs = []
    for node in list(graph.graph.nodes):
        before = node.args[0] if node.args else None
        if not isinstance(before, torch.fx.Node) or len(before.users) > 1:
            continue
        norm, convolution = _layer(graph, node), _layer(graph, before)
        if type(norm) not in (nn.BatchNorm2d, nn.SyncBatchNorm) or type(convolution) is not nn.Conv2d:
            continue
        if norm.running_var is None or not norm.affine:
            continue
        folded = _like(convolution, dtype or convolution.weight.dtype)
        pairs.append((folded, convolution, norm))
        parent, _, name = str(before.target).rpartition(".")
        setattr(graph.get_submodule(parent), name, folded)
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return pairs


def _layer(graph: torch.fx.GraphModule, node: torch.fx.Node) -> nn.Module | None:
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def _like(layer: nn.Conv2d, dtype: torch.dtype) -> nn.Conv2d:
    """A convolution of the same geometry with a bias, whose parameters need no gradients."""
    same = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    new = nn.Conv2d(**{name: getattr(layer, name) for name in same}, bias=True, device=layer.weight.device, dtype=dtype)
    return new.to(memory_format=torch.channels_last).requires_grad_(False)
