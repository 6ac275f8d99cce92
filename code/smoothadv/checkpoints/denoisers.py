"""The denoiser in a checkpoint, or of diffusers, and a classifier behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from smoothadv.architectures.denoisers import DENOISERS, Denoised
from smoothadv.architectures.diffusion import PREFIX, load_diffusion
from smoothadv.architectures.exact import is_exact
from smoothadv.base.errors import UserError, first_line
from smoothadv.checkpoints import check_recorded_images, load_weights, network_keys, read_checkpoint
from smoothadv.checkpoints.hub import checkpoint_digest
from smoothadv.datasets import DatasetDescription


def load_denoiser(
    path: str | Path, description: DatasetDescription
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The denoiser in a checkpoint, in eval mode, and what ``read_checkpoint`` returns.

    UserError where it does not fit the images.
    """
    content = read_checkpoint(path, denoiser=True)
    check_recorded_images({**content, "classes": None}, path, description)
    network = DENOISERS[content["arch"]](description)
    load_weights(network, network_keys(content["state_dict"]), path, content["arch"], description)
    return network.eval(), content


def denoised_classifier(
    classifier: torch.nn.Module, denoiser: str, description: DatasetDescription, sigma: float
) -> tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]:
    """The classifier behind a denoiser, a checkpoint or diffusers:PATH, for noise of sigma.

    Also what a log records of the denoiser, and what its checkpoint does. UserError where it does
    not fit the images.
    """
    if is_exact(classifier):
        raise UserError(
            "a network of integers reads noisy images in whole grey levels: leave --denoiser out"
        )
    content: dict[str, Any] = {"noise_sd": sigma}
    if denoiser.startswith(PREFIX):
        network, facts = load_diffusion(denoiser, description.image_shape, sigma)
    else:
        network, content = load_denoiser(denoiser, description)
        facts = {"sha256": checkpoint_digest(denoiser), "arch": content["arch"]}
    image = torch.full((1, *description.image_shape), 0.5)
    try:
        with torch.inference_mode():
            found = list(network(image).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"--denoiser {denoiser} does not run on images of shape {list(image.shape[1:])}: "
            f"{first_line(error)}"
        ) from error
    if found != list(image.shape):
        raise UserError(
            f"--denoiser {denoiser} makes {found[1:]} of an image of shape {list(image.shape[1:])}"
        )
    return Denoised(network, classifier).eval(), facts, content
