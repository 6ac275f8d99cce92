"""LeNet for MNIST and Fashion-MNIST, with the layers and names of parameters of the code released
with MACER (Zhai et al., 2020), consistency, SmoothMix and CAT-RS (Jeong et al., 2020, 2021, 2023).
"""

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import ARCHITECTURES
from smoothadv.base.errors import UserError
from smoothadv.datasets import DatasetDescription


class LeNet(nn.Module):
    """Two 5x5 convolutions without padding, each with ReLU and 2x2 maxima, and two linear layers.
    Maps [B, 1, 28, 28] to [B, num_classes].
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(50 * 4 * 4, 500), nn.Linear(500, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


@ARCHITECTURES.register("lenet")
def lenet(description: DatasetDescription) -> nn.Module:
    """LeNet, randomly initialised; for grey images of 28x28 pixels."""
    if description.image_shape != (1, 28, 28):
        raise UserError(
            f"lenet takes images [1, 28, 28]; those of {description.name} are "
            f"{list(description.image_shape)}"
        )
    return LeNet(description.num_classes)
