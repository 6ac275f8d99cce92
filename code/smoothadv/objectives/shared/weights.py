"""The weight lambda of an objective's second term, for which papers have a value at each noise level."""

from collections.abc import Mapping
from typing import Any

from smoothadv.settings import non_negative_float, setting


def weight() -> Any:
    """The field ``regularization``: lambda, whose default ``resolve`` knows."""
    text = "lambda, the weight of the loss beside the cross-entropy (default: by --noise, see docs/objectives.md)"
    return setting(None, flag="--lambda", parse=non_negative_float, help=text)


def resolve(objective: Any, paper: Mapping[float, float]) -> None:
    """Give ``regularization`` the value of ``paper`` for the nearest noise level where it is None."""
    if objective.regularization is None:
        nearest = min(paper, key=lambda noise_sd: abs(noise_sd - objective.noise_sd))
        object.__setattr__(objective, "regularization", paper[nearest])
