"""Top-k certificates: within which radius a class stays among the k most probable (Jia et al., ICLR
2020).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smoothadv.base.settings import SettingError, positive_int, setting
from smoothadv.statistics import COUNT_COLUMNS, PROCEDURES
from smoothadv.statistics.bounds import top_k_radius
from smoothadv.statistics.ranges import within_ranges
from smoothadv.statistics.two_sided import TwoSided, check_share

RIVALS = "rival_"
"""The columns rival_1, rival_2, ... of a log: the largest counts of other classes among the
estimation draws.
"""
_LARGEST = 100_000


@PROCEDURES.register("top-k")
@dataclass(frozen=True)
class TopK(TwoSided):
    """Bound the probability of one class, and those of its k strongest rivals, by n votes.

    The class c is the label, if it is among the k most frequent of the n0 votes, else the most
    frequent one; so the share of images whose label is certified is the certified top-k accuracy.
    The largest counts of k other classes, ``rival_1`` to ``rival_k``, and that of c give
    ``bounds.top_k_radius``, or an abstention.

    Formal guarantee: the probability, over the draws, of returning a class and a radius such that
    an image of the closed ball of that radius has k other classes that are, under noise, at least
    as probable as this one, is at most alpha: neither the label nor the n0 votes depend on the n
    draws. Void as for every ``Procedure``.
    """

    certificate: ClassVar[str] = "top-"
    top_k: int = setting(
        3, help="k: certify that a class stays among the k most probable", parse=positive_int
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _rival_columns(self.top_k)  # raises on an impossible k
        check_share(self.alpha_share, self.smoothing.alpha, self.top_k)

    @classmethod
    def counts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        return (*COUNT_COLUMNS, *_rival_columns(settings["top_k"]))

    @classmethod
    def radius_from(cls, counts: Mapping[str, int], settings: Mapping[str, Any]) -> float | None:
        rivals = [counts[name] for name in _rival_columns(settings["top_k"])]
        levels = settings["alpha"], settings["alpha_share"], settings.get("noise_distance", 0.0)
        return top_k_radius(
            counts["successes"], rivals, counts["trials"], settings["sigma"], *levels
        )

    def candidate(self, selection: np.ndarray, label: int) -> int:
        check_top_k(self.top_k, len(selection))
        leading = leading_classes(selection, self.top_k)
        return label if label in leading else leading[0]

    def rivals(self, votes: np.ndarray, candidate: int) -> list[int]:
        return np.sort(np.delete(votes, candidate))[::-1][: self.top_k].tolist()


@within_ranges
def check_top_k(top_k: int, classes: int) -> None:
    """SettingError unless there are more classes: every class is among all."""
    if top_k >= classes:
        raise SettingError(f"top_k: found {top_k}, expected less than the {classes} classes")


@within_ranges
def leading_classes(votes: np.ndarray, k: int) -> list[int]:
    """The ``k`` classes with the most ``votes`` [K], in this order; the smaller class goes first
    among ties.
    """
    return np.argsort(-votes, kind="stable")[:k].tolist()


def _rival_columns(k: int) -> tuple[str, ...]:
    if type(k) is not int or not 1 <= k <= _LARGEST:
        raise SettingError(f"top_k: found {k!r}, expected a whole number from 1 to {_LARGEST:,}")
    return tuple(f"{RIVALS}{number}" for number in range(1, k + 1))
