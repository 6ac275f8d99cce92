"""How often the boundaries of a sequential test are crossed: by plain sums over all counts."""

import numpy as np
from scipy import signal, stats


def crossing_probability(p: float, looks: np.ndarray, boundaries: np.ndarray) -> float:
    """The probability that ``boundaries`` [K] are crossed at some of ``looks`` [K] where draws
    succeed with ``p``.

    Right but for 1e-14 per look, the rounding of a convolution.
    """
    alive, crossed = np.ones(1), 0.0
    for boundary, draws in zip(boundaries, np.diff(looks, prepend=0)):
        alive = signal.convolve(alive, stats.binom.pmf(np.arange(draws + 1), draws, p))
        crossed += float(alive[boundary:].sum())
        alive = alive[:boundary]
    return crossed
