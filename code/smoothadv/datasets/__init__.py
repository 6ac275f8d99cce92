"""Datasets: [0, 1] images and integer labels, one kind of source per file, and their descriptions.

A name is ``cifar10``, ``digits``, ..., or ``imagefolder:PATH`` for a source that takes a location
after the colon. Each file in ``sources`` registers a ``Source``, which holds two functions, in
``DATASETS``. Only ``load`` imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.base.registry import Registry, discover

if TYPE_CHECKING:
    import torch

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""Per-channel constants of the paper's code for CIFAR-10 and ImageNet32."""


@dataclass(frozen=True)
class TrainingDefaults:
    """The training settings of a dataset where the command line names no others."""

    batch: int
    epochs: int
    learning_rate: float
    learning_rate_step: int


CIFAR_TRAINING = TrainingDefaults(batch=256, epochs=150, learning_rate=0.1, learning_rate_step=50)
"""SmoothAdv, appendix D: CIFAR-10."""
IMAGENET_TRAINING = TrainingDefaults(batch=400, epochs=90, learning_rate=0.1, learning_rate_step=30)
"""SmoothAdv, appendix D: ImageNet."""
IMAGENET_RADII = tuple(0.5 * step for step in range(8))
"""SmoothAdv, table 1: ImageNet; and 0."""


@dataclass(frozen=True)
class DatasetDescription:
    """Facts about a dataset.

    ``image_shape`` is (C, H, W); ``mean`` and ``std`` are per channel on images in [0, 1], None
    where they cannot be known (an image folder without training images). Augmentation is a random
    crop after zero padding by ``crop_padding`` pixels and, if ``horizontal_flip``, a mirror image
    with probability 1/2. ``radii`` are the grid of procedures whose radii lie on one (None:
    their default).
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    defaults: TrainingDefaults
    crop_padding: int = 4
    horizontal_flip: bool = True
    radii: tuple[float, ...] | None = None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def doubts(self) -> list[str]:
        """A warning where classes whose names have numbers are in the order of text.

        UserError where there are fewer than two classes.
        """
        names = list(self.class_names)
        if len(names) < 2:
            raise UserError(
                f"'{self.name}' has one class, called '{''.join(names)}', so every classifier is "
                "right: give images of two classes or more, in image folders a folder for each"
            )
        # "2" comes before "10" where all numbers have equally many digits before the point.
        padded = partial(re.sub, r"(?<![0-9.])[0-9]+", lambda found: found[0].zfill(99))
        numbered = sorted(names, key=padded)
        if names == numbered or names != sorted(names):
            return []
        label = next(label for label, name in enumerate(numbered) if name != names[label])
        return [
            f"the classes of '{self.name}' are in the order of text, as in torchvision's "
            f"ImageFolder, not of numbers: label {label} is '{names[label]}', not "
            f"'{numbered[label]}'"
        ]


def photographs(name: str, class_names: tuple[str, ...], size: int) -> DatasetDescription:
    """Photographs prepared to ``size`` x ``size`` pixels: with the constants and the training
    defaults of ImageNet.
    """
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return DatasetDescription(
        name, class_names, (3, size, size), mean, std, IMAGENET_TRAINING, radii=IMAGENET_RADII
    )


def constants(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per-channel mean and standard deviation of images uint8 [N, C, H, W], on the [0, 1] scale, to
    4 decimals.
    """
    levels = np.arange(256) / 255
    means, deviations = [], []
    for channel in images.swapaxes(0, 1):
        # Computed from counts of the 256 levels: as float64 the images would need eight times their
        # memory.
        weights = sum(np.bincount(image.ravel(), minlength=256) for image in channel) / channel.size
        mean = weights @ levels
        means.append(round(float(mean), 4))
        # A constant channel has deviation 0, which cannot be divided by.
        deviations.append(round(float(np.sqrt(weights @ (levels - mean) ** 2)), 4) or 1.0)
    return tuple(means), tuple(deviations)


