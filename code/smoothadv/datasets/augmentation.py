"""Random crops and mirror images of whole batches, on the device that holds the images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Augmentation:
    """How to augment N images: ``mirrored`` bool [N], and where each crop starts, ``offsets`` int64 [2, N], rows first.

    None stands for no mirroring or no crop. Offsets count from the corner of the image after padding by
    ``crop_padding`` on all sides.
    """

    crop_padding: int
    mirrored: torch.Tensor | None
    offsets: torch.Tensor | None

    def of(self, indices: torch.Tensor) -> Augmentation:
        """The augmentation of the images ``indices`` int64 [B], in that order."""
        return self._with(lambda part: part[..., indices])

    def to(self, device: torch.device) -> Augmentation:
        return self._with(lambda part: part.to(device))

    def _with(self, changed: Callable[[torch.Tensor], torch.Tensor]) -> Augmentation:
        parts = (None if part is None else changed(part) for part in (self.mirrored, self.offsets))
        return Augmentation(self.crop_padding, *parts)


def draw_augmentation(
    images: int, crop_padding: int, horizontal_flip: bool, generator: torch.Generator
) -> Augmentation:
    """A random augmentation of ``images`` images, drawn from a CPU generator."""
    mirrored = torch.rand(images, generator=generator) < 0.5 if horizontal_flip else None
    offsets = torch.randint(2 * crop_padding + 1, (2, images), generator=generator) if crop_padding else None
    return Augmentation(crop_padding, mirrored, offsets)


def augmented(
    pixels: torch.Tensor, shape: tuple[int, int], indices: torch.Tensor, chosen: Augmentation
) -> torch.Tensor:
    """The images ``indices`` int64 [B], cropped and mirrored as ``chosen`` says: [B, C, H, W], channels last.

    ``pixels`` [N * H * W + 1, C] holds the pixels of all N images, row by row, and last one pixel in the colour of the
    padding; ``shape`` is (H, W); ``chosen`` holds one entry for each of the B images.
    """
    height, width = shape
    device = indices.device
    rows = torch.arange(height, device=device).expand(len(indices), height)
    columns = torch.arange(width, device=device).expand(len(indices), width)
    if chosen.mirrored is not None:
        columns = torch.where(chosen.mirrored[:, None], width - 1 - columns, columns)
    if chosen.offsets is not None:
        rows, columns = (
            positions + offsets[:, None] - chosen.crop_padding
            for positions, offsets in zip((rows, columns), chosen.offsets)
        )
    position = (indices[:, None] * height + rows)[:, :, None] * width + columns[:, None, :]
    if chosen.offsets is not None:
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        position = torch.where(inside, position, len(pixels) - 1)
    return pixels.index_select(0, position.flatten()).view(len(indices), height, width, -1).permute(0, 3, 1, 2)


def pixels_of(images: torch.Tensor) -> torch.Tensor:
    """The pixels [N * H * W + 1, C] of images [N, C, H, W], and a black one last."""
    channels = images.shape[1]
    pixels = images.new_zeros((len(images) * images.shape[2] * images.shape[3] + 1, channels))
    pixels[:-1].view(len(images), *images.shape[2:], channels).copy_(images.permute(0, 2, 3, 1))
    return pixels
