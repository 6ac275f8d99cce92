"""Networks as graphs of layers (torch.fx), rewritten to the same function with fewer kernels.

Batch normalization is folded into the convolutions before it. On a GPU, a convolution, the sum with
a shortcut and ReLU become one call of cuDNN: certification and attacks are bound by the bytes that
separate kernels move. Certification folds a network once; training folds it again after every
update, for the attacks on it. If folding changes a network's logits by more than rounding, the
network is used without folding.
"""

import contextlib
import copy
import math
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from smoothadv.architectures.denoisers import Denoised
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.architectures.input_layers import Center, Normalize
from smoothadv.architectures.integers import NetworkOfIntegers
from smoothadv.base.devices import layout_on
from smoothadv.base.errors import first_line, warn

_SUMS = (operator.add, operator.iadd, torch.add)
_AGREEMENT = 0.1  # of the largest logit: far above what bfloat16 rounds, far below another function
_RELUS = (F.relu, torch.relu, "relu")  # the last one is a method
_ROUNDING = 1e-6
_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)
Folded = tuple[nn.Conv2d, nn.Conv2d, nn.BatchNorm2d | nn.SyncBatchNorm]
"""A folded convolution, and the convolution and the batch normalization that it replaces."""


def split_entrance(classifier: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """The input layer and the network of a base classifier; (None, the classifier) where it is no
    pair of these, or is altered.
    """
    if (
        isinstance(classifier, nn.Sequential)
        and len(classifier) == 2
        and not _is_altered(classifier)
    ):
        return classifier[0], classifier[1]
    return None, classifier


def fold(
    classifier: nn.Module, example: torch.Tensor | None = None, epilogues: bool = False
) -> nn.Module:
    """The same function, in eval mode, with batch normalization, and a Normalize in front, folded
    into convolutions.

    With ``epilogues``, convolutions without gradients become one call with the sum and the ReLU
    behind them.

    Returns the classifier itself if torch.fx cannot trace it, if its layers are used twice, share
    weights or compute their weights in each pass, or if the logits of the ``example`` images [B, C,
    H, W] change by more than rounding, for instance because tracing followed a branch that no
    tensor takes; also if it is a network of integers. The members of an ensemble are folded one by
    one, and so are a denoiser and the classifier behind it.
    """
    if isinstance(classifier, NetworkOfIntegers):
        return classifier
    if isinstance(classifier, Ensemble):
        members = [fold(member, example, epilogues) for member in classifier.members]
        is_folded = any(new is not old for new, old in zip(members, classifier.members))
        return Ensemble(members, classifier.mean) if is_folded else classifier
    if isinstance(classifier, Denoised):
        before = classifier.denoiser, classifier.classifier
        after = [fold(part, example, epilogues) for part in before]
        return (
            classifier if all(new is old for new, old in zip(after, before)) else Denoised(*after)
        )
    entrance, network = split_entrance(classifier)
    traced = copy.deepcopy(traced_plainly(network))  # the network keeps its own layers
    if traced is None:
        return classifier
    refresh(replace_norms(traced))
    if isinstance(entrance, Normalize) and _scale_first_convolution(traced, entrance.std):
        entrance = Center(tuple(entrance.mean.flatten().tolist()), ()).to(entrance.mean.device)
    folded: nn.Module = overwrite_in_place(fuse_epilogues(traced) if epilogues else traced)
    if entrance is not None:
        folded = nn.Sequential(entrance, folded)
    return folded if example is None or agree(classifier, folded, example) else classifier


@torch.no_grad()
def agree(
    one: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[torch.Tensor], torch.Tensor],
    images: torch.Tensor,
) -> bool:
    """Whether two functions of images [B, C, H, W] return the same finite logits up to rounding (in
    float64: 1e-6).
    """
    try:
        before, after = one(images.clone()), other(images.clone())
    except (RuntimeError, TypeError, ValueError):
        # A network that accepts one dtype only, or that tracing broke.
        return False
    scale = float(before.abs().max())
    return scale < math.inf and torch.allclose(
        before, after, rtol=_ROUNDING, atol=_ROUNDING * scale
    )


