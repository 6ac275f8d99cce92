"""Augmentation of a batch by itself, as the tests look at it."""

from __future__ import annotations

import torch

from smoothadv.datasets.augmentation import augmented, draw_augmentation, pixels_of


def augment(images: torch.Tensor, crop_padding: int, horizontal_flip: bool, generator: torch.Generator) -> torch.Tensor:
    """Random crops (zero padding on all sides) and flips of a batch [B, C, H, W], each image its own.

    The random numbers come from the CPU ``generator``.
    """
    chosen = draw_augmentation(len(images), crop_padding, horizontal_flip, generator).to(images.device)
    everything = torch.arange(len(images), device=images.device)
    return augmented(pixels_of(images), tuple(images.shape[2:]), everything, chosen)
