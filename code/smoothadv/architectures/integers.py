"""What the package knows of networks of integers, which an annex defines."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smoothadv.base import registry
from smoothadv.base.errors import UserError
from smoothadv.base.files import digest


class NetworkOfIntegers(nn.Module, ABC):
    """Maps images [B, C, H, W] to logits [B, K]: one function on every machine, in every batch.

    ``probe`` is the digest of the logits of ``probe_images``.
    """

    probe: str

    @abstractmethod
    def probe_images(self) -> torch.Tensor:
        """A few images [B, C, H, W], float32, the same on every machine."""

    @abstractmethod
    def inexact_layer(self, images: torch.Tensor) -> int | None:
        """The number of a layer that computes something else here, in batches like ``images``."""

    @abstractmethod
    def fast_form(self, device: torch.device) -> nn.Module | None:
        """The same function for inference on the device, with ``inexact_layer``; None if there is
        none.
        """

    @abstractmethod
    def state_fields(self) -> dict[str, Any]:
        """The fields of a checkpoint that hold the network; UserError where one that was trained
        is no network of integers any more.
        """


def of_integers(name: str, checkpoint: Path) -> Any:
    """What an annex registers in ``base.registry.INTEGERS``; UserError, which names a checkpoint of
    integers, where it is missing.

    ``read`` makes the network in a record and tensors, for images of a shape and a number of
    classes; ``trained`` the one in a checkpoint as it is trained further.
    """
    registry.load_annexes()
    if name not in registry.INTEGERS:
        raise UserError(
            f"checkpoint {checkpoint} is of integers, and this installation of smoothadv has no "
            "part for them: install all of it"
        )
    return registry.INTEGERS[name].load()


def is_of_integers(classifier: nn.Module) -> bool:
    """Whether a part of the classifier is a network of integers."""
    return any(isinstance(part, NetworkOfIntegers) for part in classifier.modules())


def digest_of_logits(logits: torch.Tensor) -> str:
    """A SHA-256, in hexadecimal, of float32 logits."""
    return digest([logits.cpu().contiguous().numpy().astype("<f4")])
