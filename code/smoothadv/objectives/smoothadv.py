"""SmoothAdv (Salman et al., 2019, Pseudocode 1) and, without noise in its attack, PGD training on noisy images."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from smoothadv.attacks import GradientAttack
from smoothadv.objectives import OBJECTIVES, Objective, Outcome, noisy_cross_entropy
from smoothadv.settings import noise_level, non_negative_int, positive_int, setting


@OBJECTIVES.register("smoothadv")
@dataclass(frozen=True)
class SmoothAdv(Objective):
    """Attack the smoothed classifier on m noise draws, then train on the same m copies of the adversarial image.

    The draws are the same in all attack steps and the update; the model is attacked in eval mode and
    updated in train mode. ``attack`` has the full epsilon. In the first epoch epsilon is 0; it then grows linearly to
    its full value over ``warmup`` epochs (0: full from the start).

    ``base_attack`` is "Vanilla PGD + noise" of the paper's appendix C.1, and a ``noise_sd`` of 0 is its "Vanilla PGD":
    both attack the base classifier (Madry et al., 2018).
    """

    attack: GradientAttack
    noise_sd: float = setting(
        flag="--noise",
        parse=noise_level,
        help="standard deviation of the Gaussian noise on images in [0, 1] (paper: 0.12, 0.25, 0.5, 1.0; 0 with PGD is "
        "Vanilla PGD)",
    )
    num_noise_vec: int = setting(
        1, parse=positive_int, help="m, the noise draws per image in attack and update (paper: 1 to 8)"
    )
    warmup: int = setting(10, parse=non_negative_int, help="epochs over which epsilon grows from 0 to its full value")
    warmup_from_first_epoch: bool = setting(
        False,
        help="reach the full epsilon an epoch earlier, with epsilon/WARMUP in the first, as the released code does",
    )
    base_attack: bool = setting(
        False, help="attack the base classifier, without noise, and train on noisy copies: Vanilla PGD + noise"
    )
    train_first_copy: bool = setting(
        False, help="train on the first of the m copies only, as the released code does without --train-multi-noise"
    )

    @property
    def copies(self) -> int:
        return self.num_noise_vec

    @property
    def full_epsilon(self) -> float:
        return self.attack.epsilon

    def epsilon(self, epoch: int) -> float:
        """epsilon * min(1, epoch / warmup), epochs counted from 0 (SmoothAdv, appendix D)."""
        if not self.warmup:
            return self.attack.epsilon
        return self.attack.epsilon * min(1.0, (epoch + self.warmup_from_first_epoch) / self.warmup)

    def adversarial(
        self,
        model: Callable[[torch.Tensor], torch.Tensor],
        images: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor,
        epsilon: float | torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        # Without noise all copies are identical, so that one suffices.
        attack_noise = None if self.base_attack or self.noise_sd == 0 else noise
        if isinstance(epsilon, torch.Tensor):
            return self.attack(model, images, labels, attack_noise, generator, epsilon=epsilon)
        return replace(self.attack, epsilon=epsilon)(model, images, labels, attack_noise, generator)

    def loss(self, model: nn.Module, adversarial: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor) -> Outcome:
        return noisy_cross_entropy(model, adversarial, labels, noise[:, :1] if self.train_first_copy else noise)
