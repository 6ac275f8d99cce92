"""What an evaluation costs: how often its attacks pass a network, and passes to be timed."""

from collections.abc import Callable
from typing import Any

import torch

from smoothadv.architectures import get_architecture
from smoothadv.attacks.estimators import Stein
from smoothadv.attacks.smoothed_attack import EVERY
from smoothadv.datasets import DatasetDescription
from smoothadv.evaluation.specs import AttackSpec
from smoothadv.voting.classifier import default_batch, optimized_for_inference


def passes_per_image(attack: AttackSpec, classes: int) -> int:
    """How many noisy copies of an image an attack passes through the network."""
    goals = classes - 1 if attack.target == EVERY else 1
    return getattr(attack.attack, "num_steps", 1) * attack.num_noise_vec * attack.restarts * goals


def takes_gradients(attack: AttackSpec) -> bool:
    """Whether these passes are forward and backward; Stein's estimate takes forward passes only."""
    return not isinstance(attack.attack.estimator, Stein)


def prepare_passes(
    arch: str,
    description: DatasetDescription,
    precision: str,
    batch: int | None,
    with_gradient: bool,
    device: torch.device,
    most: int | None,
) -> tuple[Callable[[], Any], int]:
    """A function that passes a ``batch`` (None: one that suits the device) of at most ``most``
    noisy images through a network, and their number.
    """
    shape = description.image_shape
    network = get_architecture(arch, description, "normalize").eval()
    voter = optimized_for_inference(network, device, torch.rand(shape), precision)
    images = batch or default_batch(voter, shape, device, with_gradient=with_gradient)
    images = images if most is None else min(images, most)
    image = torch.rand(1, *shape, device=device)

    @torch.inference_mode(not with_gradient)
    def act() -> None:
        points = image + torch.randn(images, *shape, device=device)
        if with_gradient:
            torch.autograd.grad(voter(points.requires_grad_()).sum(), points)
        else:
            voter(points).argmax(1).cpu()

    return act, images
