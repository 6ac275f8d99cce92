"""Residual networks: for small images ResNet-N with N = 6k + 2 (He et al., 2016, section 4.2) and
wide ones, WRN-d-k (Zagoruyko and Komodakis, 2016); for 224x224 images that of torchvision.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import ARCHITECTURES
from smoothadv.base.errors import UserError
from smoothadv.datasets import DatasetDescription


def initialize(network: nn.Module) -> None:
    """Draw weights of convolutions from N(0, 2 / (k^2 C_out)): He et al. (2015), over outputs."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def stage(
    block: Callable[[int, int, int], nn.Module], before: int, width: int, blocks: int, stride: int
) -> nn.Sequential:
    """Blocks of ``width`` channels; the first one reads ``before`` channels, and has the stride."""
    first = block(before, width, stride)
    return nn.Sequential(first, *(block(width, width, 1) for _ in range(blocks - 1)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class SmallImageResNet(nn.Module):
    """A 3x3 stem, stages of basic blocks, a mean over positions and a linear layer.

    ``widths`` holds the channels of each stage, ``blocks`` is the number of blocks per stage; every
    stage but the first halves the resolution. Maps [B, C, H, W] to [B, num_classes] for any H and
    W.
    """

    def __init__(
        self, in_channels: int, widths: tuple[int, ...], blocks: int, num_classes: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self._stages = [f"layer{number}" for number in range(1, len(widths) + 1)]
        for name, before, width in zip(self._stages, (widths[0], *widths), widths):
            stride = 1 if name == "layer1" else 2
            self.add_module(name, stage(BasicBlock, before, width, blocks, stride))
        self.fc = nn.Linear(widths[-1], num_classes)
        initialize(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for name in self._stages:
            x = getattr(self, name)(x)
        return self.fc(x.mean((2, 3)))


def _cifar_resnet(depth: int, description: DatasetDescription) -> nn.Module:
    return SmallImageResNet(
        description.image_shape[0],
        widths=(16, 32, 64),
        blocks=(depth - 2) // 6,
        num_classes=description.num_classes,
    )


for _depth in range(20, 111, 6):
    ARCHITECTURES.register(f"cifar_resnet{_depth}")(partial(_cifar_resnet, _depth))
# The same network, under the names that the released checkpoints for other classes record.
for _name in ("imagenet32_resnet110", "cifar100_resnet110"):
    ARCHITECTURES.register(_name)(partial(_cifar_resnet, 110))
# For the 8x8 digits: it has all parts of the large ones, on 8x8, 4x4 and 2x2 maps, and trains in
# seconds.
ARCHITECTURES.register("digits_resnet8")(partial(_cifar_resnet, 8))


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
