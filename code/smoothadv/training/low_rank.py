"""Low-rank adaptation (LoRA, Hu et al., 2022) of the queries and values of Vision Transformers."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from smoothadv.architectures.integers import NetworkOfIntegers
from smoothadv.base.errors import UserError

_PART = ".parametrizations."


class LowRankChange(nn.Module):
    """Maps weights [3 C, D] of queries, keys and values to W + [B_q A_q; 0; B_v A_v], with each A
    [rank, D] and each B [C, rank], which is 0 at first.
    """

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        # Apart, since gradients may be clipped by tensor.
        self.a = nn.ParameterList(torch.empty(rank, columns) for _ in range(2))
        self.b = nn.ParameterList(torch.zeros(rows // 3, rank) for _ in range(2))
        for each in self.a:
            nn.init.kaiming_uniform_(each, math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        queries, values = (b @ a for a, b in zip(self.a, self.b))
        return weight + torch.cat([queries, torch.zeros_like(queries), values])


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze a model but for changes of its ``qkv`` layers and its last layer; UserError unless it
    is a Vision Transformer as timm builds them.
    """
    layers = [
        part
        for name, part in model.named_modules()
        if name.endswith(".qkv") and isinstance(part, nn.Linear)
    ]
    networks: list[Any] = [part for part in model.modules() if hasattr(part, "get_classifier")]
    if not layers or not networks:
        raise UserError(
            "--lora changes the queries and values of a Vision Transformer of timm, like "
            "timm:vit_tiny_patch16_224: leave it out"
        )
    model.requires_grad_(False)
    networks[0].get_classifier().requires_grad_(True)
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRankChange(layer.weight, rank))


def merge(model: nn.Module) -> None:
    """Make plain weights of those that were adapted."""
    for part in model.modules():
        if parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight")


def state_fields(model: nn.Module) -> dict[str, Any]:
    """The fields of a checkpoint that hold a model: of an adapted one plain weights, and those that
    are ``trained``, to go on.
    """
    if isinstance(model, NetworkOfIntegers):
        return model.state_fields()
    trained = model.state_dict()
    adapted = {name.partition(_PART)[0] for name in trained if _PART in name}
    if not adapted:
        return {"state_dict": trained}
    weights = {name: one for name, one in trained.items() if _PART not in name}
    for name in adapted:
        layer: Any = model.get_submodule(name)
        weights[f"{name}.weight"] = layer.weight.detach()
    return {"state_dict": weights, "trained": trained}
