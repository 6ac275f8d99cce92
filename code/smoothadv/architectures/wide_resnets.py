"""Wide residual networks WRN-d-k (Zagoruyko and Komodakis, 2016), for small images."""

from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import ARCHITECTURES
from smoothadv.architectures.resnets import initialize, stage
from smoothadv.datasets import DatasetDescription


class PreactivationBlock(nn.Module):
    """Two 3x3 convolutions, each behind batch normalization and ReLU, and a shortcut: a 1x1
    convolution of the first ReLU's output where the number of channels changes.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.convShortcut = (
            nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            if in_channels != out_channels
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(first))))
        return out + (x if self.convShortcut is None else self.convShortcut(first))


def _wide_resnet(depth: int, factor: int, description: DatasetDescription) -> nn.Module:
    """WRN-depth-factor without dropout; parameters have the names of xternalz/WideResNet-pytorch,
    from which most networks of adversarial training are derived.
    """
    widths, blocks = (16, 16 * factor, 32 * factor, 64 * factor), (depth - 4) // 6
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(description.image_shape[0], widths[0], 3, padding=1, bias=False)
    }
    for number, stride in ((1, 1), (2, 2), (3, 2)):
        made = stage(PreactivationBlock, widths[number - 1], widths[number], blocks, stride)
        layers[f"block{number}"] = nn.Sequential(OrderedDict(layer=made))
    layers |= {"bn1": nn.BatchNorm2d(widths[-1]), "relu": nn.ReLU()}
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    layers["fc"] = nn.Linear(widths[-1], description.num_classes)
    network = nn.Sequential(OrderedDict(layers))
    initialize(network)
    return network


_PUBLISHED = ((16, 4), (16, 8), (22, 8), (28, 2), (28, 10), (34, 10), (40, 2), (40, 4))
for _depth, _factor in _PUBLISHED:
    ARCHITECTURES.register(f"wide_resnet{_depth}_{_factor}")(partial(_wide_resnet, _depth, _factor))
