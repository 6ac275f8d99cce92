"""Single image files without labels, as images of a described dataset."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from smoothadv.base.errors import UserError
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.given import GivenImages
from smoothadv.datasets.image_files import SUFFIXES, Image, read_image
from smoothadv.datasets.images import Item, fingerprint_of
from smoothadv.datasets.preparation import Preparation


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and all images in folders, sorted; UserError where there are none."""
    files: list[Path] = []
    for path in paths:
        found = [path]
        if path.is_dir():
            found = sorted(
                file
                for file in path.rglob("*")
                if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
            )
        if not found:
            raise UserError(f"{path} holds no images: no file ends in {', '.join(SUFFIXES)}")
        files += found
    return files


class LooseImages(GivenImages):
    """The images in ``files``, of the shape in a description; their label, unknown, is 0.

    All are prepared by ``preparation``. Without one, a file of the described size stays as it is,
    and of another one the shorter side is resized to that size and the middle is cut out.
    """

    def __init__(
        self,
        files: Sequence[Path],
        description: DatasetDescription,
        preparation: Preparation | None = None,
    ) -> None:
        channels, height, width = description.image_shape
        if preparation is None and height != width:
            raise UserError(
                f"images of '{description.name}' are {width}x{height}: single images must be square"
            )
        size = height if preparation is None else preparation.size
        super().__init__(files, replace(description, image_shape=(channels, size, size)))
        self.preparation = preparation

    def __getitem__(self, index: int) -> Item:
        file = self.items[index]
        return read_image(file, self._made, str(file), turned=True).float() / 255, 0

    def _made(self, image: Image) -> torch.Tensor:
        from torchvision.transforms.v2.functional import pil_to_tensor

        channels, height, width = self.description.image_shape
        image = image.convert("L" if channels == 1 else "RGB")
        if self.preparation is None and image.size == (width, height):
            return pil_to_tensor(image)
        return (self.preparation or Preparation(height, height)).evaluation(image)

    def fingerprint(self) -> str:
        """See ``ImageDataset``."""
        images = torch.stack([self[index][0] for index in range(len(self))])
        return fingerprint_of(images, torch.zeros(len(self), dtype=torch.int64))
