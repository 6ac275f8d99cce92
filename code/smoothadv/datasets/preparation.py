"""How photographs of any size become images of one size: resized, then cropped around their centre. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from smoothadv.errors import UserError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
"""Names of Pillow's filters."""
SQUASH = "squash"
_WRITTEN = re.compile(r"(\d{1,5})(?:,(\d{1,5}|squash)(?:,([a-z]{1,10}))?)?")


@dataclass(frozen=True)
class Preparation:
    """Resize the shorter side to ``resize`` pixels, then cut ``size`` x ``size`` pixels out of the middle.

    ``resize`` may be "squash", which resizes to ``size`` x ``size`` without a crop; None stands for size * 256 / 224,
    as is usual for ImageNet. ``interpolation`` is one of INTERPOLATIONS. Noise is added after this, and radii are l2
    norms on the prepared images. As text, and behind an "@" in a dataset's name: SIZE[,RESIZE[,INTERPOLATION]].
    """

    size: int
    resize: int | str | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        is_size = isinstance(self.size, int) and self.size >= 1
        is_resize = self.resize in (None, SQUASH) or (isinstance(self.resize, int) and self.resize >= self.size)
        if not (is_size and is_resize and self.interpolation in INTERPOLATIONS):
            raise UserError(
                f"images cannot be prepared as '{self}': write SIZE, or SIZE,RESIZE,INTERPOLATION, like 224 or "
                f"224,256,bicubic, with RESIZE at least SIZE or '{SQUASH}', and one of {', '.join(INTERPOLATIONS)}"
            )

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


def split_location(location: str) -> tuple[str, Preparation | None]:
    """A location PATH or PATH@PREPARATION as the path and the preparation (None: images stay as they are).

    What exists under the whole text is a path. UserError where the preparation cannot be meant.
    """
    path, at, text = location.rpartition("@")
    match = _WRITTEN.fullmatch(text) if at and not os.path.exists(location) else None
    if match is None:
        return location, None
    size, resize, interpolation = match.groups()
    number = int(resize) if resize and resize.isdecimal() else resize
    return path, Preparation(int(size), number, interpolation or "bilinear")


def prepared_name(dataset: str, preparation: Preparation) -> str:
    """The name of a dataset whose images are prepared in this way."""
    return f"{dataset}@{preparation}"
