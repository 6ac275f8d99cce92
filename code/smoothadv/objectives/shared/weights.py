"""The weight lambda of an objective's second term, for which papers have a value at each noise level."""

from collections.abc import Mapping
from typing import Any

from smoothadv.settings import non_negative_float, setting


def weight(paper: Mapping[float, float]) -> Any:
    """The field ``regularization``: lambda, whose default is that of ``paper`` for the nearest noise level."""
    values = ", ".join(f"{value:g} at {noise_sd:g}" for noise_sd, value in paper.items())
    text = f"lambda, the weight of the loss beside the cross-entropy (default: the paper's, by --noise: {values})"
    return setting(None, flag="--lambda", parse=non_negative_float, help=text)


def resolve(objective: Any, paper: Mapping[float, float]) -> None:
    """Give ``regularization`` its default where it is None."""
    if objective.regularization is None:
        nearest = min(paper, key=lambda noise_sd: abs(noise_sd - objective.noise_sd))
        object.__setattr__(objective, "regularization", paper[nearest])
