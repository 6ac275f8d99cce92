"""The scale on which noise and radii are measured: images in [0, 1]."""

import torch

from smoothadv.base.errors import UserError

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
