"""A frozen teacher: a trained classifier whose logits, or whose votes on the training images, an objective uses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from smoothadv.checkpoints import file_digest, load_classifier
from smoothadv.datasets.description import DatasetDescription
from smoothadv.datasets.images import ImageDataset
from smoothadv.ensembles import members_of
from smoothadv.errors import UserError
from smoothadv.files import cached
from smoothadv.noise import GaussianNoise
from smoothadv.training.processes import Processes
from smoothadv.training.votes import count_votes


@dataclass(frozen=True)
class Teacher:
    """``network`` maps images [B, C, H, W] to logits [B, K]; ``shares`` float32 [N, K] are its shares of the votes on
    noisy copies of the N training images, if an objective asks for them. ``sha256`` is that of its checkpoint.
    """

    network: nn.Module
    shares: torch.Tensor | None = None
    sha256: str = ""

    def supplies(self, indices: torch.Tensor | None) -> dict[str, Any]:
        """The fields of a ``Batch`` of the training images ``indices`` int64 [B]."""
        targets = {} if self.shares is None or indices is None else {"targets": self.shares[indices]}
        return {"teacher": self.network, **targets}

    def voting(
        self, images: ImageDataset, noise_sd: float, draws: int, device: torch.device, batch: int, processes: Processes
    ) -> Teacher:
        """The teacher with its votes on ``draws`` noisy copies of each training image, in passes of ``batch`` copies.

        They are kept in the user's cache, which may hold them already: up to rounding, they are a function of the
        checkpoint, the images, ``noise_sd`` and ``draws``.
        """
        key = "\n".join([self.sha256, images.fingerprint(), repr(float(noise_sd)), str(draws)])
        digest = hashlib.sha256(key.encode()).hexdigest()
        noise = GaussianNoise(noise_sd, int(digest[:16], 16))

        def compute() -> bytes:
            everything, alone = np.arange(len(images)), Processes()
            doing = "the teacher votes"
            votes = count_votes(self.network, images, everything, draws, noise, device, batch, alone, doing)
            return votes.astype("<u4").tobytes()

        payload = b""
        with processes.first_goes_first():
            if processes.is_first:
                payload = cached(f"teacher_votes/{digest}", compute)
        votes = np.frombuffer(processes.received(payload), "<u4").reshape(len(images), -1)
        return replace(self, shares=torch.from_numpy(votes / np.float32(draws)).float().to(device))


def load_teacher(
    path: Path, description: DatasetDescription, device: torch.device, input_layer: str | None = None
) -> Teacher:
    """The teacher in the checkpoint ``path``, in eval mode on the device; UserError if it is of other images."""
    if members_of(path).mean is not None:
        raise UserError(f"the teacher {path} is an ensemble: name one checkpoint")
    network = load_classifier(path, description, input_layer).to(device).to(memory_format=torch.channels_last)
    return Teacher(network.requires_grad_(False), sha256=file_digest(path))
