"""Image files: opened, but not decoded before their size is known to be sensible. No torch."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from smoothadv.errors import UserError
from smoothadv.files import check_regular

if TYPE_CHECKING:
    import PIL.Image

Image: TypeAlias = "PIL.Image.Image"
"""For annotations: only functions that open image files load Pillow."""
MOST_PIXELS = 89_478_485
"""A quarter of a GiB of RGB, above which Pillow would warn. The environment variable names another bound."""
_VARIABLE = "SMOOTHADV_MAX_PIXELS"
_OPENING = threading.Lock()


def open_image(path: Path) -> Image:
    """The image in a file, of which only the header has been read.

    UserError if it has more than ``MOST_PIXELS``, or than SMOOTHADV_MAX_PIXELS where that is set: a file of 400 kB may
    take many GB. OSError if it is no regular file or no image; for a damaged one Pillow raises nearly any exception.
    """
    import PIL.Image

    stated = os.environ.get(_VARIABLE) or str(MOST_PIXELS)
    if not stated.isdecimal() or len(stated) > 18:
        raise UserError(f"{_VARIABLE} is '{stated}': set it to a number of pixels, like {MOST_PIXELS}")
    check_regular(path)
    with _OPENING:  # Pillow's own bound, of the whole process, is twice as large and cannot be raised by a user
        bound, PIL.Image.MAX_IMAGE_PIXELS = PIL.Image.MAX_IMAGE_PIXELS, None
        try:
            image = PIL.Image.open(path)
        finally:
            PIL.Image.MAX_IMAGE_PIXELS = bound
    if image.width * image.height > int(stated):
        image.close()
        raise UserError(
            f"{path} has {image.width}x{image.height} pixels, more than {int(stated):,}: the variable {_VARIABLE} "
            "raises this bound"
        )
    return image
