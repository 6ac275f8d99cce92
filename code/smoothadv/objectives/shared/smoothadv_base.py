"""Objectives whose images may be attacked, as SmoothAdv does (Salman et al., 2019)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from smoothadv.attacks import GradientAttack
from smoothadv.base.settings import (
    checked_field,
    noise_level,
    non_negative_int,
    positive_int,
    setting,
)
from smoothadv.objectives import Objective


@dataclass(frozen=True)
class AttackedObjective(Objective):
    """Attack the smoothed classifier on m noise draws, then train on the same m copies of the
    adversarial image.

    The draws are the same in all attack steps and the update; the model is attacked in eval mode
    and updated in train mode. ``attack`` (None: images are not attacked) has the full epsilon. In
    the first epoch epsilon is 0; it then grows linearly to its full value over ``warmup`` epochs
    (0: full from the start). With ``base_attack``, and where ``noise_sd`` is 0, the base classifier
    is attacked (Madry et al., 2018).
    """

    attack: GradientAttack | None = checked_field(None, kind=Callable)
    noise_sd: float = setting(
        flag="--noise",
        parse=noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1] (paper: 0.12, 0.25, "
        "0.5, 1.0; 0 with PGD is Vanilla PGD)",
    )
    num_noise_vec: int = setting(
        1,
        parse=positive_int,
        help="m, the noise draws per image in attack and update (paper: 1 to 8)",
    )
    warmup: int = setting(
        10,
        parse=non_negative_int,
        help="epochs over which epsilon (SmoothMix: its second loss) grows",
    )
    warmup_from_first_epoch: bool = setting(
        False,
        help="reach the full epsilon an epoch earlier, with epsilon/WARMUP in the first, as the "
        "released code does",
    )
    base_attack: bool = setting(
        False,
        help="attack the base classifier, without noise, and train on noisy copies: Vanilla PGD + "
        "noise",
    )

    @property
    def copies(self) -> int:
        return self.num_noise_vec

    @property
    def full_epsilon(self) -> float:
        return 0.0 if self.attack is None else self.attack.epsilon

    def epsilon(self, epoch: int) -> float:
        """epsilon * min(1, epoch / warmup), epochs counted from 0 (SmoothAdv, appendix D)."""
        if not self.warmup:
            return self.full_epsilon
        return self.full_epsilon * min(1.0, (epoch + self.warmup_from_first_epoch) / self.warmup)

    def adversarial(
        self,
        model: Callable[[torch.Tensor], torch.Tensor],
        images: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor,
        epsilon: float | torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if self.attack is None:
            return images
        # Without noise all copies are identical, so that one suffices.
        attack_noise = None if self.base_attack or self.noise_sd == 0 else noise
        if isinstance(epsilon, torch.Tensor):
            return self.attack(model, images, labels, attack_noise, generator, epsilon=epsilon)
        return replace(self.attack, epsilon=epsilon)(model, images, labels, attack_noise, generator)
