"""Certification procedures: from counts of noisy votes to a class and a radius. No torch.

A procedure sees the classifier only through a ``VoteCounter``; adding one is adding one file that
registers it in ``PROCEDURES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smoothadv.registry import Registry, discover

ABSTAIN = -1
"""The class that stands for "no statement" in results and logs."""

VoteCounter = Callable[..., np.ndarray]
"""counter(n_1, ..., n_s) -> int64 [s, K]: row i counts how often each of K classes won among n_i fresh
draws; all draws, in and between calls, are independent."""


@dataclass(frozen=True)
class Certificate:
    """What a procedure states about one input.

    ``prediction`` is a class in 0..K-1 or ABSTAIN; ``radius`` is an l2 radius on images in [0, 1], 0 if
    abstaining; ``successes`` of ``trials`` estimation draws voted for the selected class.
    """

    prediction: int
    radius: float
    successes: int
    trials: int


Procedure = Callable[..., Certificate]
PROCEDURES: Registry[Procedure] = Registry("certification procedure")

discover(__name__, __path__)
