"""The scale on which noise and radii are measured: images in [0, 1], and grey levels there."""

import torch

from smoothadv.base.errors import UserError
from smoothadv.statistics.grey_noise import WHITE

SLACK = 0.5
"""How far perturbed images may leave [0, 1]: normalized ones leave it further."""


def check_scale(images: torch.Tensor, name: str, slack: float = 0.0) -> None:
    """UserError, which calls images ``name``, unless they are in [0, 1] but for so much."""
    if not bool(((images >= -slack) & (images <= 1 + slack)).all()):
        raise UserError(
            f"{name}: found values from {images.min():.4g} to {images.max():.4g}, expected [0, 1]; "
            "noise and radii are measured there, so divide grey levels by 255 and put "
            "normalization into the model"
        )


def grey_levels(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each value the quotient k/255 of the nearest grey level k, float32, and whether the value
    means that level, bool.

    It does if it lies in [0, 1] and is k/255, rounded to float32, or the number of float32 next to
    that; only 0 means black. A product with the rounded 1/255, by which PyTorch divides on GPUs and
    torchvision's ToDtype everywhere, is the next number for 126 of the 256 levels.
    """
    levels = (images * WHITE).round().float() + 0.0  # -0 becomes 0
    # By a number, accelerators divide by a product, but by a tensor as IEEE 754 specifies.
    nearest = levels / levels.new_full((), WHITE)
    return nearest, (
        (torch.nextafter(nearest, images.float()) == images)
        & (images <= 1)
        & ((levels > 0) | (images == 0))
    )


def with_exact_levels(images: torch.Tensor) -> torch.Tensor:
    """Images [..., C, H, W] of 8 bits, whose values all mean grey levels, as the quotients of
    these, float32; other images as they are.
    """
    nearest, are_meant = grey_levels(images)
    return torch.where(are_meant.flatten(-3).all(-1)[..., None, None, None], nearest, images)
