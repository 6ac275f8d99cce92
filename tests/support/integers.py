"""Networks of integers made of float networks, without files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from smoothadv.architectures import get_architecture
from smoothadv.architectures.input_layers import Normalize
from smoothadv.datasets import describe_dataset
from smoothadv.integer.conversion import convert, read_network
from smoothadv.integer.layers import Convolution
from smoothadv.integer.network import IntegerNetwork
from support import slow_integers
from support.networks import settle_batch_norms

CLIP = 383
# Options of ``quantize`` with which it takes a second.
SHORT = ("--calibration", 64, "--held-out", 20, "--draws", 50)


def grey_images(
    count: int, shape: tuple[int, ...], clip: int = CLIP, seed: int = 0
) -> torch.Tensor:
    """Images [count, C, H, W] of random grey levels in -clip..255 + clip, float32, divided as GPUs
    do: by a product with the rounded 1/255.
    """
    generator, reciprocal = torch.Generator().manual_seed(seed), torch.tensor(1 / 255)
    return torch.randint(-clip, 256 + clip, (count, *shape), generator=generator) * reciprocal


def with_entrance(network: nn.Module, channels: int) -> nn.Sequential:
    """A base classifier whose input layer subtracts whole grey levels, so that integers round
    nothing there.
    """
    return nn.Sequential(Normalize((128 / 255,) * channels, (0.25,) * channels), network).eval()


def quantized(
    classifier: nn.Module, images: torch.Tensor, clip: int = CLIP, weight_bits: int = 7
) -> IntegerNetwork:
    """The network of integers of a base classifier, calibrated on images [B, C, H, W]."""
    shape = tuple(images.shape[1:])
    return convert(read_network(classifier, shape), images.split(16), shape, clip, weight_bits)


def house_network(arch: str, side: int, count: int = 2, is_settled: bool = False) -> IntegerNetwork:
    """That of an architecture with random weights, for images of this side, calibrated on so many;
    of digits, where the side is 8. Its normalizations may have the statistics of these images.
    """
    torch.manual_seed(1)
    description = describe_dataset("digits" if side == 8 else "cifar10")
    description = replace(description, image_shape=(description.image_shape[0], side, side))
    classifier = get_architecture(arch, description, "normalize").eval()
    images = grey_images(count, description.image_shape)
    if is_settled:
        settle_batch_norms(classifier, images)
    return quantized(classifier, images)


def slow_logits(network: IntegerNetwork, images: torch.Tensor) -> np.ndarray:
    """The logits of the reference in NumPy, float32 [B, K], from what a checkpoint would hold."""
    record, tensors = network.stored()
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return slow_integers.logits(json.loads(json.dumps(record)), arrays, images.numpy())


def extreme_images(network: IntegerNetwork, count: int, seed: int = 0) -> torch.Tensor:
    """Random grey levels of the whole range; the last two images have the highest and the lowest
    alone.
    """
    images = grey_images(count, network.image_shape, network.clip, seed)
    images[-1], images[-2:-1] = -network.clip / 255, (255 + network.clip) / 255
    return images


@torch.inference_mode()
def is_reference(network: IntegerNetwork, images: torch.Tensor) -> bool:
    return np.array_equal(network(images).numpy(), slow_logits(network, images))


def convolution(seed: int, weight_shape: tuple[int, ...], **given) -> Convolution:
    """Random weights of 7 bits; most results lie within a few hundred. Multipliers of logits are
    powers of 2, by definition.
    """
    random, outputs = np.random.default_rng(seed), weight_shape[0]
    weight, bias = (
        random.integers(-64, 65, weight_shape),
        random.integers(-(2**14), 2**14, outputs),
    )
    multiplier = random.uniform(0.2, 1.5, outputs) / 64 / np.sqrt(weight[0].size)
    is_any = "high" in given and "shortcut" not in given and "powers" not in given
    given.pop("powers", None)
    multiplier = multiplier if is_any else 2.0 ** np.rint(np.log2(multiplier))
    arrays = {"weight": weight, "bias": bias, "multiplier": multiplier.astype(np.float32)}
    return Convolution(given, {name: torch.from_numpy(array) for name, array in arrays.items()})


def pair(low: int, high: int) -> st.SearchStrategy:
    return st.tuples(st.integers(low, high), st.integers(low, high))


needs_bytes = pytest.mark.skipif(
    not (
        getattr(torch.cpu, "_is_avx2_supported", bool)()
        and hasattr(torch.ops.onednn, "qconv2d_pointwise")
        and "binary" in torch.ops.onednn.qconv2d_pointwise.overloads()
    ),
    reason="needs PyTorch 2.5 and AVX2",
)
