"""Folds batch normalization into the convolutions before it: the same function in eval mode, with
fewer layers.

Certification folds a network once; training folds it again after every update, for the attacks on
it. If folding changes a network's logits by more than rounding, the network is used without
folding.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from smoothadv.architectures.denoisers import Denoised
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.architectures.input_layers import Center, Normalize
from smoothadv.exact.network import IntegerNetwork
from smoothadv.voting.epilogues import fuse_epilogues
from smoothadv.voting.graphs import layer_of, overwrite_in_place, traced_plainly

_ROUNDING = 1e-6
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_NORMS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.Conv1d: (nn.BatchNorm1d, nn.SyncBatchNorm),
    nn.Conv2d: (nn.BatchNorm2d, nn.SyncBatchNorm),
    nn.Conv3d: (nn.BatchNorm3d, nn.SyncBatchNorm),
}
_GEOMETRY = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
)
Folded = tuple[Convolution, Convolution, BatchNorm]
"""A folded convolution, and the convolution and the batch normalization that it replaces."""


def split_entrance(classifier: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """The input layer and the network of a base classifier; (None, the classifier) where it is no
    pair of these.
    """
    if isinstance(classifier, nn.Sequential) and len(classifier) == 2:
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
    tensor takes; also if it is a network of integers. Of an ensemble, each member is folded, of a
    classifier behind a denoiser each of both.
    """
    if isinstance(classifier, IntegerNetwork):
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
    traced = copy.deepcopy(
        traced_plainly(network)
    )  # its layers are those of the network, which stays as it is
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
        before, after = one(images), other(images)
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ):  # a network that accepts one dtype only, or that tracing broke
        return False
    scale = float(before.abs().max())
    return scale < math.inf and torch.allclose(
        before, after, rtol=_ROUNDING, atol=_ROUNDING * scale
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
        norm, convolution = layer_of(graph, node), layer_of(graph, before)
        if (
            not isinstance(convolution, Convolution)
            or not isinstance(norm, BatchNorm)
            or norm.running_var is None
        ):
            continue
        if type(norm) not in _NORMS.get(type(convolution), ()):
            continue
        folded = _convolution_like(convolution, dtype or convolution.weight.dtype)
        replaced.append((folded, convolution, norm))
        parent, _, name = str(before.target).rpartition(".")
        setattr(graph.get_submodule(parent), name, folded)
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
    for numbers in (
        numbers_by_shape.values()
    ):  # together: the foreach functions would take a kernel for each layer
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


def _convolution_like(layer: Convolution, dtype: torch.dtype) -> Convolution:
    """A convolution of the same geometry with a bias, whose parameters need no gradients."""
    geometry = {name: getattr(layer, name) for name in _GEOMETRY}
    new = type(layer)(**geometry, bias=True, device=layer.weight.device, dtype=dtype)
    if isinstance(new, nn.Conv2d):
        new = new.to(memory_format=torch.channels_last)
    return new.requires_grad_(False)


def _scale_first_convolution(network: torch.fx.GraphModule, std: torch.Tensor) -> bool:
    """Divide the first layer's weights by ``std`` [C, 1, 1]; if that layer is no plain convolution,
    do nothing: False.

    This is exact with zero padding: a border of zeros is zero before and after the division.
    Folding the mean into a bias would not be exact, since the border of a centred image stands for
    the mean.
    """
    users = list(next(node for node in network.graph.nodes if node.op == "placeholder").users)
    layer = layer_of(network, users[0]) if len(users) == 1 else None
    if not isinstance(layer, nn.Conv2d) or layer.padding_mode != "zeros" or layer.groups != 1:
        return False
    layer.weight.data /= std.flatten().view(1, -1, 1, 1)
    return True
