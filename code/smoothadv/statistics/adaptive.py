"""Sequential certification on a grid of radii: as many draws as the decision needs, at the same
level alpha.

Sampling until fixed radii are decided is after Horvath et al. (ICLR 2022), a number of draws that
depends on the input after Chen et al. (AAAI 2022), bounds that hold at every look after Voracek
(NeurIPS 2024); the tables are those of ``error_spending``.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from smoothadv.base.settings import setting
from smoothadv.statistics import PROCEDURES
from smoothadv.statistics.error_spending import (
    efficacy_table,
    futility_table,
    look_schedule,
    success_upper_bound,
)
from smoothadv.statistics.on_grid import GridProcedure

LADDER = 100
"""Steps of the fine grid per sigma."""
_EARLY, _GAMMA = 0.5, 0.01


@PROCEDURES.register("adaptive")
@dataclass(frozen=True)
class Adaptive(GridProcedure):
    """Decide, for a grid of radii, which of them are certified; stop as soon as that is known or
    out of reach.

    n0 votes select a class c. The draws for c are then counted at the looks of an exact
    error-spending table with a row for each radius r_j, whose null hypothesis is p_A <= Phi(r_j /
    sigma). The radius returned is the largest whose row was crossed; the procedure gives up where
    the next row is out of reach.

    The formal guarantee holds however early the procedure stops: a false statement needs the row of
    one fixed radius to be crossed, the smallest r_j with Phi(r_j / sigma) >= p_A.
    """

    certificate: ClassVar[str] = "one-sided"
    ladder: bool = setting(
        False,
        help="also test a fine grid of radii, sigma/100 apart, with the same draws: finer radii in "
        "the log",
    )

    @cached_property
    def looks(self) -> np.ndarray:
        return look_schedule(
            [*map(self.null, self.radii)], self.smoothing.n, self.smoothing.alpha, _EARLY
        )

    def successes(self, own: int, others: int) -> int:
        """The one of both counts whose probability the hypotheses are about."""
        return own

    def certified(self, own: int, others: int, look: int) -> float:
        row = int((self.successes(own, others) >= self._efficacy[:, look]).sum()) - 1
        return float(self._grid[row]) if row >= 0 else -1.0

    def is_futile(self, own: int, others: int, look: int, following: float) -> bool:
        row = int(np.searchsorted(self._grid, following))
        successes = self.successes(own, others)
        last = int(self._efficacy[row, -1])
        n = self.smoothing.n
        if look < 0:
            return bool(n * success_upper_bound(successes, self.smoothing.n0, _GAMMA) < last)
        return last > n or successes <= self._futility[row, look]

    @property
    def tables(self) -> list[np.ndarray]:
        return [self.looks, self._efficacy, self._futility]

    @cached_property
    def _grid(self) -> np.ndarray:
        """All radii with a row, ascending, as float64."""
        radii = set(self.radii)
        if self.ladder:
            sigma, per_success = self.smoothing.sigma, -math.log(self.smoothing.alpha)
            # n_max successes in a row reject no p beyond alpha^(1 / n_max).
            top = math.sqrt(2 * math.log(max(2.0, self.smoothing.n / per_success))) + 1
            radii |= {sigma * step / LADDER for step in range(math.ceil(top * LADDER))}
        return np.array(sorted(radii))

    @cached_property
    def _efficacy(self) -> np.ndarray:
        """The fewest votes that reject each hypothesis at each look: int64 [J, L]; rows are those
        of ``_grid``.
        """
        nulls = [*map(self.null, self._grid)]
        return efficacy_table(nulls, self.looks, self.smoothing.alpha, _EARLY)

    @cached_property
    def _futility(self) -> np.ndarray:
        return futility_table(self._efficacy[:, -1], self.looks, _GAMMA)
