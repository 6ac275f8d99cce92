"""Attacks on smoothed classifiers: pure functions of (model, inputs, labels), one per file.

An attack is a frozen dataclass registered in ``ATTACKS``. Calling it,

    attack(model, inputs, labels, noise=None, generator=None) -> adversarial inputs

maps inputs [B, ...] in [0, 1] and labels int64 [B] to adversarial inputs of the same shape, in [0, 1],
within the l2 distance ``epsilon`` and detached from any graph. ``noise`` [B, m, ...] holds the m draws
over which the smoothed classifier is averaged, the same in every step; None attacks the base classifier.
Where the gradient comes from is the attack's ``estimator`` (``attacks.gradients``). The model is attacked
in eval mode with frozen parameters and gets its modes back. ``generator`` feeds an attack's own randomness.
``gradient_attack.GradientAttack`` does what is common to all of that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from smoothadv.registry import Registry, discover

Attack = Callable[..., torch.Tensor]
ATTACKS: Registry[type] = Registry("attack")

discover(__name__, __path__)
