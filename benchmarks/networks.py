"""Networks and images whose speed is measured: prepared alike for all benchmarks."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import get_architecture
from smoothadv.datasets import DatasetDescription, describe_dataset, get_dataset

SIGMA = 0.25
_BATCH, _SETTLING = 16, 8


def description_of(arch: str) -> DatasetDescription:
    """ImageNet for a ResNet-50, CIFAR-10 for others."""
    return describe_dataset("imagenet" if arch == "resnet50" else "cifar10")


@cache
def prepared(arch: str, device: torch.device, updates: int) -> nn.Module:
    """The architecture in eval mode, after so many ``updates`` on digits in Gaussian noise.

    Its normalization has the mean statistics of several batches of noisy digits. With the moving
    averages of a short training, activations grow from layer to layer, beyond what fp16 holds.
    """
    torch.manual_seed(0)
    network = get_architecture(arch, description_of(arch)).to(device).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    for _ in range(updates):
        images, labels = noisy_digits(arch, device)
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    norms = [
        layer for layer in network.modules() if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d))
    ]
    momenta = [layer.momentum for layer in norms]
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
    with torch.no_grad():
        for _ in range(_SETTLING):
            network(noisy_digits(arch, device)[0])
    for layer, momentum in zip(norms, momenta):
        layer.momentum = momentum
    return network.eval()


def noisy_digits(arch: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A random batch of digits [B, C, H, W], resized to the architecture's images, in Gaussian
    noise, and its labels [B].
    """
    images, labels = _digits()
    shape = description_of(arch).image_shape
    chosen = torch.randint(len(images), (_BATCH,))
    resized = F.interpolate(images[chosen].to(device), shape[1:]).expand(-1, *shape)
    return resized + SIGMA * torch.randn(resized.shape, device=device), labels[chosen].to(device)


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The training images [N, 1, 8, 8] of scikit-learn's digits, which need no download, and their
    labels [N].
    """
    digits = get_dataset("digits", "train")
    images, labels = zip(*(digits[index] for index in range(len(digits))))
    return torch.stack(images), torch.tensor(labels)
