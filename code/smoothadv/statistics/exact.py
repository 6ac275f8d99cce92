"""CERTIFY of Cohen et al. (2019), section 3.2.2: fixed sample sizes, Clopper-Pearson, the exact
binomial bound.
"""

from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from smoothadv.statistics import PROCEDURES, FixedSample
from smoothadv.statistics.bounds import certified_radius


@PROCEDURES.register("exact")
@dataclass(frozen=True)
class Exact(FixedSample):
    """Select a class by n0 votes, then bound its probability by n fresh votes.

    With c the most frequent of the n0 votes (the smallest class among ties) and k its count among
    the n, returns c with radius sigma * Phi^-1(p_lower(k, n, alpha)), or abstains where p_lower <
    1/2.

    Formal guarantee: that of ``Procedure``; docs/guarantee.md has the proof.
    """

    certificate: ClassVar[str] = "one-sided"

    @classmethod
    def least_draws(cls, alpha: float) -> int:
        return next(n for n in count(1) if certified_radius(n, n, 1.0, alpha) is not None)
