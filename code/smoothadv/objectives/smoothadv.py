"""SmoothAdv (Salman et al., 2019, Pseudocode 1) and, without noise in its attack, PGD training on
noisy images.
"""

from dataclasses import dataclass, replace

from torch import nn

from smoothadv.attacks import GradientAttack
from smoothadv.base.settings import setting
from smoothadv.objectives import OBJECTIVES, Batch, BatchLoss
from smoothadv.objectives.bases import AttackedObjective


@OBJECTIVES.register("smoothadv")
@dataclass(frozen=True)
class SmoothAdv(AttackedObjective):
    """Cross-entropy on the m noisy copies of an adversarial image: as AttackedObjective, with an
    attack.

    ``base_attack`` is "Vanilla PGD + noise" of the paper's appendix C.1, and a ``noise_sd`` of 0 is
    its "Vanilla PGD".
    """

    TAKES_SHARES = True
    attack: GradientAttack = setting()
    train_first_copy: bool = setting(
        False,
        help="train on the first of the m copies only, as the released code does without "
        "--train-multi-noise",
    )

    def loss(self, model: nn.Module, batch: Batch, attacked: Batch) -> BatchLoss:
        if self.train_first_copy:
            attacked = replace(attacked, noise=attacked.noise[:, :1])
        return super().loss(model, batch, attacked)
