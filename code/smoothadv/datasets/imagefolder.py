"""The user's images: PATH/train/CLASS/* and PATH/test/CLASS/*, all of one size."""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from smoothadv.datasets import DATASETS, SPLITS, ImageDataset, Source
from smoothadv.datasets.description import CIFAR_TRAINING, DatasetDescription
from smoothadv.datasets.image_files import Image, open_image
from smoothadv.errors import UserError
from smoothadv.files import cached

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
_IMAGES_FOR_CONSTANTS = 10_000
_GREY_MODES = ("1", "L")


def _class_folders(root: Path, split: str) -> list[str]:
    folder = root / split
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _classes(root: Path) -> list[str]:
    """The class names, which must be the same in train/ and test/ where both exist."""
    found = {split: _class_folders(root, split) for split in SPLITS}
    if not any(found.values()):
        raise UserError(f"imagefolder: {root} holds neither train/CLASS/ nor test/CLASS/ folders")
    if all(found.values()) and found["train"] != found["test"]:
        odd = sorted(set(found["train"]) ^ set(found["test"]))
        raise UserError(f"imagefolder: the classes of {root}/train and {root}/test differ in {', '.join(odd[:5])}")
    return found["train"] or found["test"]


def _files(root: Path, split: str) -> list[tuple[Path, int]]:
    """(path, label) of the images of a split, sorted by class and name."""
    files = [
        (path, label)
        for label, name in enumerate(_classes(root))
        if (root / split / name).is_dir()
        for path in sorted((root / split / name).iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise UserError(
            f"imagefolder: no images under {root / split}; expected {root / split}/CLASS/ with files that "
            f"end in {', '.join(_SUFFIXES)}"
        )
    return files


def _read(path: Path, shape: tuple[int, int, int] | None = None) -> np.ndarray:
    """An image file as uint8 [C, H, W]; UserError if it is damaged, too large or not of the given ``shape``."""
    try:
        with open_image(path) as image:
            if shape is not None and image.size != (shape[2], shape[1]):  # before it is decoded
                raise UserError(
                    f"imagefolder: {path} is {image.width}x{image.height} pixels where the first image is "
                    f"{shape[2]}x{shape[1]}; all images must have one size"
                )
            array = np.asarray(_eight_bit(image, path, None if shape is None else shape[0]))
    except UserError:
        raise
    except Exception as error:  # for a damaged file Pillow raises nearly any exception
        reason = " ".join(str(error).split())
        raise UserError(f"imagefolder: {path} cannot be read as an image: {reason}") from error
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _eight_bit(image: Image, path: Path, channels: int | None) -> Image:
    """The image with 8 bits per channel. Among RGB images grey becomes RGB; colour never becomes grey."""
    if image.mode.startswith(("I", "F")):
        raise UserError(
            f"imagefolder: {path} has more than 8 bits per channel (mode {image.mode}); convert it to 8 bits"
        )
    is_grey = image.mode in _GREY_MODES
    if channels == 1 and not is_grey:
        raise UserError(
            f"imagefolder: {path} is a colour image where the first image is grey; make them all one or the other"
        )
    return image.convert("L" if is_grey and channels in (None, 1) else "RGB")


def _read_all(files: list[tuple[Path, int]], shape: tuple[int, int, int]) -> np.ndarray:
    """All files as uint8 [N, C, H, W]; decoding releases the interpreter lock, so threads help."""
    images = np.empty((len(files), *shape), dtype=np.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = pool.map(lambda item: _read(item[0], shape), files)
        for index, image in enumerate(tqdm(decoded, "reading images", len(files), delay=2, disable=None)):
            images[index] = image
    return images


def _constants(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per-channel mean and standard deviation of images uint8 [N, C, H, W], on the [0, 1] scale, to 4 decimals."""
    levels = np.arange(256) / 255
    means, deviations = [], []
    for channel in images.swapaxes(0, 1):
        # Computed from counts of the 256 levels: as float64 the images would need eight times their memory.
        weights = sum(np.bincount(image.ravel(), minlength=256) for image in channel) / channel.size
        mean = weights @ levels
        means.append(round(float(mean), 4))
        # A constant channel has deviation 0, which cannot be divided by.
        deviations.append(round(float(np.sqrt(weights @ (levels - mean) ** 2)), 4) or 1.0)
    return tuple(means), tuple(deviations)


def _describe(location: str, data_dir: Path | None) -> DatasetDescription:
    return replace(_describe_folder(Path(location).expanduser().resolve()), name=f"imagefolder:{location}")


@cache
def _describe_folder(root: Path) -> DatasetDescription:
    classes = _classes(root)
    split = "train" if _class_folders(root, "train") else "test"
    files = _files(root, split)
    shape = _read(files[0][0]).shape
    mean = std = None
    if split == "train":
        # Evenly spaced images, so that every class contributes, and enough of them for 4 decimals.
        some = files[:: -(-len(files) // _IMAGES_FOR_CONSTANTS)]
        text = _remembered("constants", some, lambda: json.dumps(_constants(_read_all(some, shape))))
        mean, std = map(tuple, json.loads(text))
    return DatasetDescription(f"imagefolder:{root}", tuple(classes), shape, mean, std, CIFAR_TRAINING)


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    from smoothadv.datasets.images import ImagesOnDemand

    description = _describe(location, data_dir)
    files = _files(Path(location).expanduser(), split)
    stamps = [_stamp(path) for path, _ in files]

    def read(index: int) -> np.ndarray:
        path, _ = files[index]
        if _stamp(path) != stamps[index]:
            raise UserError(f"imagefolder: {path} was changed while it was in use")
        return _read(path, description.image_shape)

    labels, remembered = [label for _, label in files], partial(_remembered, "fingerprint", files)
    return ImagesOnDemand(labels, read, lambda: _read_all(files, description.image_shape), remembered, description)


def _stamp(path: Path) -> str:
    """What changes whenever a file is written or replaced."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _remembered(what: str, files: list[tuple[Path, int]], compute: Callable[[], str]) -> str:
    """What ``compute`` returns, or returned to an earlier process when these files were the same, from the cache."""
    import PIL

    key = [what, PIL.__version__, *(f"{os.path.abspath(path)} {label} {_stamp(path)}" for path, label in files)]
    name = f"imagefolder-{hashlib.sha256(repr(key).encode()).hexdigest()}"
    return cached(name, lambda: compute().encode()).decode()


DATASETS.register("imagefolder")(Source(describe=_describe, load=_load, takes_location=True))