# For annotations: to know the names of datasets, nobody waits for torch.
Batches: TypeAlias = "Iterator[tuple[torch.Tensor, torch.Tensor]]"
Indices: TypeAlias = "Sequence[torch.Tensor]"
"""Of the images of each batch: int64 [B], on the CPU."""


class ImageDataset(Protocol):
    """The interface that training, certification and prediction rely on.

    Items are (float32 image [C, H, W] in [0, 1], int label) without augmentation. Batches are
    (images [B, C, H, W], labels int64 [B]) on the requested device.
    """

    description: DatasetDescription

    @property
    def labels(self) -> Any:
        """The labels of all images, in order; None where only the items tell."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]: ...

    def training_batches(
        self, batches: Indices, device: torch.device, generator: torch.Generator
    ) -> Batches:
        """The images of each of ``batches``, augmented.

        The augmentation of an image is a function of its index and of the state of ``generator`` (a
        CPU generator), whatever batch it is in and whatever other batches are requested.
        """

    def evaluation_batches(self, batches: Indices, device: torch.device) -> Batches:
        """The images of each of ``batches``, as in ``training_batches``, but unaugmented."""

    def fingerprint(self) -> str:
        """A hash that changes whenever an image, a label or their order does."""


def labels_of(dataset: ImageDataset, indices: Iterable[int]) -> list[int]:
    """The labels of these images, which are read where only the items tell."""
    labels = getattr(dataset, "labels", None)
    return [int(dataset[index][1] if labels is None else labels[index]) for index in indices]


SPLITS = ("train", "test")


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from.

    ``describe(location, data_dir)`` returns its DatasetDescription without reading all images;
    ``load(split, location, data_dir)`` reads a split ("train" or "test"). ``location`` is the text
    after the colon of the name, "" if there is none; a source with ``takes_location`` requires one,
    which messages call ``location``.
    With ``takes_preparation`` it may end in "@" and a ``Preparation``.
    ``data_dir`` is None where the user named none: the source then uses its default.
    """

    describe: Callable[[str, Path | None], DatasetDescription]
    load: Callable[[str, str, Path | None], ImageDataset]
    takes_location: bool = False
    takes_preparation: bool = False
    location: str = "PATH"


DATASETS: Registry[Source] = Registry("dataset")
DEFAULT_DATA_DIR = Path("data")


def source_of(name: str) -> tuple[Source, str]:
    """The source that the name of a dataset names, and the location; UserError where it names
    none.
    """
    kind, colon, location = name.partition(":")
    source = DATASETS[kind]
    if source.takes_location and not location:
        raise UserError(f"dataset '{name}' needs a location: write {kind}:{source.location}")
    if colon and not source.takes_location:
        raise UserError(
            f"dataset '{name}': '{kind}' takes nothing after its name; for your own images write "
            "imagefolder:PATH"
        )
    return source, location


def describe_dataset(name: str, data_dir: str | Path | None = None) -> DatasetDescription:
    """Classes, image shape, normalization constants and training defaults of a dataset.

    ``data_dir`` is the folder of the files, also of downloaded ones (default: ``data`` in the
    working folder; for imagenet the IMAGENET_DIR variable). UserError on an unknown name or missing
    files.
    """
    source, location = source_of(name)
    return source.describe(location, Path(data_dir) if data_dir else None)


def get_dataset(name: str, split: str, data_dir: str | Path | None = None) -> ImageDataset:
    """The images of ``split`` ("train" or "test"); item i is (float32 [C, H, W] in [0, 1], int
    label), unaugmented.

    ``data_dir`` as in ``describe_dataset``. UserError on unknown names, missing or malformed files.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split '{split}'; known: {', '.join(SPLITS)}")
    source, location = source_of(name)
    return source.load(split, location, Path(data_dir) if data_dir else None)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Within, whatever is raised becomes a UserError that begins with ``what``: a damaged file can
    raise nearly anything.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).partition(" <_io")[0].split())  # a file in memory has no name
        raise UserError(f"{what}: {reason[:600] or type(error).__name__}") from error


discover(f"{__name__}.sources", [str(Path(__file__).with_name("sources"))])
