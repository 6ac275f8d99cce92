"""The log of the command ``sets``: the scores of all classes of each image, from which thresholds
and sets follow for any alpha and radius. No torch.

A score is a probability by one draw, or of N draws the number in which the probability is at least
that of the setting at_least.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.base.errors import UserError, warn
from smoothadv.base.settings import refuse_any
from smoothadv.records.logs import SELECTION, images_of, read_manifest_file
from smoothadv.records.readers import DataFrame, read_prediction_log
from smoothadv.sets.coverage import (
    COUNTING,
    calibrates,
    draws_under_attack,
    images_needed,
    share_to_miss,
    threshold,
)

_NEEDED = ("calibration", "seed", "alpha", "radii", "sigma", "num_classes", "noise", "N")
_ROUNDED = 1e-6  # what the digits in the log may add to the sum
_MOST_IMAGES = 10**9
_MOST_DRAWS = 4 * 10**9  # as --N


@dataclass(frozen=True)
class ScoreLog:
    """The rows of a log, a ``table``, under the ``settings`` of its manifest; UserError where one
    cannot be, or no image calibrates or is tested.
    """

    name: str
    settings: Mapping[str, Any]
    table: DataFrame

    def __post_init__(self) -> None:
        share, seed = self.settings["calibration"], self.settings["seed"]
        roles = [calibrates(index, share, seed) for index in self.table.idx]
        norm, most = self.table.get("attack_norm", 0), self.epsilon * (self.table.calibration == 0)
        faults = {
            "images that calibrate and images to test: give more images": len({*roles}) < 2,
            "labels and predictions that are classes": (
                self.table[["label", "predict"]].to_numpy().max() >= self.settings["num_classes"]
            ),
            "scores of its classes": not (self.scores >= 0).all(),
            "probabilities, whose sum is 1": (
                self.counted is None and (np.abs(self.scores.sum(1) - 1) > _ROUNDED).any()
            ),
            "counts of its draws": self.counted is not None
            and ((self.scores % 1 > 0) | (self.scores > self.counted)).any(),
            "a calibration that is that of its images": (self.table.calibration != roles).any(),
            # The norm was computed in float32.
            "attacks of test images alone, within epsilon": np.any(norm > most * (1 + 1e-5) + 1e-6),
        }
        refuse_any({f"{self.name} lacks {what}": is_so for what, is_so in faults.items()})

    @classmethod
    def read(cls, path: Path) -> "ScoreLog":
        """The log in a file; UserError unless it is one."""
        manifest = read_manifest_file(path)
        settings, run = manifest["settings"], (manifest["runs"] or [{}])[-1]
        if lacking := [name for name in _NEEDED if name not in settings]:
            raise UserError(f"{path} is no log of sets: its manifest has no {lacking[0]}")
        attack, others = settings.get("attack"), {"sigmas", "sound", "threshold"}
        epsilon = attack.get("epsilon") if isinstance(attack, dict) else attack
        is_counted = "at_least" in settings
        faults = {
            "other noise, or another number of draws, than sets have": (
                settings["noise"] != "GaussianNoise"
                or not (1 < settings["N"] <= _MOST_DRAWS if is_counted else settings["N"] == 1)
                or not others.isdisjoint(settings)
            ),
            "no radii": not settings["radii"],
            "an attack without an epsilon": attack is not None and not isinstance(epsilon, float),
        }
        refuse_any({f"{path}: its manifest has {fault}": is_so for fault, is_so in faults.items()})
        table = read_prediction_log(path)
        if {*SELECTION} <= run.keys() and len(table) < (most := len(images_of(settings, run))):
            warn(f"{path}: {len(table):,} of {most:,} images, unfinished: other images may differ")
        return cls(str(path), settings, table)

    @property
    def scores(self) -> np.ndarray:
        """The scores of all classes, float64 [N, K]."""
        names = [f"score_{number}" for number in range(self.settings["num_classes"])]
        return self.table.reindex(columns=names).to_numpy(float)

    @property
    def counted(self) -> int | None:
        """The draws of which the scores count some; None where they are probabilities."""
        return self.settings["N"] if "at_least" in self.settings else None

    @property
    def epsilon(self) -> float:
        """The l2 norm of the attack on the images that are tested; 0 without one."""
        return (self.settings.get("attack") or {"epsilon": 0.0})["epsilon"]

    def threshold(self, radius: float, alpha: float | None = None) -> float:
        """The threshold for attacks within ``radius`` at the ``alpha`` of the log, or another; a
        warning where the sets are all classes.
        """
        # The decimals as they were written.
        wanted = Fraction(str(self.settings["alpha"] if alpha is None else alpha))
        sigma, kept = self.settings["sigma"], self.table.calibration == 1
        counts = self.counted is not None and radius > 0
        share = wanted * (1 - 2 * COUNTING) if counts else share_to_miss(wanted, radius, sigma)
        own = self.scores[np.arange(len(self.table)), self.table.label]
        least, needed = threshold(own[kept], share), images_needed(share)
        if counts and least > 0:
            part = float(wanted * COUNTING)
            least = draws_under_attack(int(least), self.settings["N"], radius, sigma, part)
        if least <= 0:
            reason = f"at least {needed:,} images must calibrate, and {kept.sum():,} do"
            if needed > _MOST_IMAGES and not counts:
                reason = "take a smaller radius or a larger sigma, no number of images suffices"
            if least == 0:
                reason = "the scores of too many labels are 0"
            if least == 0 and counts:
                reason = "take more passes (--N), another --at-least or a smaller radius"
            warn(f"{self.name}: at radius {radius:g} the sets are all classes: {reason}")
        return least

    def sets(self, radius: float, alpha: float | None = None) -> DataFrame:
        """A row for each image that is tested: idx, label, radius, threshold, set (a tuple of
        classes), size and covered.
        """
        least, tested = self.threshold(radius, alpha), self.table.calibration == 0
        rows = self.table.loc[tested, ["idx", "label"]].reset_index(drop=True)
        reached = self.scores[tested] >= least
        return rows.assign(
            radius=radius,
            threshold=least,
            set=[tuple(np.flatnonzero(row).tolist()) for row in reached],
            size=reached.sum(1),
            covered=reached[rows.index, rows.label],
        )
