"""acr-weakness (Sun et al., 2024): what the average certified radius rewards, on the easy images
alone.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from smoothadv.attacks.noise_attacks import until_misclassified
from smoothadv.base.settings import non_negative_int, positive_float, positive_int, setting
from smoothadv.objectives import OBJECTIVES, Batch, nearest
from smoothadv.objectives.bases import CopiesObjective
from smoothadv.objectives.policy import DataPolicy

_DROP_BELOW = {0.25: 0.5, 0.5: 0.4, 1.0: 0.4}
_RESAMPLE_EVERY = 10


@OBJECTIVES.register("acr-weakness")
@dataclass(frozen=True)
class AcrWeakness(CopiesObjective):
    """Cross-entropy on m noisy copies; from the epoch ``attack_from_epoch`` on the noise of each is
    attacked.

    The attack moves noise along the sphere of its norm until the copy is misclassified
    (``attacks.noise_attacks.until_misclassified``). From that epoch on, too, unless the options of
    a data policy say otherwise, hard images are left out and the others drawn by their certified
    radius (``DataPolicy``). A teacher, if there is one, says which are hard, as the authors did on
    ImageNet. The cost of an epoch is 3 m passes, and 2 m T more with the attack; the
    votes on the training set add 100 once and 16 every 10 epochs.
    """

    TEACHER = "drops"
    BY_NOISE = {
        "noise_steps": {0.25: 3, 0.5: 6, 1.0: 4},
        "noise_step_size": {0.25: 0.25, 0.5: 0.25, 1.0: 0.5},
        "attack_from_epoch": {0.25: 60, 0.5: 70, 1.0: 60},
    }
    num_noise_vec: int = setting(4, parse=positive_int, help="m, the noise draws per image")
    noise_steps: int = setting(None, parse=positive_int, help="T, the steps of an attack of noise")
    noise_step_size: float = setting(
        None,
        parse=positive_float,
        help="l2 length of a step of acr-weakness's attack (default: by --noise)",
    )
    attack_from_epoch: int = setting(
        None,
        parse=non_negative_int,
        help="epoch, counted from 0, from which acr-weakness attacks noise and chooses images "
        "(default: 60 or 70)",
    )

    @property
    def policy(self) -> DataPolicy:
        return DataPolicy(
            self.attack_from_epoch, nearest(_DROP_BELOW, self.noise_sd), _RESAMPLE_EVERY
        )

    def epsilon(self, epoch: float) -> float:
        """The length of the attack's way, 0 before ``attack_from_epoch``."""
        length = self.noise_steps * self.noise_step_size
        return length if epoch >= self.attack_from_epoch else 0.0

    def attacked(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Batch:
        """The batch with attacked noise."""
        if not isinstance(batch.epsilon, torch.Tensor) and batch.epsilon == 0:
            return batch
        step = batch.epsilon / self.noise_steps
        noise = until_misclassified(
            model, batch.images, batch.labels, batch.noise, self.noise_steps, step
        )
        return replace(batch, noise=noise)
