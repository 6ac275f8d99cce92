"""The classifier in training as it is attacked: its eval mode, with batch normalization folded into
convolutions.
"""

import copy

import torch
from torch import nn

from smoothadv.attacks.estimators import frozen
from smoothadv.voting import folding
from smoothadv.voting.folding import (
    are_offered_on,
    fuse_epilogues,
    overwrite_in_place,
    runs,
    traced_plainly,
)


class AttackedModel(nn.Module):
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
        super().__init__()
        entrance, network = folding.split_entrance(model)
        with frozen(model):  # a network may look at its mode while it is traced
            graph = traced_plainly(network)
        if graph is None:
            raise ValueError("the network cannot be traced, or its layers share weights")
        # In a list of tuples: the model's layers must not become this module's.
        self._folded = folding.replace_norms(graph, dtype)
        graph = fuse_epilogues(graph) if epilogues else graph
        self.entrance, self.network = entrance or nn.Identity(), overwrite_in_place(graph)
        self.refresh()

    def refresh(self) -> None:
        """Take over the model's present weights and statistics."""
        folding.refresh(self._folded)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(self.entrance(images))


def attacked_form(
    model: nn.Module, example: torch.Tensor, dtype: torch.dtype | None = None
) -> AttackedModel | None:
    """An AttackedModel of ``model``; None where there is none or it does not give the same logits.

    ``example`` [B, C, H, W] holds images on which that is tried, in float64, where only rounding is
    allowed to differ.
    """
    trial = copy.deepcopy(model).cpu().double().eval()
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    try:
        for epilogues in (True, False) if are_offered_on(device) else (False,):
            is_same = folding.agree(
                trial, AttackedModel(trial, None, epilogues), example.cpu().double()
            )
            form = AttackedModel(model, dtype, epilogues) if is_same else None
            if form is not None and (not epilogues or runs(form, example.to(device), dtype)):
                return form
        return None
    except (
        ValueError,
        RuntimeError,
        TypeError,
    ):  # a network that cannot be traced, or that tracing broke
        return None
