"""A frozen teacher: a trained classifier whose logits, or whose votes on the training images, an objective uses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from smoothadv.checkpoints import file_digest, load_classifier
from smoothadv.datasets.images import ImageDataset
from smoothadv.files import cached
from smoothadv.noise import GaussianNoise
from smoothadv.training.processes import Processes
from smoothadv.training.votes import count_votes


@dataclass(frozen=True)
class Teacher:
    """``network`` maps images [B, C, H, W] to logits [B, K]; ``shares`` float32 [N, K] are its shares of the votes on
    noisy copies of the N training images, if an objective asks for them.
    """

    network: nn.Module
    shares: torch.Tensor | None

    def supplies(self, indices: torch.Tensor | None) -> dict[str, Any]:
        """The fields of a ``Batch`` of the training images ``indices`` int64 [B]."""
        targets = {} if self.shares is None or indices is None else {"targets": self.shares[indices]}
        return {"teacher": self._logits, **targets}

    @torch.no_grad()
    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)


def load_teacher(
    path: Path,
    images: ImageDataset,
    noise_sd: float,
    draws: int,
    device: torch.device,
    batch: int,
    processes: Processes,
) -> Teacher:
    """The teacher in the checkpoint ``path``, in eval mode on the device.

    With ``draws`` > 0 so many noisy copies of each training image vote. Their shares are kept in the user's cache,
    which may hold them already: they are a function of the checkpoint, the images, ``noise_sd`` and ``draws``.
    """
    network = load_classifier(path, images.description).to(device).to(memory_format=torch.channels_last)
    network = network.requires_grad_(False)
    if not draws:
        return Teacher(network, None)
    key = "\n".join([file_digest(path), images.fingerprint(), repr(float(noise_sd)), str(draws)])
    digest = hashlib.sha256(key.encode()).hexdigest()
    noise = GaussianNoise(noise_sd, int(digest[:16], 16))
    everything, alone = np.arange(len(images)), Processes()

    def compute() -> bytes:
        votes = count_votes(network, images, everything, draws, noise, device, batch, alone, "the teacher votes")
        return votes.astype("<u4").tobytes()

    payload = b""
    with processes.first_goes_first():
        if processes.is_first:
            payload = cached(f"teacher_votes/{digest}", compute)
    votes = np.frombuffer(processes.received(payload), "<u4").reshape(len(images), -1)
    return Teacher(network, torch.from_numpy(votes / np.float32(draws)).float().to(device))
