"""Certification procedures: from counts of noisy votes to a class and a radius. No torch.

A procedure sees the classifier only through the votes it asks for, so that whoever supplies them may pack the draws of
several images into one batch. Adding one is adding one file that registers it in ``PROCEDURES``.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from smoothadv.bounds import check_alpha, check_sigma
from smoothadv.registry import Registry, discover

ABSTAIN = -1
"""The class that stands for "no statement" in results and logs."""


@dataclass(frozen=True)
class Draws:
    """A request for the votes of ``count`` >= 1 fresh draws; the answer is int64 [K], how often each class won.

    With a ``candidate``, counting ends with the first draw after which more than ``misses`` votes went to other
    classes: the answer then holds fewer than ``count`` votes.
    """

    count: int
    candidate: int | None = None
    misses: int | None = None


Voting = Generator[Draws, np.ndarray, "Certificate"]
"""A procedure at work on one input: it yields requests, is sent the votes and returns what it states."""


@dataclass(frozen=True)
class Certificate:
    """What a procedure states about one input.

    ``prediction`` is a class in 0..K-1 or ABSTAIN; ``radius`` is an l2 radius on images in [0, 1], 0 if
    abstaining; ``successes`` of ``trials`` estimation draws voted for the selected class. ``details`` holds the
    procedure's own columns of a log.
    """

    prediction: int
    radius: float
    successes: int
    trials: int
    details: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Smoothing:
    """What every procedure is given: the noise and the sample sizes.

    ``sigma`` > 0 is the noise's standard deviation, ``noise_distance`` its total variation distance from a Gaussian
    on one image (0: it is taken for one); ``n0`` draws select the class, ``n`` is the number, or the largest number,
    that estimates its probability; ``alpha`` is the probability of a false statement per input. ValueError on values
    that cannot be.
    """

    sigma: float
    n0: int
    n: int
    alpha: float
    noise_distance: float = 0.0

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        if self.n0 < 1 or self.n < 1:
            raise ValueError(f"n0 and n must be at least 1, got {self.n0} and {self.n}")
        check_alpha(self.alpha)
        if not 0 <= self.noise_distance <= 0.05:
            raise ValueError(f"noise_distance must lie in 0..0.05, got {self.noise_distance}")


class Procedure(Protocol):
    """The interface: a frozen dataclass of a ``Smoothing`` and its own settings, which become options of certify.

    ``default_n`` is --N where none is given; ``columns`` name what it adds to a log's row, ``settings`` is what beside
    its fields decides the numbers.
    """

    default_n: ClassVar[int]
    smoothing: Smoothing

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def settings(self) -> dict[str, str]: ...

    @property
    def largest_radius(self) -> float | None:
        """The radius of an input whose every draw is a success; None if not even that certifies."""

    def votes(self, label: int) -> Voting:
        """Certify one input, whose true class is ``label``: only a benchmark may look at that."""


PROCEDURES: Registry[type[Procedure]] = Registry("certification procedure")

discover(__name__, __path__)
