"""The log of the command ``sets``: the scores of all classes of each image, from which thresholds
and sets follow for any alpha and radius. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.base.errors import UserError, warn
from smoothadv.base.settings import refuse_any
from smoothadv.records.logs import read_manifest_file
from smoothadv.records.readers import DataFrame, read_prediction_log
from smoothadv.sets.coverage import calibrates, images_needed, share_to_miss, threshold

_NEEDED = ("calibration", "seed", "alpha", "radii", "sigma", "num_classes")
_ROUNDED = 1e-6  # what the digits in the log may add to the sum, for each class


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
                np.abs(self.scores.sum(1) - 1) > _ROUNDED * self.scores.shape[1]
            ).any(),
            "a calibration that is that of its images": (self.table.calibration != roles).any(),
            # The norm was computed in float32.
            "attacks of test images alone, within epsilon": np.any(norm > most * (1 + 1e-5) + 1e-6),
        }
        refuse_any({f"{self.name} lacks {what}": is_so for what, is_so in faults.items()})

    @classmethod
    def read(cls, path: Path) -> "ScoreLog":
        """The log in a file; UserError unless it is one."""
        settings = read_manifest_file(path)["settings"]
        if lacking := [name for name in _NEEDED if name not in settings]:
            raise UserError(f"{path} is no log of sets: its manifest has no {lacking[0]}")
        return cls(str(path), settings, read_prediction_log(path))

    @property
    def scores(self) -> np.ndarray:
        """The scores of all classes, float64 [N, K]."""
        names = [f"score_{number}" for number in range(self.settings["num_classes"])]
        return self.table.reindex(columns=names).to_numpy(float)

    @property
    def epsilon(self) -> float:
        """The l2 norm of the attack on the images that are tested; 0 without one."""
        return (self.settings.get("attack") or {"epsilon": 0.0})["epsilon"]

    def threshold(self, radius: float, alpha: float | None = None) -> float:
        """The threshold for attacks within ``radius`` at the ``alpha`` of the log, or another; a
        warning where the sets are all classes.
        """
        share = share_to_miss(alpha or self.settings["alpha"], radius, self.settings["sigma"])
        kept = self.table.calibration == 1
        if kept.sum() < images_needed(share):
            warn(
                f"{self.name}: at radius {radius:g} the sets are all classes: at least "
                f"{images_needed(share):,} images must calibrate, and {kept.sum():,} do"
            )
        own = self.scores[np.arange(len(self.table)), self.table.label]
        return threshold(own[kept], share)

    def sets(self, radius: float, alpha: float | None = None) -> DataFrame:
        """A row for each image that is tested: idx, label, radius, threshold, set (a tuple of
        classes), size and covered.
        """
        least, tested = self.threshold(radius, alpha), self.table.calibration == 0
        found = [tuple(np.flatnonzero(row >= least).tolist()) for row in self.scores[tested]]
        rows = self.table.loc[tested, ["idx", "label"]].reset_index(drop=True)
        covered = [label in classes for label, classes in zip(rows.label, found)]
        sizes = [*map(len, found)]
        return rows.assign(radius=radius, threshold=least, set=found, size=sizes, covered=covered)
