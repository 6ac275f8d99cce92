"""Radii and their norm: the settings of every analysis that evaluates certified accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import cast

import numpy as np

from smoothadv.analysis.facts import DIMENSIONS
from smoothadv.analysis.logs import Log
from smoothadv.analysis.table_formats import Annotated, Cell, Column
from smoothadv.base.errors import UserError
from smoothadv.base.settings import (
    Checked,
    SettingError,
    one_of,
    probability,
    refuse_any,
    setting,
)
from smoothadv.statistics.accuracy import BANDS, accuracy, certified_accuracies, default_radii
from smoothadv.statistics.bounds import certified_accuracy_deduction, l2_radius_for, linf_radius

# So many that all radii at sigma = 1 and n = 100,000 have them: the steps of the paper's Table 2.
# Table 1 has halves.
MOST_RADII = 15
_MOST_ROUND_NUMBERS = 1500
_LINF_RADII = ("1/255", "2/255", "4/255", "8/255")


def round_numbers(largest: float) -> np.ndarray:
    """0 and the multiples of a power of ten up to ``largest``, of them at most 1,500, at least 150
    unless it is 0.
    """
    per_unit = 10.0 ** -math.ceil(math.log10((largest or 1.0) / _MOST_ROUND_NUMBERS))
    return np.arange(math.floor(largest * per_unit) + 1) / per_unit


class Radius(Fraction):
    """A radius, as the exact number, and how it was written if that was a ``fraction``."""

    fraction = ""

    @classmethod
    def parse(cls, text: str) -> Radius:
        numerator, slash, denominator = text.partition("/")
        try:
            # By way of floats, because the exact value of a text like 1e-999999999 would fill the
            # memory.
            parts = float(numerator), float(denominator if slash else 1)
            radius = cls(Fraction(repr(parts[0])) / Fraction(repr(parts[1])))
            if text.isascii() and float(radius) >= 0:
                radius.fraction = text if slash else ""
                return radius
        except (ValueError, ArithmeticError):
            pass
        raise SettingError(
            f"'{text}' is no radius: write a number like 0.25 or a fraction like 2/255"
        )

    @property
    def key(self) -> str:
        """The shortest text that identifies it."""
        short = f"{float(self):g}"
        return short if float(short) == float(self) or self.fraction else repr(float(self))

    @property
    def text(self) -> str:
        """As it was written if that was a fraction, or with two decimals where they suffice."""
        if self.fraction:
            return self.fraction
        return f"{float(self):.2f}" if round(float(self), 2) == float(self) else self.key

    def column(self, compared: bool = True, ends: Sequence[str] = ()) -> Column:
        """The certified accuracy at this radius, with what is added to its key at the ends of
        intervals.
        """
        keys = tuple(self.key + end for end in ends)
        return Column(self.key, self.text, "percent", compared, keys)


@dataclass(frozen=True)
class ErrorProbability:
    """The RHO of --high-probability, and whether the deduction is the ``exact`` quantile."""

    rho: float
    exact: bool = False

    @classmethod
    def parse(cls, text: str) -> ErrorProbability:
        return cls(probability(text.removeprefix("exact:")), text.startswith("exact:"))


@dataclass(frozen=True)
class Norm(Checked):
    """The norm of the radii, and the probability with which the accuracies should hold."""

    norm: str = setting(
        "l2",
        parse=one_of(("l2", "linf")),
        help="norm of the radii, l2 or linf: an l2 radius r certifies r / sqrt(d) in d pixels "
        "(SmoothAdv, section 4.1)",
    )
    high_probability: ErrorProbability | None = setting(
        None,
        parse=ErrorProbability.parse,
        help="RHO: lower the accuracies so that they hold with probability 1 - RHO over the "
        "certification's draws (Cohen et al., appendix C, corrected); exact:RHO: by the binomial "
        "quantile in place of Bernstein's inequality",
    )

    def certified_by(self, log: Log, lengths: Iterable[float]) -> np.ndarray:
        """The radii in this norm that l2 radii, ``lengths``, certify, rounded down: float64."""
        if self.norm == "l2":
            return np.array([*lengths], dtype=float)
        return np.array([linf_radius(float(length), _dimension(log)) for length in lengths])

    def accuracies(self, log: Log, radii: Iterable[Radius | float], models: int = 1) -> np.ndarray:
        """Certified accuracies of a log at the radii; ``models`` is the number of logs from which
        it is selected.

        With ``high_probability`` less ``bounds.certified_accuracy_deduction``, but at least 0.
        Where the log is the best of ``models``, rho is divided by their number (union bound): a
        selection is allowed.
        """
        accuracies = certified_accuracies(log.table, self.l2_lengths(log, radii))
        if self.high_probability is None:
            return accuracies
        error = self.high_probability
        deduction = certified_accuracy_deduction(
            len(log.table), log.facts.alpha, error.rho / models, error.exact
        )
        return np.maximum(accuracies - deduction, 0.0)

    def l2_lengths(self, log: Log, radii: Iterable[Radius | float]) -> np.ndarray:
        """The l2 radii that certify the ``radii``, rounded up: float64."""
        if self.norm == "l2":
            return np.array([float(radius) for radius in radii])
        dimension = _dimension(log)
        return np.array([l2_radius_for(Fraction(radius), dimension) for radius in radii])

    @property
    def heading(self) -> str:
        """What the radii are, for the heading of a column."""
        radius = "l2 radius" if self.norm == "l2" else "l_inf radius"
        if self.high_probability is None:
            return radius
        bound = " (exact binomial)" if self.high_probability.exact else ""
        certainty = 1 - Decimal(repr(self.high_probability.rho))
        return f"{radius}, with probability {certainty:f}{bound}"

    @property
    def norm_symbol(self) -> str:
        """The norm as mathematics."""
        return r"$\ell_2$" if self.norm == "l2" else r"$\ell_\infty$"

    @property
    def axis_title(self) -> str:
        """What the radii are, for the title of an axis."""
        return f"{self.norm_symbol} radius (images in [0, 1]){self.heading.partition(' radius')[2]}"


@dataclass(frozen=True)
class AtRadii(Norm):
    """Radii to evaluate certified accuracy at."""

    radii: Sequence[Radius] | None = setting(
        None,
        parse=Radius.parse,
        help="radii of the columns, like 0.25 or 2/255 (default: 0.25, 0.5, ... as far as anything "
        "is certified, in larger steps where there are too many; 1/255 to 8/255 with --norm linf)",
    )

    def chosen_radii(self, logs: Sequence[Log], most: int = MOST_RADII) -> list[Radius]:
        """The radii that the user named, each once, or the default ones: at ``most`` so many on
        images like those of CIFAR-10, fewer on others.
        """
        if self.radii:
            return [*dict.fromkeys(self.radii)]
        if self.norm == "linf":
            return [*map(Radius.parse, _LINF_RADII)]
        datasets = {log.facts.get("dataset") for log in logs}
        is_small = datasets <= DIMENSIONS.keys() - {"imagenet", "digits"}
        limit = {"most": most} if is_small else {}
        return [*map(Radius, default_radii([log.table for log in logs], **limit))]

    def chosen_radii_from_0(self, logs: Sequence[Log]) -> list[Radius]:
        """As ``chosen_radii``, with 0, of clean accuracy, before the default ones."""
        return [*([] if self.radii else [Radius(0)]), *self.chosen_radii(logs)]

    def select(
        self, group: Sequence[Log], radii: Sequence[Radius | float]
    ) -> list[tuple[Log, float]]:
        """The log with the largest accuracy at each radius, and this accuracy; of equally good
        logs, that of larger clean accuracy, or the first.

        The logs are selected on the images that measure their accuracy: an envelope is optimistic,
        the more so the more logs it is selected from (SmoothAdv, section 4).
        """
        accuracies = np.array([self.accuracies(log, radii, models=len(group)) for log in group])
        clean = np.array([accuracy(log.table) for log in group])
        are_best = accuracies == accuracies.max(axis=0)
        winners = np.where(are_best, clean[:, None], -1.0).argmax(axis=0)
        return [(group[k], float(column[k])) for k, column in zip(winners, accuracies.T)]


@dataclass(frozen=True)
class Bands(Checked):
    """Bands that cover the choice of the images, a sample of a population; not the alpha of their
    certificates.
    """

    confidence: float | None = setting(
        None,
        parse=probability,
        help="LEVEL of bands over the choice of the images, like 0.95 (default: no bands)",
    )
    bands: str = setting(
        "exact",
        parse=one_of(BANDS),
        help="exact (Clopper and Pearson) or bootstrap (no width at 0 and 100 %): for one radius "
        "at a time; dkw: for all radii at once (Dvoretzky, Kiefer and Wolfowitz, with Massart's "
        "constant); clopper-pearson: exact, for all of --radii at once (union bound)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        has_no_band = self.confidence is None
        is_lowered = getattr(self, "high_probability", None) is not None
        refuse_any(
            {
                "--confidence and --high-probability are of different kinds of chance: give one of "
                "them": is_lowered and not has_no_band,
                f"--bands {self.bands} needs --confidence LEVEL, like 0.95": (
                    has_no_band and self.bands != "exact"
                ),
                "--bands clopper-pearson needs --radii, chosen in advance; dkw is for all radii": (
                    self.bands == "clopper-pearson" and not getattr(self, "radii", None)
                ),
            },
            SettingError,
        )

    def ends(self, shares: np.ndarray, examples: int) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the bands around shares of ``examples``, each of their shape."""
        return BANDS[self.bands](shares, examples, cast(float, self.confidence))

    def cells(self, log: Log, shares: np.ndarray) -> list[Cell]:
        """Shares of the log's examples, each with its band if there are bands."""
        if self.confidence is None:
            return shares.tolist()
        bands = np.transpose([shares, *self.ends(shares, len(log.table))]).tolist()
        return [Annotated(share, interval=(low, high)) for share, low, high in bands]


def _dimension(log: Log) -> int:
    """The number of coordinates of an image; UserError if it is unknown."""
    if log.facts.dimension is None:
        raise UserError(
            f"{log.path} does not say how many coordinates its images have: --dimension states it, "
            "like 3072"
        )
    return log.facts.dimension
