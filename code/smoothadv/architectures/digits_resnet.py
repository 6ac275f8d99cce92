"""A small residual network for 8x8 digits: it has all parts of the large ones and trains in seconds."""

from __future__ import annotations

from torch import nn

from smoothadv.architectures import ARCHITECTURES
from smoothadv.architectures.cifar_resnet import SmallImageResNet
from smoothadv.datasets.description import DatasetDescription


@ARCHITECTURES.register("digits_resnet8")
def digits_resnet8(description: DatasetDescription) -> nn.Module:
    """Three stages of one block, 16, 32 and 64 channels on 8x8, 4x4 and 2x2 maps: 8 layers with weights."""
    return SmallImageResNet(
        description.image_shape[0], widths=(16, 32, 64), blocks=1, num_classes=description.num_classes
    )
