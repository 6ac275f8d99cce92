"""Objectives on several noisy copies of each image."""

from dataclasses import dataclass

from smoothadv.base.settings import noise_level, positive_int, setting
from smoothadv.objectives import Objective


@dataclass(frozen=True)
class CopiesObjective(Objective):
    """Gaussian augmentation with ``num_noise_vec`` copies, m, of each image; subclasses have other
    defaults of m.
    """

    noise_sd: float = setting(
        flag="--noise",
        parse=noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1]",
    )
    num_noise_vec: int = setting(1, parse=positive_int, help="m, the noise draws per image")

    @property
    def copies(self) -> int:
        return self.num_noise_vec
