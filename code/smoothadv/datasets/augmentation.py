"""Random crops and mirror images of whole batches, on the device that holds the images."""

import torch


def draw_augmentation(
    images: int, crop_padding: int, horizontal_flip: bool, generator: torch.Generator
) -> torch.Tensor:
    """A random augmentation of N images, int64 [3, N], drawn from a CPU generator.

    For each image: 1 if it is mirrored, else 0; and how many pixels below and to the right of the
    image's corner its crop starts, from -``crop_padding`` to ``crop_padding``.
    """
    chosen = torch.zeros(3, images, dtype=torch.int64)
    if horizontal_flip:
        chosen[0] = torch.rand(images, generator=generator) < 0.5
    if crop_padding:
        chosen[1:] = (
            torch.randint(2 * crop_padding + 1, (2, images), generator=generator) - crop_padding
        )
    return chosen


def augmented(
    pixels: torch.Tensor, shape: tuple[int, int], indices: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The images ``indices`` int64 [B], cropped and mirrored as ``chosen`` says: [B, C, H, W],
    channels last.

    ``pixels`` [N * H * W + 1, C] holds the pixels of all N images, row by row, and last one pixel
    in the colour of the padding; ``shape`` is (H, W); ``chosen`` [3, B] is what
    ``draw_augmentation`` returns, of these images.
    """
    height, width = shape
    is_mirrored, below, right = chosen[:, :, None]
    rows = torch.arange(height, device=indices.device) + below
    columns = torch.arange(width, device=indices.device)
    columns = torch.where(is_mirrored == 1, width - 1 - columns, columns) + right
    position = (indices[:, None] * height + rows)[:, :, None] * width + columns[:, None, :]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None, :
    ]
    position = torch.where(inside, position, len(pixels) - 1)
    return (
        pixels.index_select(0, position.flatten())
        .view(len(indices), height, width, -1)
        .permute(0, 3, 1, 2)
    )


def pixels_of(images: torch.Tensor) -> torch.Tensor:
    """The pixels [N * H * W + 1, C] of images [N, C, H, W], and a black one last."""
    channels = images.shape[1]
    pixels = images.new_zeros((len(images) * images.shape[2] * images.shape[3] + 1, channels))
    pixels[:-1].view(len(images), *images.shape[2:], channels).copy_(images.permute(0, 2, 3, 1))
    return pixels
