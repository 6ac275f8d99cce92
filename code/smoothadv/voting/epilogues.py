"""A convolution, the sum with a shortcut, and ReLU as one call of cuDNN: on a GPU each would be a
kernel of its own.

Folding leaves convolutions with a bias, which is a kernel too. Certification and attacks are bound
by the bytes that all these kernels move.
"""

import contextlib
import math
import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.base.errors import first_line, warn
from smoothadv.voting.graphs import layer_of

_SUMS = (operator.add, operator.iadd, torch.add)
_AGREEMENT = 0.1  # of the largest logit: far above what bfloat16 rounds, far below another function
_RELUS = (F.relu, torch.relu, "relu")  # the last one is a method


class ConvolutionReLU(nn.Module):
    """Maps x [B, C, H, W] to relu(convolution(x) + shortcut), where the shortcut [B, K, h, w] may
    be None.

    The ``convolution``'s weights need no gradients. On a CPU, and where a compiler fuses kernels by
    itself, these are PyTorch's own functions.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution, self.is_plain = convolution, False

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor | None = None) -> torch.Tensor:
        layer = self.convolution
        if self.is_plain or _suits_plain_functions(x):
            out = layer(x)
            if shortcut is not None and shortcut.shape != out.shape:  # cuDNN does not expand it
                raise ValueError(
                    f"a shortcut of shape {tuple(shortcut.shape)} for {tuple(out.shape)}"
                )
            return F.relu(out if shortcut is None else out + shortcut)
        geometry = (layer.stride, layer.padding, layer.dilation, layer.groups)
        x, shortcut = (
            x.to(layer.weight.dtype),
            None if shortcut is None else shortcut.to(layer.weight.dtype),
        )
        needs_gradient = x.requires_grad or (shortcut is not None and shortcut.requires_grad)
        call = _WithGradient.apply if torch.is_grad_enabled() and needs_gradient else _in_one_call
        return call(x, shortcut, layer.weight, layer.bias, geometry)


def _suits_plain_functions(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" or torch.compiler.is_compiling()


def _in_one_call(
    x: torch.Tensor,
    shortcut: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: tuple,
) -> torch.Tensor:
    """cuDNN's ConvolutionBiasActivationForward, which PyTorch calls without asking for
    deterministic kernels.
    """
    if shortcut is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
    return torch.cudnn_convolution_add_relu(x, weight, shortcut, 1.0, bias, *geometry)


class _WithGradient(torch.autograd.Function):
    """``_in_one_call`` with gradients for the two inputs: cuDNN's call has none."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, shortcut: Any, weight: Any, bias: Any, geometry: tuple
    ) -> torch.Tensor:
        out = _in_one_call(x, shortcut, weight, bias, geometry)
        ctx.save_for_backward(x, weight, out)
        ctx.geometry = geometry
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        gradient = torch.ops.aten.threshold_backward(gradients[0], out, 0)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x, _, _ = torch.ops.aten.convolution_backward(
                gradient,
                x,
                weight,
                None,
                stride,
                padding,
                dilation,
                False,
                (0, 0),
                groups,
                (True, False, False),
            )
        return of_x, gradient if ctx.needs_input_grad[1] else None, None, None, None


def fuse_epilogues(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Replace each folded convolution with the sum and the ReLU behind it by a ConvolutionReLU;
    returns ``graph``.

    All ``graph``'s convolutions must be called once each. Those whose weights need gradients stay.
    """
    for relu in list(graph.graph.nodes):
        is_function = relu.op != "call_module" and relu.target in _RELUS
        if not (is_function or isinstance(layer_of(graph, relu), nn.ReLU)):
            continue
        before = relu.args[0] if relu.args else None
        if not isinstance(before, torch.fx.Node) or len(before.users) > 1:
            continue
        is_sum = before.target in _SUMS and not before.kwargs
        terms = [
            term
            for term in (before.args if is_sum else [before])
            if isinstance(term, torch.fx.Node)
        ]
        # It moves to the place of the ReLU: the last one, so that nothing it reads is overwritten
        # before.
        order = list(graph.graph.nodes)
        convolution = max(
            (term for term in terms if _is_fusible(graph, term)), key=order.index, default=None
        )
        if convolution is None or len(terms) != 1 + is_sum or terms.count(convolution) > 1:
            continue
        shortcut = [term for term in terms if term is not convolution]
        name = str(convolution.target)
        parent, _, last = name.rpartition(".")
        layer = layer_of(graph, convolution)
        assert isinstance(layer, nn.Conv2d)
        setattr(graph.get_submodule(parent), last, ConvolutionReLU(layer))
        relu.op, relu.target, relu.args, relu.kwargs = (
            "call_module",
            name,
            (convolution.args[0], *shortcut),
            {},
        )
        for node in dict.fromkeys((before, convolution)):
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def are_offered_on(device: torch.device) -> bool:
    """Whether to try these calls: not where every kernel has to be deterministic, as with
    --sound.
    """
    return device.type in ("cuda", "meta") and not torch.are_deterministic_algorithms_enabled()


@torch.no_grad()
def runs(network: nn.Module, images: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether cuDNN computes the ``network`` in eval mode on images [B, C, H, W], as PyTorch's
    functions do.

    The logits must agree but for the rounding of the shortest type, and NaN must stay NaN. With a
    ``dtype``, within torch.autocast to that type. Otherwise a warning says why not.
    """
    autocast = torch.autocast(images.device.type, dtype) if dtype else contextlib.nullcontext()
    modes = [(module, module.training) for module in network.modules()]
    fused = [module for module in network.modules() if isinstance(module, ConvolutionReLU)]
    try:
        network.eval()
        with autocast:
            logits, of_nan = network(images).float(), network(images * math.nan)
            for layer in fused:
                layer.is_plain = True
            expected = network(images).float()
        is_same = bool((logits - expected).abs().max() <= _AGREEMENT * expected.abs().max())
        reason = (
            "" if is_same and not bool(of_nan.isfinite().any()) else "cuDNN computes something else"
        )
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = first_line(error)
    finally:
        for layer in fused:
            layer.is_plain = False
        for module, training in modes:
            module.training = training
    if reason:
        warn(f"convolutions and ReLUs are computed one by one: {reason}")
    return not reason


def _is_fusible(graph: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    layer = layer_of(graph, node)
    if (
        not isinstance(layer, nn.Conv2d)
        or layer.padding_mode != "zeros"
        or isinstance(layer.padding, str)
    ):
        return False
    return len(node.users) == 1 and not any(weight.requires_grad for weight in layer.parameters())
