"""How often the boundaries of a sequential test are crossed."""

import numpy as np

from smoothadv.certification.error_spending import _convolved, _increments


def crossing_probability(p: float, looks: np.ndarray, boundaries: np.ndarray) -> float:
    """The probability that ``boundaries`` [K] are crossed at some of ``looks`` [K] where draws succeed with ``p``."""
    alive, start, crossed = np.ones(1), 0, 0.0
    for boundary, (low, more) in zip(boundaries, _increments(looks, p)):
        alive, start = _convolved(alive, more), start + low
        below = max(0, int(boundary) - start)
        crossed += float(alive[below:].sum())
        alive = alive[:below]
        if not len(alive):
            break
    return crossed
