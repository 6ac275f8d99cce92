"""Cohen et al.'s sampling loop, written as simply as possible: the reference for speed and
counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def gaussian(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fresh noise for a batch [B, C, H, W] from torch's global generator."""
    return lambda batch: torch.randn_like(batch) * sigma


@torch.no_grad()
def count_votes(
    classifier: torch.nn.Module,
    image: torch.Tensor,
    draws: int,
    batch_size: int,
    num_classes: int,
    noise: Callable[[torch.Tensor], torch.Tensor],
) -> np.ndarray:
    """How often each class wins among ``draws`` noisy copies of ``image`` [C, H, W]: int64
    [num_classes].
    """
    counts = np.zeros(num_classes, dtype=np.int64)
    while draws > 0:
        size = min(batch_size, draws)
        draws -= size
        batch = image.repeat((size, 1, 1, 1))
        for vote in classifier(batch + noise(batch)).argmax(1).cpu().numpy():
            counts[vote] += 1
    return counts
