"""SmoothAdv (Salman et al., 2019, Pseudocode 1) and, without noise in its attack, PGD training on
noisy images.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.attacks import GradientAttack
from smoothadv.base.settings import checked_field, setting
from smoothadv.objectives import OBJECTIVES, Outcome
from smoothadv.objectives.shared.smoothadv_base import AttackedObjective


@OBJECTIVES.register("smoothadv")
@dataclass(frozen=True)
class SmoothAdv(AttackedObjective):
    """Cross-entropy on the m noisy copies of an adversarial image: as AttackedObjective, with an
    attack.

    ``base_attack`` is "Vanilla PGD + noise" of the paper's appendix C.1, and a ``noise_sd`` of 0 is
    its "Vanilla PGD".
    """

    attack: GradientAttack = checked_field(None, kind=Callable)
    train_first_copy: bool = setting(
        False,
        help="train on the first of the m copies only, as the released code does without "
        "--train-multi-noise",
    )

    def loss(
        self, model: nn.Module, adversarial: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> Outcome:
        return super().loss(
            model, adversarial, labels, noise[:, :1] if self.train_first_copy else noise
        )
