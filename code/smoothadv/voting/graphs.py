"""Networks as graphs of layers (torch.fx), rewritten without changing the function that they
compute.
"""

import operator
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from smoothadv.base.errors import UserError, first_line


def traced_plainly(network: nn.Module) -> torch.fx.GraphModule | None:
    """The graph of a network whose layers may be replaced; None where tracing fails or layers share
    or compute weights.

    The graph calls the layers of ``network`` itself, not copies.
    """
    try:
        traced = torch.fx.symbolic_trace(network)
    except Exception:  # a user's code may fail on a symbolic tensor with any exception
        return None
    return traced if _has_plain_layers(traced) else None


def _has_plain_layers(network: torch.fx.GraphModule) -> bool:
    """Whether every layer is called once and owns its weights: only then may they be replaced."""
    called = [node.target for node in network.graph.nodes if node.op == "call_module"]
    owners = [id(weight) for _, weight in network.named_parameters(remove_duplicate=False)]
    computed = any(
        is_parametrized(module) or module._forward_pre_hooks or module._forward_hooks
        for module in network.modules()
    )
    with_weights = [target for target in called if list(network.get_submodule(target).parameters())]
    return (
        len(with_weights) == len(set(with_weights))
        and len(owners) == len(set(owners))
        and not computed
    )


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
                if layer is None:
                    node.kwargs = {**node.kwargs, "inplace": True}
                else:
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


def layer_of(graph: torch.fx.GraphModule, node: torch.fx.Node) -> nn.Module | None:
    """The layer that a node calls; None where it calls none."""
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def _may_be_overwritten(value: torch.fx.Node, fresh: set[torch.fx.Node]) -> bool:
    return value in fresh and len(value.users) == 1


def let_compiler_choose_alike(network: nn.Module) -> None:
    """Let every process compile networks that are on a GPU, like this one, to kernels that round
    alike.

    Otherwise each process chooses the kernels of sums by timing them. Nothing changes where the
    network is on the CPU.
    """
    import torch._inductor.config as inductor

    if all(weight.device.type == "cpu" for weight in network.parameters()):
        return
    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True
    else:
        inductor.triton.autotune_pointwise = inductor.dynamic_scale_rblock = False


def call_compiled(
    compiled: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor
) -> torch.Tensor:
    """The output of a compiled network; UserError, at its first call, where no compiler can be
    found.
    """
    try:
        return compiled(images)
    except Exception as error:
        if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            raise
        advice = "--compile failed: leave it out, or install a C++ compiler (on a GPU: Triton)"
        raise UserError(f"{advice}; {first_line(error)}") from error
