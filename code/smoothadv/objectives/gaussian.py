"""Gaussian data augmentation (Cohen et al., 2019): the baseline."""

from dataclasses import dataclass

from smoothadv.base.settings import noise_level, setting
from smoothadv.objectives import OBJECTIVES, Objective


@OBJECTIVES.register("gaussian")
@dataclass(frozen=True)
class Gaussian(Objective):
    """Cross-entropy on one noisy copy of each image."""

    TAKES_SHARES = True
    noise_sd: float = setting(
        flag="--noise",
        parse=noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1] (paper: 0.12, 0.25, "
        "0.5, 1.0)",
    )
