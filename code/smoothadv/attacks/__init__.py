"""Attacks on smoothed classifiers: pure functions of (model, inputs, labels), one per file.

An attack is a frozen dataclass derived from ``GradientAttack`` and registered in ``ATTACKS``.
Calling it,

    attack(model, inputs, labels, noise=None, generator=None) -> adversarial inputs

maps inputs [B, ...] in [0, 1] and labels int64 [B] to adversarial inputs of the same shape, in [0,
1], within the l2 distance ``epsilon`` and detached from any graph. ``noise`` [B, m, ...] holds the
m draws over which the smoothed classifier is averaged, the same in every step; None attacks the
base classifier. The attack's ``estimator`` (``attacks.estimators``) supplies the gradient. The
attack puts the model into eval mode, freezes its parameters, and afterwards restores its modes.
``generator`` feeds an attack's own randomness. ``GradientAttack`` does what all attacks have in
common; ``SmoothedAttack`` attacks the smoothed classifier itself, with noise, restarts and targets.
``geometry`` and ``micro_batches`` hold what several attacks use.
"""

from smoothadv.attacks.gradient_attack import GradientAttack, Problem
from smoothadv.attacks.smoothed_attack import SmoothedAttack
from smoothadv.attacks.staged_attacks import StagedAttack
from smoothadv.base.registry import Registry, discover

__all__ = [
    "ATTACKS",
    "GradientAttack",
    "Problem",
    "SmoothedAttack",
    "StagedAttack",
]

ATTACKS: Registry[type[GradientAttack]] = Registry("attack")

discover(__name__, __path__)
