"""Radii and their norm: the settings of every analysis that evaluates certified accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from smoothadv.analysis.shared.log_statistics import certified_accuracies, default_radii, high_probability_accuracies
from smoothadv.analysis.shared.logs import Log
from smoothadv.analysis.shared.selection import one_of
from smoothadv.analysis.shared.table_formats import Column
from smoothadv.bounds import linf_radius
from smoothadv.errors import UserError
from smoothadv.settings import SettingError, probability, setting

NORMS = ("l2", "linf")
_LINF_RADII = ("1/255", "2/255", "4/255", "8/255")


class Radius(float):
    """A radius that keeps its text, so that the heading of its column is 2/255 if the user wrote 2/255."""

    text: str

    def __new__(cls, text: str) -> Radius:
        numerator, slash, denominator = text.partition("/")
        try:
            radius = super().__new__(cls, float(numerator) / (float(denominator) if slash else 1.0))
        except (ValueError, ZeroDivisionError):
            radius = super().__new__(cls, math.nan)
        if not (math.isfinite(radius) and radius >= 0):
            raise SettingError(f"'{text}' is no radius: write a number like 0.25 or a fraction like 2/255")
        radius.text = text
        return radius


@dataclass(frozen=True)
class Norm:
    """The norm of the radii, and the probability with which the accuracies should hold."""

    norm: str = setting(
        "l2",
        parse=one_of(NORMS),
        help="norm of the radii, l2 or linf: an l2 radius r certifies r / sqrt(d) in d pixels (SmoothAdv, section 4.2)",
    )
    high_probability: float | None = setting(
        None,
        parse=probability,
        help="RHO: lower the accuracies so that they hold with probability 1 - RHO over the certification's draws "
        "(Cohen et al., appendix C, corrected)",
    )

    def per_l2(self, log: Log) -> float:
        """The radius in this norm that an l2 radius of 1 certifies; UserError if it depends on an unknown dimension."""
        if self.norm == "l2":
            return 1.0
        if log.parameters.dimension is None:
            raise UserError(
                f"{log.path} does not say how many coordinates its images have: --dimension states it, like 3072"
            )
        return linf_radius(1.0, log.parameters.dimension)

    def accuracies(self, log: Log, radii: Iterable[float], models: int = 1) -> np.ndarray:
        """Certified accuracies of a log at the radii; ``models`` is the number of logs from which it is selected."""
        lengths = self.l2_lengths(log, radii)
        if self.high_probability is None:
            return certified_accuracies(log.table, lengths)
        return high_probability_accuracies(log.table, lengths, log.parameters.alpha, self.high_probability, models)

    def l2_lengths(self, log: Log, radii: Iterable[float]) -> np.ndarray:
        """The l2 radii that certify the ``radii``: float64."""
        return np.array([float(radius) for radius in radii]) / self.per_l2(log)

    @property
    def heading(self) -> str:
        """What the radii are, for the heading of a column."""
        radius = "l2 radius" if self.norm == "l2" else "l_inf radius"
        if self.high_probability is None:
            return radius
        return f"{radius}, with probability {1 - Decimal(repr(self.high_probability)):f}"

    @property
    def axis_title(self) -> str:
        """What the radii are, for the title of an axis."""
        symbol = r"$\ell_2$" if self.norm == "l2" else r"$\ell_\infty$"
        return f"{symbol} radius (images in [0, 1]){self.heading.partition(' radius')[2]}"


@dataclass(frozen=True)
class AtRadii(Norm):
    """Radii to evaluate certified accuracy at."""

    radii: list[float] | None = setting(
        None,
        many=True,
        parse=Radius,
        help="radii of the columns, like 0.25 or 2/255 (default: 0.25, 0.5, ... as far as anything is certified; "
        "1/255 to 8/255 with --norm linf)",
    )

    def chosen_radii(self, logs: Sequence[Log]) -> list[float]:
        """The radii that the user named, or the default ones."""
        if self.radii:
            return self.radii
        if self.norm == "linf":
            return [Radius(text) for text in _LINF_RADII]
        return default_radii(log.table for log in logs)


def radius_text(radius: float) -> str:
    """A radius as it was written if that was a fraction, or with two decimals where they suffice."""
    text = getattr(radius, "text", None)
    if text and "/" in text:
        return text
    return f"{radius:.2f}" if round(radius, 2) == radius else radius_key(radius)


def radius_key(radius: float) -> str:
    """The shortest text that identifies a radius."""
    short = f"{float(radius):g}"
    return short if float(short) == radius or "/" in getattr(radius, "text", "") else repr(float(radius))


def radius_column(radius: float, compared: bool = True) -> Column:
    """The certified accuracy at a radius."""
    return Column(radius_key(radius), radius_text(radius), "percent", compared)
