"""How photographs of any size become images of one size: resized, then cropped around their centre.
No torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from smoothadv.base.errors import UserError

if TYPE_CHECKING:
    import PIL.Image
    import torch

Image: TypeAlias = "PIL.Image.Image"
"""For annotations: only functions that open image files load Pillow."""
_MOST_PIXELS = 89_478_485  # a quarter of a GiB of RGB, above which Pillow warns
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
"""Names of Pillow's filters."""
SQUASH = "squash"
_EXPECTED = (
    "write SIZE, or SIZE,RESIZE,INTERPOLATION, like 224 or 224,256,bicubic, with RESIZE at least "
    f"SIZE or '{SQUASH}', and one of {', '.join(INTERPOLATIONS)}"
)
_WRITTEN = re.compile("([0-9]{1,5})(?:,([0-9]{1,5}|squash)(?:,([a-z]{1,10}))?)?")


@dataclass(frozen=True)
class Preparation:
    """Resize the shorter side to ``resize`` pixels, then cut ``size`` x ``size`` pixels out of the
    middle.

    ``resize`` may be "squash", which resizes to ``size`` x ``size`` without a crop; None stands for
    size * 256 / 224, as is usual for ImageNet. ``interpolation`` is one of INTERPOLATIONS. Noise is
    added after this, and radii are l2 norms on the prepared images. As text, and behind an "@" in a
    dataset's name: SIZE[,RESIZE[,INTERPOLATION]]. All pixels are those of torchvision's Resize and
    CenterCrop on images of Pillow, which smooth before they shrink.
    """

    size: int
    resize: int | str | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        is_size = isinstance(self.size, int) and self.size >= 1
        is_resize = self.resize in (None, SQUASH) or (
            isinstance(self.resize, int) and self.resize >= self.size
        )
        if not (is_size and is_resize and self.interpolation in INTERPOLATIONS):
            raise UserError(f"images cannot be prepared as '{self}': {_EXPECTED}")

    @property
    def shorter_side(self) -> int | None:
        """The shorter side after resizing, in pixels; None where images are squashed."""
        if self.resize == SQUASH:
            return None
        return round(self.size * 256 / 224) if self.resize is None else int(self.resize)

    def __str__(self) -> str:
        parts = [self.size, self.resize, self.interpolation]
        if self.interpolation == "bilinear":
            parts = parts[: 1 if self.resize is None else 2]
        elif self.resize is None:
            parts[1] = self.shorter_side
        return ",".join(map(str, parts))

    def evaluation(self, image: Image) -> torch.Tensor:
        """The prepared image, uint8 [C, size, size]; ValueError where a long and narrow one would
        become enormous.
        """
        from torchvision.transforms.v2 import functional

        short, square = self.shorter_side, [self.size, self.size]
        if short and short**2 * max(image.size) / min(image.size) > _MOST_PIXELS:
            raise ValueError(
                f"{image.width}x{image.height} pixels, resized for @{self}, are more than "
                f"{_MOST_PIXELS:,}"
            )
        mode = functional.InterpolationMode(self.interpolation)
        resized = functional.resize(image, [short] if short else square, mode)
        return functional.pil_to_tensor(functional.center_crop(resized, square))

    def training(self, flip: bool) -> Callable[[Image], torch.Tensor]:
        """A random part of an image, 8% to 100% of it, resized to uint8 [C, size, size]; if
        ``flip``, half mirrored.

        The augmentation for ImageNet of Szegedy et al. (2015, section 6).
        """
        from torchvision.transforms import v2

        crop = v2.RandomResizedCrop(
            self.size, interpolation=v2.InterpolationMode(self.interpolation)
        )
        return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 if flip else 0.0), v2.PILToTensor()])


def split_location(location: str) -> tuple[str, Preparation | None]:
    """A location PATH or PATH@PREPARATION as the path and the preparation (None: images stay as
    they are).

    What exists under the whole text is a path. UserError where the preparation cannot be meant.
    """
    path, at, text = location.rpartition("@")
    is_path = os.path.exists(os.path.expanduser(location))
    if is_path or not at or not re.match("[0-9][^/]*$", text):
        return location, None
    if (match := _WRITTEN.fullmatch(text)) is None:
        raise UserError(f"images cannot be prepared as '{text}': {_EXPECTED}")
    size, resize, interpolation = match.groups()
    number = int(resize) if resize and resize.isdecimal() else resize
    return path, Preparation(int(size), number, interpolation or "bilinear")
