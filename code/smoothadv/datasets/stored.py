"""Splits of stored images, in files or in arrays, and how image files are read. No torch."""

import io
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from smoothadv.base.cpus import usable_cpus
from smoothadv.base.errors import UserError
from smoothadv.base.files import cached, digest, state_of
from smoothadv.base.progress import Progress
from smoothadv.datasets import CIFAR_TRAINING, DatasetDescription, constants, refusing
from smoothadv.datasets.preparation import Image

Made = TypeVar("Made")
File = Path | io.BytesIO
COLOURS = {1: "grey", 3: "colour"}
SUFFIXES = tuple(".jpg .jpeg .png .bmp .ppm .pgm .tif .tiff .webp .gif".split())


def read_image(file: File, make: Callable[[Image], Made], name: str, turned: bool = False) -> Made:
    """What ``make`` makes of an image of 8 bits, upright as its EXIF data say if ``turned``.

    UserError, which calls it ``name``, if it is damaged, or so large that Pillow refuses it.
    """
    import PIL.ImageOps

    # Pillow raises what it would warn of: an image of more than a quarter of a GiB.
    warnings.filterwarnings("error", category=PIL.Image.DecompressionBombWarning)
    with refusing(f"{name} cannot be read as an image"), PIL.Image.open(file) as image:
        if turned:
            PIL.ImageOps.exif_transpose(image, in_place=True)
        return make(eight_bit(image))


