"""The first layer of every base classifier. Noise and perturbations are added before it, to images
in [0, 1].
"""

from collections.abc import Callable

import torch
from torch import nn

from smoothadv.base.errors import UserError
from smoothadv.base.registry import Registry
from smoothadv.datasets import DatasetDescription


class Center(nn.Module):
    """x - mean per channel; a buffer that a state dict leaves out, as the released files do."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.mean = nn.Buffer(
            torch.tensor(mean, dtype=torch.float)[:, None, None], persistent=False
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images - self.mean


class Normalize(Center):
    """(x - mean) / std per channel."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__(mean, std)
        self.std = nn.Buffer(torch.tensor(std, dtype=torch.float)[:, None, None], persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images - self.mean) / self.std


INPUT_LAYERS: Registry[Callable[[tuple[float, ...], tuple[float, ...]], nn.Module]] = Registry(
    "input layer"
)
INPUT_LAYERS.register("normalize")(Normalize)
INPUT_LAYERS.register("center")(Center)
INPUT_LAYERS.register("half")(lambda mean, std: Normalize((0.5,) * len(mean), (0.5,) * len(std)))
INPUT_LAYERS.register("none")(nn.Identity)  # for networks that normalize images themselves


def build_input_layer(name: str, description: DatasetDescription) -> nn.Module:
    """The input layer ``name`` with the dataset's constants; UserError where the dataset has
    none.
    """
    layer = INPUT_LAYERS[name]
    if layer is nn.Identity:
        return layer()
    if description.mean is None or description.std is None:
        raise UserError(
            f"dataset '{description.name}' has no mean and standard deviation to normalize with: a "
            "folder of images has them if it has a train/ folder, and a checkpoint of smoothadv "
            "records them; 'none' is for a network that normalizes its images itself"
        )
    return layer(description.mean, description.std)
