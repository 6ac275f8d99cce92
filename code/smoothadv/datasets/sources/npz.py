"""Arrays of images and labels in a NumPy file, as of MedMNIST or Keras: npz:FILE."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from smoothadv.datasets import (
    CIFAR_TRAINING,
    DATASETS,
    DatasetDescription,
    ImageDataset,
    constants,
    refusing,
)
from smoothadv.datasets.arrays import checked_arrays
from smoothadv.datasets.preparation import Image
from smoothadv.datasets.sources import stored_source
from smoothadv.datasets.stored import Made, StoredImages

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
    with refusing(f"npz: {path} cannot be read"), np.load(path, allow_pickle=False) as content:
        for split, names in _NAMES:
            if split not in found and {*names} <= {*content}:
                found[split] = checked_arrays(*(content[name] for name in names), *names)
        if len({(images.dtype, images.shape[1:]) for images, _ in found.values()}) != 1:
            expected = " or ".join(" and ".join(names) for _, names in _NAMES)
            raise ValueError(
                f"it holds {', '.join(content)[:200]}; expected {expected}, of one shape and type"
            )
    return found


def _levels(images: np.ndarray) -> np.ndarray:
    """Images as uint8: float32 is rounded to 256 levels."""
    return images if images.dtype == np.uint8 else np.rint(images * 255).astype(np.uint8)


class _Pictures(StoredImages):
    """Arrays, as they are or as photographs to prepare."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: int) -> None:
        self.images, self.labels = images, labels.tolist()
        self.classes = tuple(map(str, range(classes)))

    def photograph(self, index: int, make: Callable[[Image], Made]) -> Made:
        import PIL.Image

        pixels = _levels(self.images[index]).transpose(1, 2, 0)
        rgb = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
        return make(PIL.Image.fromarray(np.ascontiguousarray(rgb)))

    def digest(self) -> str:
        from smoothadv.datasets.images import fingerprint_of

        return fingerprint_of(_levels(self.images), np.array(self.labels))

    def described(self, name: str, with_constants: bool) -> DatasetDescription:
        mean, std = constants(_levels(self.images)) if with_constants else (None, None)
        # Nothing says what the images show, so they are neither shifted nor mirrored unless that is
        # asked for.
        return DatasetDescription(
            name,
            self.classes,
            self.images.shape[1:],
            mean,
            std,
            CIFAR_TRAINING,
            crop_padding=0,
            horizontal_flip=False,
        )


def _splits(path: str) -> dict[str, _Pictures]:
    found = _read(Path(path).expanduser().resolve())
    classes = 1 + max(int(labels.max()) for _, labels in found.values())
    return {split: _Pictures(*arrays, classes) for split, arrays in found.items()}


def _unprepared(stored: _Pictures, description: DatasetDescription) -> ImageDataset:
    from smoothadv.datasets.given import Arrays, GivenImages
    from smoothadv.datasets.images import InMemoryImages

    labels = np.array(stored.labels)
    if stored.images.dtype == np.uint8:
        return InMemoryImages(stored.images, labels, description)
    return GivenImages(Arrays(stored.images, labels), description)


DATASETS.register("npz")(
    stored_source(
        "npz",
        _splits,
        {"train": "x_train or train_images", "test": "x_test, test_images or images"},
        _unprepared,
    )
)
