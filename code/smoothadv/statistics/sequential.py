"""Sequential certification with bounds on p_A and on the strongest rival: as many draws as the
decision needs. Whom this follows is in ``adaptive``.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

import numpy as np
from scipy import special

from smoothadv.statistics import PROCEDURES
from smoothadv.statistics.bounds import quantile_loss
from smoothadv.statistics.error_spending import (
    efficacy_table,
    futility_probability,
    look_schedule,
    predictive_quantile,
    success_upper_bound,
)
from smoothadv.statistics.on_grid import GridProcedure
from smoothadv.statistics.ranges import trusting
from smoothadv.statistics.two_sided import RIVAL, SharedAlpha

STEPS = 50
"""Hypotheses per unit of Phi^-1(p): sums of two are radii sigma / 100 apart."""
_LOWEST = -2 * STEPS
"""The smallest p_A with a hypothesis is Phi(-2)."""
_EARLY, _GROWTH, _STEP = 0.9, 1.08, 10
_GAMMA, _FUTILITY = 1e-3, (9e4, 1.25, 0.2)
"""The selection's futility, and patience, power and tilt of ``futility_probability``. All are
chosen on released logs (benchmarks/stopping_limit.py) and decide how many draws are made, never
whether a statement is true."""


@PROCEDURES.register("sequential")
@dataclass(frozen=True)
class Sequential(SharedAlpha, GridProcedure):
    """Decide radii by lower bounds on p_A and upper bounds on the strongest rival; stop as soon as
    that is known.

    n0 votes select a class c. At each look, exact error-spending tables tell which hypotheses p_A
    <= Phi(z_i) and which hypotheses p_b >= Phi(-z_i) of the strongest rival are rejected, z_i = i /
    50 and i from -100 (1 for the rival). The first table spends alpha_share * alpha, the second one
    the rest. With z_A and z_B the largest that are rejected, the radius is sigma / 2 (z_A +
    max(z_A, z_B)) (Cohen et al., Theorem 1), and the result is the largest one of all looks. The
    radii to decide are hypotheses about p_A, too, and say when to stop: the procedure gives up
    where the next one is out of reach for the counts to be expected.

    The formal guarantee holds however early the procedure stops: a false statement needs one of two
    fixed rows to be rejected: one of the first table, with probability at most alpha_share * alpha,
    or one of the second, with at most the rest.
    """

    certificate: ClassVar[str] = "two-sided"
    default_n: ClassVar[int] = 150_000
    further_columns: ClassVar[tuple[str, ...]] = (RIVAL,)

    @property
    def tables(self) -> list[np.ndarray]:
        return [self.looks, *self._tables, np.array([_GAMMA, *_FUTILITY])]

    def certified(self, own: float, others: float, look: int) -> float:
        (lower, rival), (radii, steps) = self._tables, self._hypotheses
        row = int(lower[:, look].searchsorted(own, side="right")) - 1
        if row < 0:
            return -1.0
        step = int(steps[row])
        rival_step = int(rival[:, look].searchsorted(others, side="right"))
        if rival_step <= step:
            return float(radii[row])
        loss = trusting(quantile_loss)(
            step / STEPS, rival_step / STEPS, self.smoothing.noise_distance
        )
        # The margin of 1e-15 in each hypothesis exceeds the rounding of this radius.
        sigma = self.smoothing.sigma
        both = sigma * (step + rival_step) / (2 * STEPS) - sigma * loss
        return max(both, float(radii[row]))

    def is_futile(self, own: int, others: int, look: int, following: float) -> bool:
        n_max = self.smoothing.n
        if look < 0:
            bounds = success_upper_bound([own, others], self.smoothing.n0, _GAMMA)
            likely = [n_max * bound for bound in bounds.tolist()]
        else:
            drawn = int(self.looks[look])
            least = trusting(futility_probability)(drawn, n_max, self.null(following), *_FUTILITY)
            likely = [
                trusting(predictive_quantile)(count, drawn, n_max, least) for count in (own, others)
            ]
        return self.certified(likely[0], likely[1], -1) < following

    @cached_property
    def _hypotheses(self) -> tuple[np.ndarray, np.ndarray]:
        """The radius that the rejection of each hypothesis on p_A certifies alone, and the largest
        i with z_i <= its z.

        Radii, float64 [I], ascend and are below 0 for p_A < 1/2; the i are int64 [I].
        """
        sigma, top = self.smoothing.sigma, self._top(self.alpha_share)
        steps = {
            radius: min(top, int(Fraction(radius) / Fraction(sigma) * STEPS))
            for radius in self.radii
        }
        steps |= {sigma * step / STEPS: step for step in range(_LOWEST, top)}
        radii = sorted(steps)
        return np.array(radii), np.array([steps[radius] for radius in radii])

    def _top(self, share: float) -> int:
        """The number of steps up to a z that not even n successes in a row reject at this share of
        alpha.
        """
        z = -float(
            special.ndtri(-math.expm1(math.log(share * self.smoothing.alpha) / self.smoothing.n))
        )
        return max(1, math.ceil(z * STEPS) + 1)

    @cached_property
    def looks(self) -> np.ndarray:
        level = self.smoothing.alpha * self.alpha_share
        return look_schedule(
            [*map(self.null, self.radii)], self.smoothing.n, level, _EARLY, _GROWTH, _STEP
        )

    @cached_property
    def _tables(self) -> list[np.ndarray]:
        """The fewest votes that reject each hypothesis at each look: on p_A [I, L], on the
        strongest rival [J, L].
        """
        share, alpha = self.alpha_share, self.smoothing.alpha
        lattice = (self.smoothing.sigma * step / STEPS for step in range(1, self._top(1 - share)))
        return [
            efficacy_table([*map(self.null, radii)], self.looks, level, _EARLY)
            for radii, level in (
                (self._hypotheses[0], share * alpha),
                (lattice, (1 - share) * alpha),
            )
        ]