def traced_plainly(network: nn.Module) -> torch.fx.GraphModule | None:
    """The graph of a network whose layers may be replaced; None where tracing fails or layers share
    or compute weights.

    The graph calls the layers of ``network`` itself, not copies.
    """
    try:
        traced = torch.fx.symbolic_trace(network)
    except Exception:  # a user's code may fail on a symbolic tensor with any exception
        return None
    with_weights = [
        node.target
        for node in traced.graph.nodes
        if node.op == "call_module" and list(traced.get_submodule(node.target).parameters())
    ]
    owners = [id(weight) for _, weight in traced.named_parameters(remove_duplicate=False)]
    are_computed = any(map(_is_altered, (network, *traced.modules())))
    are_shared = len({*with_weights}) < len(with_weights) or len({*owners}) < len(owners)
    return None if are_computed or are_shared else traced


def _is_altered(module: nn.Module) -> bool:
    # torch.fx does not follow what was added to a module from outside.
    return (
        is_parametrized(module)
        or bool(module._forward_pre_hooks or module._forward_hooks)
        or "forward" in vars(module)
    )


def layer_of(graph: torch.fx.GraphModule, node: torch.fx.Node) -> nn.Module | None:
    """The layer that a node calls; None where it calls none."""
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def _replace_layer(graph: torch.fx.GraphModule, node: torch.fx.Node, layer: nn.Module) -> None:
    parent, _, name = str(node.target).rpartition(".")
    setattr(graph.get_submodule(parent), name, layer)