def eight_bit(image: Image) -> Image:
    """The image in mode L or RGB. Of 16 bits per channel the upper 8 remain, as Pillow reads
    colours of 16 bits.

    Transparency is left out, not blended with a background, as in torchvision and timm. ValueError
    for whole numbers of 32 bits and floating-point numbers, whose range is not known.
    """
    import PIL.Image

    # The second mode is that of older versions of Pillow.
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):
        return PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"it has more than 16 bits per channel (mode {image.mode}); convert it to 8 bits"
        )
    image.info.pop("transparency", None)  # of which Pillow would warn
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def planes(image: Image) -> np.ndarray:
    """The pixels uint8 [C, H, W] of an image in mode L or RGB."""
    array = np.array(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _in_threads(make: Callable[[int], Made], indices: Sequence[int], doing: str) -> Iterator[Made]:
    """What ``make`` makes of each index; decoding and hashing release the interpreter lock."""
    with ThreadPoolExecutor(usable_cpus()) as pool:
        yield from Progress(pool.map(make, indices), doing, len(indices), delay=2)


class StoredImages:
    """A split of image files, in folders or in a table, with ``labels`` among ``classes``; messages
    call an image ``name`` and its place.
    """

    name: str
    classes: tuple[str, ...]
    labels: list[int]
    turned = True
    """Whether photographs are turned upright, as their EXIF data say."""

    def file(self, index: int) -> File:
        """The file of an image."""
        raise NotImplementedError

    def place(self, index: int) -> str:
        """Where an image is: in a message after ``name``, and in the fingerprint."""
        return str(index)

    def remembered(self, what: str, indices: Sequence[int], compute: Callable[[], str]) -> str:
        """What ``compute`` returns, or returned to an earlier process for the same images."""
        return compute()

    def pixels(self, index: int, shape: tuple[int, int, int] | None = None) -> np.ndarray:
        """An image as it is stored, uint8 [C, H, W]; UserError if it is not of the ``shape``.

        Among RGB images grey becomes RGB; colour never becomes grey.
        """
        name = self.name + self.place(index)
        array = read_image(self.file(index), planes, name)
        if shape is None:
            return array
        if array.shape[1:] != shape[1:] or len(array) > shape[0]:
            found, expected = (
                f"{width}x{height} pixels in {COLOURS[channels]}"
                for channels, height, width in (array.shape, shape)
            )
            raise UserError(
                f"{name} is {found} where the first image is {expected}: images must have one "
                "size, and be grey if the first is; or write @224 behind the dataset's name"
            )
        return np.broadcast_to(array, shape)

    def photograph(self, index: int, make: Callable[[Image], Made]) -> Made:
        """What ``make`` makes of an image."""
        return read_image(self.file(index), make, self.name + self.place(index), self.turned)

    def all_pixels(self, indices: Sequence[int], shape: tuple[int, int, int]) -> np.ndarray:
        """Images as uint8 [N, C, H, W]."""
        images = np.empty((len(indices), *shape), dtype=np.uint8)
        read = _in_threads(partial(self.pixels, shape=shape), indices, "reading images")
        for number, image in enumerate(read):
            images[number] = image
        return images

    def digest(self) -> str:
        """A hash of the content, the places and the labels of all files."""

        def line(index: int) -> str:
            file = self.file(index)
            content = digest([file.read_bytes() if isinstance(file, Path) else file.getvalue()])
            return f"{self.place(index)}\t{self.labels[index]}\t{content}\n"

        every = range(len(self.labels))
        return self.remembered(
            "bytes", every, lambda: digest(_in_threads(line, every, "hashing images"))
        )

    def described(self, name: str, with_constants: bool) -> DatasetDescription:
        """The description of images that stay as they are."""
        shape, mean, std = self.pixels(0).shape, None, None
        if with_constants:
            # Evenly spaced, of all classes, and enough for 4 decimals.
            some = range(0, len(self.labels), -(-len(self.labels) // 10_000))
            text = self.remembered(
                "constants", some, lambda: json.dumps(constants(self.all_pixels(some, shape)))
            )
            mean, std = map(tuple, json.loads(text))
        return DatasetDescription(name, self.classes, shape, mean, std, CIFAR_TRAINING)


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, but for hidden ones and those like __MACOSX,
    which have no images; none if there is none.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        entry.name
        for entry in entries
        if entry.is_dir() and not entry.name.startswith(".")
        if not entry.name.startswith("__") or image_files(entry.iterdir())
    )


def image_files(paths: Iterable[Path]) -> list[Path]:
    """The image files among ``paths``, sorted; hidden files are none."""
    return sorted(
        path for path in paths if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


class ImageFiles(StoredImages):
    """The ``files`` below ``folder``, as (path, label).

    Later processes remember what was computed of them while they stay as they are.
    """

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self.name, self.folder, self.classes = f"{folder}/", folder, tuple(classes)

    @cached_property
    def files(self) -> list[tuple[Path, int]]:
        """The images of each class, sorted by name; UserError where a class has none."""
        folders = [self.folder / name for name in self.classes]
        found = [image_files(folder.iterdir()) for folder in folders]
        if not any(found):
            deep = next(iter(image_files(self.folder.rglob("*"))), None)
            raise UserError(
                f"no images under {self.folder}; expected {self.folder}/CLASS/ with files that end "
                f"in {', '.join(SUFFIXES)}"
                + (f"; name {deep.parents[1]}, which holds {deep}" if deep else "")
            )
        if not all(found):
            empty = folders[found.index([])]
            held = ", ".join(sorted(path.name for path in empty.iterdir())[:3]) or "nothing"
            raise UserError(
                f"{empty} holds {held}, and no images: put files that end in "
                f"{', '.join(SUFFIXES)} into it, not into folders below it, or remove it"
            )
        return [(path, label) for label, paths in enumerate(found) for path in paths]

    @cached_property
    def labels(self) -> list[int]:  # type: ignore[override]  # cached, it can be written
        return [label for _, label in self.files]

    def file(self, index: int) -> Path:
        return self.files[index][0]

    def place(self, index: int) -> str:
        return self.file(index).relative_to(self.folder).as_posix()

    def remembered(self, what: str, indices: Sequence[int], compute: Callable[[], str]) -> str:
        import PIL

        files = map(self.files.__getitem__, indices)
        facts = [f"{label} {state_of(path)}\n" for path, label in files]
        key = digest([what, PIL.__version__, *facts])
        return cached(f"imagefolder-{key}", lambda: compute().encode()).decode()
