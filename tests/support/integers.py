"""Networks of integers made of float networks, without files."""

import json

import numpy as np
import torch
from torch import nn

from smoothadv.architectures.input_layers import Normalize
from smoothadv.architectures.integer_network import IntegerNetwork
from smoothadv.quantization.building import LEVELS, Builder
from smoothadv.quantization.calibration import largest_values
from smoothadv.quantization.reading import read_network
from support import slow_integers

CLIP = 383


def grey_images(count: int, shape: tuple[int, ...], clip: int = CLIP, seed: int = 0) -> torch.Tensor:
    """Images [count, C, H, W] of random grey levels in -clip..255 + clip, float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-clip, 256 + clip, (count, *shape), generator=generator).float() / 255


def with_entrance(network: nn.Module, channels: int) -> nn.Sequential:
    """A base classifier whose input layer subtracts whole grey levels, so that integers round nothing there."""
    return nn.Sequential(Normalize((128 / 255,) * channels, (0.25,) * channels), network).eval()


def quantized(classifier: nn.Module, images: torch.Tensor, clip: int = CLIP) -> IntegerNetwork:
    """The network of integers of a base classifier, calibrated on images [B, C, H, W]."""
    shape = tuple(images.shape[1:])
    network = read_network(classifier, shape)
    mean = ((network.mean * 255).round() / 255).view(-1, 1, 1)
    batches = ((part.double() - mean) / network.std.view(-1, 1, 1) for part in images.split(16))
    made = Builder(network, largest_values(network, batches, LEVELS), shape, clip).build().eval()
    made.set_probe()
    return made


def slow_logits(network: IntegerNetwork, images: torch.Tensor) -> np.ndarray:
    """The logits of the reference in NumPy, float32 [B, K], from what a checkpoint would hold."""
    record, tensors = network.stored()
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return slow_integers.logits(json.loads(json.dumps(record)), arrays, images.numpy())
