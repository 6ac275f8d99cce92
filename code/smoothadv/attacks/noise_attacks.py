"""Attacks of noise: they move the noise of each copy, not the image, and keep its norm."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from smoothadv.architectures.logits import frozen
from smoothadv.attacks.estimators import Model, differentiated
from smoothadv.attacks.geometry import l2_norm, per_example, project_ball, unit


def until_misclassified(
    model: Model,
    images: torch.Tensor,
    labels: torch.Tensor,
    noise: torch.Tensor,
    steps: int,
    size: float | torch.Tensor,
) -> torch.Tensor:
    """Noise [B, m, ...] along the sphere of its norm: of each copy the first that is misclassified,
    else the last.

    Up to ``steps`` steps of length ``size`` [] ascend the cross-entropy, each followed by a return
    to the sphere (acr-weakness, as in its released code).
    """

    def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels.repeat_interleave(noise.shape[1]), reduction="sum")

    moved = start = noise.flatten(0, 1)
    norm = l2_norm(start)
    with frozen(model):
        for _ in range(steps):
            gradient, logits = _ascent(model, images, moved, cross_entropy)
            # What is found stays where it is, and is found again.
            found = logits.argmax(1) != labels.repeat_interleave(noise.shape[1])
            further = moved + size * unit(gradient)
            further = unit(further) * per_example(norm, further)
            moved = torch.where(per_example(found, moved), moved, further)
    return moved.unflatten(0, noise.shape[:2])


def from_targets(
    model: Model,
    images: torch.Tensor,
    targets: torch.Tensor,
    noise: torch.Tensor,
    steps: int,
    size: float | torch.Tensor,
) -> torch.Tensor:
    """Noise [B, m, ...] about ``size`` [] away that increases KL(targets || softmax f), for targets
    [B, K].

    Each of ``steps`` steps of length 2 size / steps is projected to the ball of radius ``size``;
    then the noise gets the mean and the variance of its pixels back (CAT-RS), which may lead a
    little out of the ball. The released code divides by the root mean square in place of the
    standard deviation, and the norm drifts by about one part in the number of pixels.
    """
    probabilities = targets.repeat_interleave(noise.shape[1], 0)

    def divergence(logits: torch.Tensor) -> torch.Tensor:
        return F.kl_div(F.log_softmax(logits, 1), probabilities, reduction="sum")

    moved = start = noise.flatten(0, 1)
    mean, deviation = _moments(start)
    with frozen(model):
        for _ in range(steps):
            gradient, _ = _ascent(model, images, moved, divergence)
            step = 2 * size / steps * unit(gradient)
            moved = start + project_ball(moved + step - start, size)
            now, spread = _moments(moved)
            moved = mean + (moved - now) / spread * deviation
    return moved.unflatten(0, noise.shape[:2])


def _moments(noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the pixels of each copy, [B, 1, ...] each."""
    mean = per_example(noise.flatten(1).mean(1), noise)
    return mean, per_example((noise - mean).flatten(1).square().mean(1).sqrt(), noise).clamp_min(
        1e-30
    )


def _ascent(
    model: Model,
    images: torch.Tensor,
    noise: torch.Tensor,
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of ``loss`` of the logits with respect to the noise [B m, ...], and the logits
    [B m, K].
    """
    copies = len(noise) // len(images)
    with torch.enable_grad():
        noise = noise.detach().requires_grad_()
        logits = model(images.repeat_interleave(copies, 0) + noise)
        return differentiated(loss(logits), noise), logits.detach()
