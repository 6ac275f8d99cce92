"""torchvision's residual networks, for 224x224 images."""

from torch import nn

from smoothadv.architectures import ARCHITECTURES
from smoothadv.base.errors import UserError
from smoothadv.datasets.description import DatasetDescription


@ARCHITECTURES.register("resnet50")
def resnet50(description: DatasetDescription) -> nn.Module:
    """ResNet-50, randomly initialised; for three-channel images."""
    from torchvision import models

    if description.image_shape[0] != 3:
        raise UserError(
            f"resnet50 takes images of 3 channels; {description.name} has "
            f"{description.image_shape[0]}"
        )
    return models.resnet50(weights=None, num_classes=description.num_classes)
