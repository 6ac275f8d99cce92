"""Denoisers: networks from noisy images to images of the same shape, in front of a classifier
(Salman et al., 2020).

A denoiser D takes images [B, C, H, W] in [0, 1] plus noise and returns what they were without it;
values may leave [0, 1]. With it a base classifier F becomes F(D(x)), ``Denoised``, whose own input
layer comes after D. Builders, functions of a DatasetDescription, are registered in ``DENOISERS``.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.base.registry import Registry
from smoothadv.datasets import DatasetDescription

DENOISERS: Registry[Callable[[DatasetDescription], nn.Module]] = Registry("denoiser")


class Denoised(nn.Module):
    """F(D(x)): maps noisy images [B, C, H, W] to the logits [B, K] that a classifier gives to the
    denoised ones.
    """

    def __init__(self, denoiser: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.denoiser, self.classifier = denoiser, classifier

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.denoiser(images))


class Resized(nn.Module):
    """F of images resized to ``side`` x ``side`` pixels, with antialiasing; values may leave
    [0, 1].
    """

    def __init__(self, classifier: nn.Module, side: int, mode: str) -> None:
        super().__init__()
        self.classifier, self.side, self.mode = classifier, side, mode

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        size = self.side, self.side
        return self.classifier(F.interpolate(images, size, mode=self.mode, antialias=True))


def resized(classifier: nn.Module, how: str) -> nn.Module:
    """The classifier of images that are resized as ``how`` says, SIDE:FILTER."""
    side, _, mode = how.partition(":")
    return Resized(classifier, int(side), mode)


class LocallySmoothed(nn.Module):
    """The logarithm of the mean of softmax(F(x + d_i)) over m fixed noises d_i [m, C, H, W], the
    same for all images: a function (DiffSmooth, Zhang et al., 2023).
    """

    def __init__(self, classifier: nn.Module, noise: torch.Tensor) -> None:
        super().__init__()
        self.classifier = classifier
        self.noise = nn.Buffer(noise)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        copies = images[:, None] + self.noise
        logits = self.classifier(copies.flatten(0, 1)).unflatten(0, (-1, len(self.noise)))
        return logits.log_softmax(-1).logsumexp(1) - math.log(len(self.noise))


class DnCNN(nn.Module):
    """x - net(x): net estimates the noise (Zhang et al., 2017), by 3x3 convolutions with batch
    normalization.

    Layers, their names and the constant of batch normalization are those of the denoisers that
    Salman et al. (2020) released; these began with orthogonal weights, and their batch
    normalization had a momentum of 0.95. A new one here is the identity, and has PyTorch's 0.1.
    """

    def __init__(self, image_channels: int, depth: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(image_channels, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers.append(nn.Conv2d(width, width, 3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(width, eps=1e-4), nn.ReLU()]
        last = nn.Conv2d(width, image_channels, 3, padding=1, bias=False)
        nn.init.zeros_(last.weight)
        self.dncnn = nn.Sequential(*layers, last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images - self.dncnn(images)


def _dncnn(depth: int, width: int, description: DatasetDescription) -> nn.Module:
    return DnCNN(description.image_shape[0], depth, width)


# The last three are what the released code calls its denoisers.
for _name in ("dncnn", "cifar_dncnn", "imagenet_dncnn"):
    DENOISERS.register(_name)(partial(_dncnn, 17, 64))
DENOISERS.register("cifar_dncnn_wide")(partial(_dncnn, 17, 128))
# For 8x8 images, which it sees whole.
DENOISERS.register("digits_dncnn")(partial(_dncnn, 8, 32))
