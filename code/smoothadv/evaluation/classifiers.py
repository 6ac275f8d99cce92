"""The base classifier of a request, from a checkpoint or a module, and what a log's settings say of it."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smoothadv.checkpoints import classifier_from_checkpoint, file_digest, read_checkpoint, recorded_input_layer
from smoothadv.datasets.description import DatasetDescription
from smoothadv.errors import UserError, warn


@dataclass(frozen=True)
class BaseClassifier:
    """A base classifier: images [B, C, H, W] in [0, 1] in, logits [B, K] out, in eval mode on the CPU.

    ``settings`` tell in a log which function it is; ``name`` is the checkpoint's path (None: a module), ``dataset`` and
    ``noise_sd`` are what it was trained on and for, None where nothing tells.
    """

    module: torch.nn.Module
    settings: dict[str, Any]
    name: str | None = None
    dataset: str | None = None
    noise_sd: float | None = None

    def warn_about_mismatch(self, dataset: str, sigma: float) -> None:
        """Warn about a smoothing that is allowed but probably a slip."""
        if self.dataset is not None and self.dataset != dataset:
            warn(f"{self.name} was trained on '{self.dataset}', not on '{dataset}'")
        if self.noise_sd is not None and self.noise_sd != sigma:
            warn(f"{self.name} was trained with noise {self.noise_sd}; it is being smoothed with {sigma}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: its path and its content."""

    path: Path
    content: dict[str, Any]


def opened(source: Path | torch.nn.Module) -> Checkpoint | torch.nn.Module:
    """The content of a checkpoint; UserError where it cannot be read. A module is returned as it is."""
    return source if isinstance(source, torch.nn.Module) else Checkpoint(source, read_checkpoint(source))


def base_classifier(
    source: Checkpoint | torch.nn.Module, description: DatasetDescription, input_layer: str | None
) -> BaseClassifier:
    """The classifier in a checkpoint, or a copy of a module; UserError where it does not fit the images."""
    if isinstance(source, torch.nn.Module):
        return _from_module(source, description)
    content, path = source.content, source.path
    module = classifier_from_checkpoint(content, path, description, input_layer)
    settings = {
        "checkpoint_sha256": file_digest(path),
        "arch": content["arch"],
        "input_layer": recorded_input_layer(content, path, input_layer),
        "training": content.get("recipe"),
    }
    return BaseClassifier(module, settings, str(path), content.get("dataset"), content.get("noise_sd"))


def _from_module(module: torch.nn.Module, description: DatasetDescription) -> BaseClassifier:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    settings = {"module_sha256": module_digest(module), "arch": name, "input_layer": None, "training": None}
    classifier = copy.deepcopy(module).eval().cpu()
    return BaseClassifier(logits_of(classifier, description), settings)


def module_digest(module: torch.nn.Module) -> str:
    """A SHA-256, in hexadecimal, of a module's structure, weights and buffers."""
    digest = hashlib.sha256(repr(module).encode())
    for name, value in module.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class LogitsOf(torch.nn.Module):
    """A network that returns an object or a mapping with ``logits``, as a function that returns the logits."""

    def __init__(self, network: torch.nn.Module, is_mapping: bool) -> None:
        super().__init__()
        self.network, self.is_mapping = network, is_mapping

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output = self.network(images)
        return output["logits"] if self.is_mapping else output.logits


@torch.inference_mode()
def logits_of(network: torch.nn.Module, description: DatasetDescription) -> torch.nn.Module:
    """``network``, in eval mode, as a function from images to logits; UserError where it cannot be used as one.

    It is tried on a grey image of the shape in ``description``, whose number of classes it must have.
    """
    name, shape = type(network).__name__, description.image_shape
    weight = next((value for value in network.parameters() if value.is_floating_point()), torch.empty(0))
    image = torch.full((1, *shape), 0.5, device=weight.device)
    try:
        output = network(image)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{name} cannot be applied to images of shape {list(shape)}, float32 in [0, 1]: {reason}"
        ) from error
    if isinstance(output, torch.Tensor):
        function, logits = network, output
    elif hasattr(output, "logits"):
        function, logits = LogitsOf(network, is_mapping=False), output.logits
    elif isinstance(output, dict) and "logits" in output:
        function, logits = LogitsOf(network, is_mapping=True), output["logits"]
    else:
        raise UserError(
            f"{name} returns a {type(output).__name__}; it must return logits [B, K], or an object or dict with .logits"
        )
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) != 1:
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UserError(f"{name} returns {found} for one image; it must return logits [1, K]")
    if logits.shape[1] != description.num_classes:
        raise UserError(
            f"{name} has {logits.shape[1]} classes, the images of '{description.name}' have {description.num_classes}"
        )
    return function
