"""Networks of libraries for tests: tiny ones, without the internet."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from support.image_files import random_image, save_image

NAMES = ("China", "red flower", "cat")


def small_network(channels: int = 3, classes: int = 3, size: int = 8) -> nn.Module:
    """A convolution with batch normalization and a linear layer, with weights of a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = [nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(4 * size * size, classes)).eval()


def save_hf(folder: Path, seed: int = 5, names: Sequence[str] = NAMES, **processor: object) -> Path:
    """A ResNet with these classes, saved by transformers; with a preprocessor_config.json if one is
    given.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config = transformers.ResNetConfig(**sizes, layer_type="basic", id2label=dict(enumerate(names)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.ResNetForImageClassification(config).save_pretrained(folder)
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def save_onnx(path: Path, network: nn.Module, images: torch.Tensor, fixed: bool = False) -> Path:
    """The network as an ONNX file, for batches of any size or, if ``fixed``, of the size of
    ``images``.
    """
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the newer exporter needs a further package
        axes = None if fixed else {"images": {0: "batch"}}
        torch.onnx.export(
            network, images, str(path), input_names=["images"], dynamic_axes=axes, dynamo=False
        )
    return path


def save_folder(root: Path, *classes: str, size: int = 8) -> Path:
    """An image folder with two test images of each class, and as many to train on."""
    for number, name in enumerate(classes):
        for index in range(2):
            for split in ("train", "test"):
                save_image(
                    root / split / name / f"{index}.png",
                    random_image(10 * number + index, size, size),
                )
    return root
