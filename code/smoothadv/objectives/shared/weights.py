"""Settings for which papers have a value at each noise level, like the weight lambda of a second
term.
"""

from collections.abc import Mapping
from typing import Any

from smoothadv.base.settings import non_negative_float, setting


def weight() -> Any:
    """The field ``regularization``: lambda, whose default ``resolve`` knows."""
    text = (
        "lambda, the weight of the loss beside the cross-entropy (default: by --noise, see "
        "docs/objectives.md)"
    )
    return setting(None, flag="--lambda", parse=non_negative_float, help=text)


def nearest(values: Mapping[float, Any], noise_sd: float) -> Any:
    """The value for the noise level that is nearest to ``noise_sd``."""
    return values[min(values, key=lambda level: abs(level - noise_sd))]


def resolve(objective: Any, **papers: Mapping[float, Any]) -> None:
    """Give each of the fields that is None the paper's value for the nearest noise level."""
    for field, values in papers.items():
        if getattr(objective, field) is None:
            object.__setattr__(objective, field, nearest(values, objective.noise_sd))
