"""What several objectives have: noisy copies, SmoothAdv's attack, and a weight."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smoothadv.attacks import GradientAttack
from smoothadv.base.settings import (
    noise_level,
    non_negative_float,
    non_negative_int,
    positive_int,
    setting,
)
from smoothadv.objectives import Batch, Objective


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


@dataclass(frozen=True)
class AttackedObjective(Objective):
    """Attack the smoothed classifier on m noise draws, then train on the same m copies of the
    adversarial image (SmoothAdv, Salman et al., 2019).

    The draws are the same in all attack steps and the update; the model is attacked in eval mode
    and updated in train mode. ``attack`` (None: images are not attacked) has the full epsilon. In
    the first epoch epsilon is 0; it then grows linearly to its full value over ``warmup`` epochs
    (0: full from the start). With ``base_attack``, and where ``noise_sd`` is 0, the base classifier
    is attacked (Madry et al., 2018).
    """

    attack: GradientAttack | None = setting()
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
        help="epochs over which epsilon grows",
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

    def epsilon(self, epoch: float) -> float:
        """epsilon * min(1, epoch / warmup), epochs counted from 0 (SmoothAdv, appendix D)."""
        full = 0.0 if self.attack is None else self.attack.epsilon
        if not self.warmup:
            return full
        return full * min(1.0, (epoch + self.warmup_from_first_epoch) / self.warmup)

    def attacked(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Batch:
        """The batch with adversarial images."""
        if self.attack is None:
            return batch
        # Without noise all copies are identical, so that one suffices.
        noise = None if self.base_attack or self.noise_sd == 0 else batch.noise
        given = model, batch.images, batch.labels, noise, generator
        return replace(batch, images=self.attack(*given, epsilon=batch.epsilon))


def weight() -> Any:
    """The field ``regularization``: lambda, whose default is one of BY_NOISE."""
    text = (
        "lambda, the weight of the loss beside the cross-entropy (default: by --noise, see "
        "docs/objectives.md)"
    )
    return setting(None, flag="--lambda", parse=non_negative_float, help=text)