def is_plain_convolution(layer: nn.Module | None) -> bool:
    """Whether a layer is a Conv2d that pads with zeros, by stated numbers."""
    return (
        isinstance(layer, nn.Conv2d)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def replace_norms(graph: torch.fx.GraphModule, dtype: torch.dtype | None = None) -> list[Folded]:
    """Replace each convolution and its batch normalization by one convolution, whose weights
    ``refresh`` sets.

    The new convolutions have ``dtype`` (None: that of the old ones) and need no gradients.
    """
    replaced: list[Folded] = []
    for node in list(graph.graph.nodes):
        before = node.args[0] if node.args else None
        if not isinstance(before, torch.fx.Node) or len(before.users) > 1:
            continue
        norm: Any = layer_of(graph, node)
        convolution: Any = layer_of(graph, before)
        is_pair = type(convolution) is nn.Conv2d and type(norm) in _NORMS
        if not is_pair or norm.running_var is None:
            continue
        folded, weight = copy.deepcopy(convolution), convolution.weight.detach()
        kind = dtype or weight.dtype
        fused = weight.to(kind, memory_format=layout_on(weight.device, kind), copy=True)
        folded.weight = nn.Parameter(fused, requires_grad=False)
        folded.bias = nn.Parameter(weight.new_empty(len(weight), dtype=kind), requires_grad=False)
        replaced.append((folded, convolution, norm))
        _replace_layer(graph, before, folded)
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return replaced


@torch.no_grad()
def refresh(replaced: list[Folded]) -> None:
    """Set the folded convolutions to the present weights and statistics of the layers that they
    replace.

    With scale = gamma / sqrt(variance + eps), per output channel: weight * scale, and beta + (bias
    - mean) * scale.
    """
    if not replaced:
        return
    folded, convolutions, norms = (list(layers) for layers in zip(*replaced))
    # The foreach functions need a few kernels for all layers together.
    deviations = torch._foreach_add(
        [norm.running_var for norm in norms], [norm.eps for norm in norms]
    )
    gammas = [
        torch.ones_like(norm.running_var) if norm.weight is None else norm.weight for norm in norms
    ]
    betas = [
        torch.zeros_like(norm.running_mean) if norm.bias is None else norm.bias for norm in norms
    ]
    scales = torch._foreach_div(gammas, torch._foreach_sqrt(deviations))
    numbers_by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for number, layer in enumerate(convolutions):
        numbers_by_shape[layer.weight.shape[1:]].append(number)
    # Together: the foreach functions would take a kernel for each layer.
    for numbers in numbers_by_shape.values():
        scale = torch.cat([scales[number] for number in numbers])
        weights = torch.cat([convolutions[number].weight for number in numbers])
        weights = weights * scale.view(-1, *[1] * (weights.dim() - 1))
        parts = weights.split([len(scales[number]) for number in numbers])
        torch._foreach_copy_([folded[number].weight for number in numbers], parts)
    shifts = torch._foreach_mul([norm.running_mean for norm in norms], scales)
    biases = torch._foreach_sub(betas, shifts)
    for bias, scale, layer in zip(biases, scales, convolutions):
        if layer.bias is not None:
            bias += layer.bias * scale
    torch._foreach_copy_([layer.bias for layer in folded], biases)


def _scale_first_convolution(network: torch.fx.GraphModule, std: torch.Tensor) -> bool:
    """Divide the first layer's weights by ``std`` [C, 1, 1]; if that layer is no plain convolution,
    do nothing: False.

    This is exact: a border holds zeros, or values of the image, which are divided, too.
    Folding the mean into a bias would not be exact, since the border of a centred image stands for
    the mean.
    """
    users = list(next(node for node in network.graph.nodes if node.op == "placeholder").users)
    layer = layer_of(network, users[0]) if len(users) == 1 else None
    if not isinstance(layer, nn.Conv2d) or layer.groups != 1:
        return False
    layer.weight.data /= std.flatten().view(1, -1, 1, 1)
    return True


def overwrite_in_place(network: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Let sums and ReLUs overwrite the output of a convolution where nothing else reads it; returns
    ``network``.

    Gradients with respect to the input stay right: the gradient of a ReLU needs its output, which
    nothing overwrites.
    """
    fresh: set[torch.fx.Node] = set()  # values that share their memory with no other value
    for node in network.graph.nodes:
        layer = layer_of(network, node)
        if isinstance(layer, nn.Conv2d):
            fresh.add(node)
        elif isinstance(layer, nn.ReLU) or node.target is F.relu:
            if _may_be_overwritten(node.args[0], fresh):
                node.op, node.target = "call_function", F.relu
                node.args, node.kwargs = (node.args[0],), {"inplace": True}
        elif node.target is operator.add and all(
            isinstance(term, torch.fx.Node) for term in node.args
        ):
            terms = sorted(node.args, key=lambda term: not _may_be_overwritten(term, fresh))
            if _may_be_overwritten(terms[0], fresh) and terms[0] is not terms[1]:
                node.target, node.args = operator.iadd, tuple(terms)
                fresh.add(node)
    network.recompile()
    return network


def _may_be_overwritten(value: torch.fx.Node, fresh: set[torch.fx.Node]) -> bool:
    return value in fresh and len(value.users) == 1


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
        x = x.to(layer.weight.dtype)
        shortcut = None if shortcut is None else shortcut.to(layer.weight.dtype)
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
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient, _, _ = torch.ops.aten.convolution_backward(
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
        return x_gradient, gradient if ctx.needs_input_grad[1] else None, None, None, None


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
        fusible = [term for term in terms if _is_fusible(graph, term)]
        convolution = max(fusible, key=order.index, default=None)
        if convolution is None or len(terms) != 1 + is_sum or terms.count(convolution) > 1:
            continue
        shortcut = [term for term in terms if term is not convolution]
        layer = layer_of(graph, convolution)
        assert isinstance(layer, nn.Conv2d)
        _replace_layer(graph, convolution, ConvolutionReLU(layer))
        relu.op, relu.target = "call_module", str(convolution.target)
        relu.args, relu.kwargs = (convolution.args[0], *shortcut), {}
        for node in dict.fromkeys((before, convolution)):
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def are_offered_on(device: torch.device, dtype: torch.dtype | None = None) -> bool:
    """Whether to try these calls for weights of ``dtype`` (None: float32): not where every kernel
    has to be deterministic, as with --sound, nor in full float32, which they are not known to suit.
    """
    return (
        device.type in ("cuda", "meta")
        and layout_on(device, dtype) is torch.channels_last
        and not torch.are_deterministic_algorithms_enabled()
    )


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
            logits, logits_of_nan = network(images.clone()).float(), network(images * math.nan)
            for layer in fused:
                layer.is_plain = True
            expected = network(images.clone()).float()
        is_same = bool((logits - expected).abs().max() <= _AGREEMENT * expected.abs().max())
        keeps_nan = not bool(logits_of_nan.isfinite().any())
        reason = "" if is_same and keeps_nan else "cuDNN computes something else"
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
    return (
        layer is not None
        and is_plain_convolution(layer)
        and len(node.users) == 1
        and not any(weight.requires_grad for weight in layer.parameters())
    )
