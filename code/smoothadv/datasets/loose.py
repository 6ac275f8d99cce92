"""Single image files without labels, as images of a described dataset."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from smoothadv.base.errors import UserError
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.given import Arrays, GivenImages
from smoothadv.datasets.image_files import SUFFIXES, Image, read_image
from smoothadv.datasets.preparation import Preparation

_COLOURS = {"L": "grey", "RGB": "colour"}


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and all images in folders, sorted; UserError where there are none."""
    files: list[Path] = []
    for path in paths:
        images = (
            file
            for file in path.rglob("*")
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
        )
        found = sorted(images) if path.is_dir() else [path]
        if not found:
            raise UserError(f"{path} holds no images: no file ends in {', '.join(SUFFIXES)}")
        files += found
    return files


def read_images(
    files: Sequence[Path], description: DatasetDescription, preparation: Preparation | None = None
) -> tuple[GivenImages, str]:
    """The images in ``files``, of the shape in a description, without labels, and what was changed
    of them, in words; "" if nothing.

    All are prepared by ``preparation``. Without one, a file of the described size stays as it is,
    and of another one the shorter side is resized to that size and the middle is cut out.
    """
    channels, height, width = description.image_shape
    if preparation is None and height != width:
        raise UserError(
            f"images of '{description.name}' are {width}x{height}: single images must be square"
        )
    prepared = preparation or Preparation(height, height)
    size, mode = (prepared.size, prepared.size), "L" if channels == 1 else "RGB"
    changes = dict[str, None]()

    def made(image: Image) -> torch.Tensor:
        from torchvision.transforms.v2.functional import pil_to_tensor

        stays = preparation is None and image.size == size
        if not stays or image.mode != mode:
            was = f"{image.width}x{image.height} pixels in {_COLOURS[image.mode]}"
            changes[was] = None
        image = image.convert(mode)
        return pil_to_tensor(image) if stays else prepared.evaluation(image)

    images = [read_image(file, made, str(file), turned=True) for file in files]
    pixels = torch.stack(images).float() / 255
    some = ", ".join([*changes][:3]) + ", ..." * (len(changes) > 3)
    said = f"images of {some} became {size[0]}x{size[1]} in {_COLOURS[mode]}" if changes else ""
    found = replace(description, image_shape=(channels, *size))
    return GivenImages(Arrays(pixels, None, False), found), said
