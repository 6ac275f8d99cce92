"""Arrays of images and labels in a NumPy file, as of MedMNIST or Keras: npz:FILE."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.datasets import (
    CIFAR_TRAINING,
    DATASETS,
    DatasetDescription,
    ImageDataset,
    Source,
    constants,
    photographs,
)
from smoothadv.datasets.arrays import checked_arrays
from smoothadv.datasets.image_files import Image, Made, StoredImages
from smoothadv.datasets.preparation import split_location

_NAMES = (
    ("train", ("x_train", "y_train")),
    ("train", ("train_images", "train_labels")),
    ("test", ("x_test", "y_test")),
    ("test", ("test_images", "test_labels")),
    ("test", ("images", "labels")),
)


@lru_cache(maxsize=1)
def _read(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By split: images, uint8 or float32 [N, C, H, W], and labels, int64 [N]. Arrays of objects are
    not read.
    """
    found = {}
    try:
        with np.load(path, allow_pickle=False) as content:
            for split, names in _NAMES:
                if split not in found and {*names} <= {*content}:
                    found[split] = checked_arrays(*(content[name] for name in names), *names)
            if len({(images.dtype, images.shape[1:]) for images, _ in found.values()}) != 1:
                expected = " or ".join(" and ".join(names) for _, names in _NAMES)
                raise ValueError(
                    f"it holds {', '.join(content)[:200]}; expected {expected}, of one shape and "
                    "type"
                )
    except Exception as error:  # a damaged file can raise nearly anything
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:500]
        raise UserError(f"npz: {path} cannot be read: {reason}") from error
    return found


def _arrays(location: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return _read(Path(split_location(location)[0]).expanduser().resolve())


def _levels(images: np.ndarray) -> np.ndarray:
    """Images as uint8: float32 is rounded to 256 levels."""
    return images if images.dtype == np.uint8 else np.rint(images * 255).astype(np.uint8)


class _Pictures(StoredImages):
    """Arrays as photographs to prepare."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels.tolist()

    def photograph(self, index: int, make: Callable[[Image], Made]) -> Made:
        import PIL.Image

        pixels = _levels(self.images[index]).transpose(1, 2, 0)
        rgb = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
        return make(PIL.Image.fromarray(np.ascontiguousarray(rgb)))

    def digest(self) -> str:
        from smoothadv.datasets.images import fingerprint_of

        return fingerprint_of(self.images, np.array(self.labels))


def _describe(location: str, data_dir: Path | None) -> DatasetDescription:
    found, (_, preparation) = _arrays(location), split_location(location)
    name, number = f"npz:{location}", 1 + max(int(labels.max()) for _, labels in found.values())
    classes, shape = tuple(map(str, range(number))), next(iter(found.values()))[0].shape[1:]
    if preparation is not None:
        return photographs(name, classes, preparation.size)
    mean, std = constants(_levels(found["train"][0])) if "train" in found else (None, None)
    # Nothing says what the images show, so they are neither shifted nor mirrored unless that is
    # asked for.
    return DatasetDescription(
        name, classes, shape, mean, std, CIFAR_TRAINING, crop_padding=0, horizontal_flip=False
    )


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    from smoothadv.datasets.given import Arrays, GivenImages
    from smoothadv.datasets.images import InMemoryImages, StreamedImages

    description, (path, preparation) = _describe(location, data_dir), split_location(location)
    if split not in (found := _arrays(location)):
        names = " or ".join(names[0] for kind, names in _NAMES if kind == split)
        raise UserError(f"npz: {path} has no {split} images, which are called {names}")
    images, labels = found[split]
    if preparation is not None:
        return StreamedImages(_Pictures(images, labels), description, preparation)
    if images.dtype == np.uint8:
        return InMemoryImages(images, labels, description)
    return GivenImages(Arrays(images, labels), description)


DATASETS.register("npz")(Source(_describe, _load, takes_location=True, takes_preparation=True))
