"""Images that a caller hands over: tensors, NumPy arrays, a torch Dataset, a DataLoader, or single
files without labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from smoothadv.base.errors import UserError, first_line
from smoothadv.base.files import digest
from smoothadv.datasets import Batches, DatasetDescription, Indices, TrainingDefaults
from smoothadv.datasets.images import augmented, draw_augmentation, pixels_of
from smoothadv.datasets.preparation import Image, Preparation
from smoothadv.datasets.stored import COLOURS, SUFFIXES, eight_bit, image_files, planes, read_image
from smoothadv.noise.scale import check_scale, with_exact_levels

if TYPE_CHECKING:
    # What a torch Dataset with random access is: item i is an image and its label.
    from _typeshed import SupportsLenAndGetItem as Items

_DEFAULTS = TrainingDefaults(batch=256, epochs=30, learning_rate=0.1, learning_rate_step=10)
_MOST_SAMPLED = 256
_LABELS = ("label", "labels", "target", "targets", "class", "y", "fine_label")
_UNKNOWN = -1  # the label of an image without one
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class GivenImages:
    """Images [C, H, W], float32 in [0, 1], and labels from 0 to K - 1, checked as they are read.

    Crops and mirror images are made if the description asks for them; by default there are none.
    """

    def __init__(self, items: Items, description: DatasetDescription) -> None:
        self.items, self.description = items, description
        self.labels = items.labels if isinstance(items, Arrays) else None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = _pair(self.items[index], index)
        # A copy: a Dataset may put each image into the memory of the one before.
        image = checked_image(image, f"image {index}").clone()
        shape = self.description.image_shape
        if tuple(image.shape) != shape:
            raise UserError(
                f"image {index} has shape {list(image.shape)}, the first one has {list(shape)}"
            )
        if isinstance(self.items, Arrays) and not self.items.are_known:
            return image, _UNKNOWN
        return image, _label(label, self.description.num_classes, f"image {index}")

    def training_batches(
        self, batches: Indices, device: torch.device, generator: torch.Generator
    ) -> Batches:
        padding, flip = self.description.crop_padding, self.description.horizontal_flip
        chosen = draw_augmentation(len(self), padding, flip, generator)
        on_cpu = self.evaluation_batches(batches, torch.device("cpu"))
        for indices, (images, labels) in zip(batches, on_cpu):
            places = torch.arange(len(indices))
            images = augmented(
                pixels_of(images), self.description.image_shape[1:], places, chosen[:, indices]
            )
            yield images.to(device), labels.to(device)

    def evaluation_batches(self, batches: Indices, device: torch.device) -> Batches:
        for indices in batches:
            images, labels = default_collate([self[int(index)] for index in indices])
            yield images.to(device), labels.to(device)

    def _sample(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Up to 256 evenly spaced images, with their labels."""
        count = min(len(self), _MOST_SAMPLED)
        return (self[number * len(self) // count] for number in range(count))

    def with_constants(self) -> GivenImages:
        """The same images with mean and standard deviation of each channel: over all in memory,
        else over a sample.
        """
        pixels = (
            self.items.images
            if isinstance(self.items, Arrays)
            else torch.stack([image for image, _ in self._sample()])
        )
        deviations, means = torch.std_mean(pixels, (0, 2, 3), correction=0)
        std = tuple(one or 1.0 for one in deviations.tolist())  # of a constant channel it is 0
        description = replace(self.description, mean=tuple(means.tolist()), std=std)
        return GivenImages(self.items, description)

    def fingerprint(self) -> str:
        """A hash of all images and labels in memory; of a Dataset, of its length and of up to 256
        evenly spaced images. Those of 8 bits count as their grey levels, however they were divided.

        To read a Dataset of a million images would take hours.
        """
        if isinstance(self.items, Arrays):
            # A part at a time, for the memory.
            parts = (with_exact_levels(part).numpy() for part in self.items.images.split(64))
            shape, labels = repr(tuple(self.items.images.shape)), self.items.labels.clamp(0)
            return digest(chain([shape], parts, [labels.numpy()]))
        pairs = (
            (f"{label}\n", with_exact_levels(image).numpy()) for image, label in self._sample()
        )
        return digest(chain([f"{len(self)} {self.description.image_shape}\n"], *pairs))


class Arrays(TensorDataset):
    """Images [N, C, H, W] and labels [N] in memory, checked as a whole; where ``needs_labels`` is
    False, these may be None: then all are -1.
    """

    def __init__(
        self, images: torch.Tensor | np.ndarray, labels: Any, needs_labels: bool = True
    ) -> None:
        tensor = _tensor(images, "images")
        if tensor.dim() != 4 or (tensor.shape[1] not in (1, 3) and tensor.shape[3] in (1, 3)):
            raise UserError(
                f"images have shape {list(tensor.shape)}: give a batch [N, C, H, W], of one image "
                "[1, C, H, W], not with channels last"
            )
        self.images = checked_image(tensor, "images")
        if labels is None and needs_labels:
            raise UserError(
                "images without labels: give an array of N whole numbers after the images; only "
                "certify and predict do without, where they write no log and attack nothing"
            )
        self.are_known = labels is not None
        if labels is None:
            labels = torch.full(self.images.shape[:1], _UNKNOWN)
        found = _tensor(labels, "labels")
        is_number = not (found.is_floating_point() or found.is_complex())
        if not is_number or found.shape != self.images.shape[:1]:
            raise UserError(
                f"labels are {found.dtype} {list(found.shape)}, expected {len(self.images)} whole "
                "numbers from 0 on"
            )
        self.labels = found.to(torch.int64)
        super().__init__(self.images, self.labels)


def checked_image(image: Any, name: str) -> torch.Tensor:
    """An image, or several, as float32 on the CPU; UserError, which calls them ``name``, unless
    they are in [0, 1].
    """
    tensor = _tensor(image, name)
    if hasattr(image, "getbands"):  # one of Pillow
        tensor = tensor / 255
    if not tensor.is_floating_point():
        found = str(tensor.dtype).removeprefix("torch.")
        hint = ": divide grey levels by 255" if tensor.dtype == torch.uint8 else ""
        raise UserError(f"{name}: found {found}, expected float32 in [0, 1]{hint}")
    tensor = tensor.float().contiguous()
    check_scale(tensor, name)
    return tensor


def _tensor(values: Any, name: str) -> torch.Tensor:
    """``values`` as a tensor on the CPU, without gradients; UserError, which calls them ``name``,
    if they are none.
    """
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    if np.ma.is_masked(values):
        raise UserError(f"{name}: found a masked array, expected all of its values: fill it first")
    try:
        values = planes(eight_bit(values)) if hasattr(values, "getbands") else values
        # PyTorch refuses negative strides and the byte order of other processors, and warns of
        # arrays that cannot be written to.
        dtype = np.asarray(values).dtype.newbyteorder("=")
        return torch.from_numpy(np.require(values, dtype, ["C", "W"]))
    except (TypeError, ValueError):
        raise UserError(
            f"{name}: found {_brief(values)}, expected a tensor or array of numbers"
        ) from None


def _brief(value: Any) -> str:
    return f"a {type(value).__name__}" + (
        f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    )


def _pair(item: Any, index: int) -> tuple[Any, Any]:
    """The image and the label in an item, which may be a dict of one image and one label."""
    values = item
    if isinstance(item, Mapping):
        images = [one for one in item.values() if np.ndim(one) > 1]
        labels = ["label"] if "label" in item else [key for key in _LABELS if key in item]
        if len(images) == len(labels) == 1:
            values = images[0], item[labels[0]]
    if isinstance(values, (tuple, list)) and len(values) == 2:
        return values[0], values[1]
    parts = item if isinstance(item, Mapping) else {}
    for key, part in parts.items():
        if isinstance(part, bytes) or (isinstance(part, Mapping) and "bytes" in part):
            raise UserError(
                f"item {index} of the dataset has bytes in {key!r}: decode the images by the "
                f"dataset's cast_column({key!r}, datasets.Image()), or write hf-dataset:FILE"
            )
    held = f" of {', '.join(map(str, parts))}" if parts else ""
    raise UserError(
        f"item {index} of the dataset is {_brief(item)}{held}, expected (image, label), or a dict "
        f"of one image and one label, called {', '.join(_LABELS)}; an array may be images without "
        "labels, for certify and predict"
    )


def _label(label: Any, classes: int, name: str) -> int:
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = int(label)
        if number == label and 0 <= number < classes:
            return number
    raise UserError(
        f"{name} has the label {label!r}, expected a whole number from 0 to {classes - 1}"
    )


def items_of(images: Any, labels: Any = None, needs_labels: bool = True) -> Items:
    """Tensors or arrays with labels (``needs_labels`` as in ``Arrays``), a Dataset, or the content
    of a DataLoader, which is kept in memory.

    UserError for anything else, and for a DataLoader that shuffles: an image's index would then
    change with each pass.
    """
    if isinstance(images, DataLoader):
        if labels is not None:
            raise UserError("a DataLoader has its own labels: leave labels out")
        sampler = images.sampler
        if isinstance(sampler, _RANDOM) or getattr(sampler, "shuffle", False):
            raise UserError(
                "the DataLoader shuffles, so images have no fixed index: make it with shuffle=False"
            )
        batches = [  # copies: a DataLoader may put each batch into the memory of the one before
            [part.clone() if torch.is_tensor(part) else part for part in _pair(batch, number)]
            for number, batch in enumerate(images)
        ]
        if not batches:
            raise UserError("the DataLoader has no batches")
        try:
            arrays = Arrays(*map(torch.cat, zip(*batches)))  # type: ignore[arg-type]  # two
        except (RuntimeError, TypeError) as error:  # none, or several shapes, or no batches
            raise UserError(
                f"the {len(batches)} batches of the DataLoader cannot be joined: "
                f"{first_line(error)}"
            ) from error
        for number, (batch, again) in enumerate(zip(batches, images)):
            if not all(map(torch.equal, batch, _pair(again, number))):
                raise UserError(
                    f"batch {number} of the DataLoader is another one each time it is read, and "
                    "its images are kept: leave out what is random, or train on its Dataset"
                )
        return arrays
    if isinstance(images, (torch.Tensor, np.ndarray)):
        return Arrays(images, labels, needs_labels)
    if hasattr(images, "to_numpy"):  # of pandas, or like it
        raise UserError(
            f"images are a {type(images).__name__}: give an array, or write hf-dataset:FILE.parquet"
        )
    is_dataset = hasattr(images, "__getitem__") and hasattr(images, "__len__")
    if is_dataset and not isinstance(images, (list, tuple, dict)):
        if labels is not None:
            raise UserError("a Dataset has its own labels: leave labels out")
        return images
    split = f"its {next(iter(images), '')!r}, " if isinstance(images, dict) else ""
    raise UserError(
        f"images are a {type(images).__name__}: give {split}a dataset's name, a tensor or array "
        "[N, C, H, W], a torch Dataset with random access, or a DataLoader"
    )


def first_image(items: Items, name: str) -> torch.Tensor:
    """The first image [C, H, W] of ``items``, which a message calls ``name``; UserError where there
    is none.
    """
    if not len(items):
        raise UserError(f"{name}: there are no images")
    image = checked_image(_pair(items[0], 0)[0], "image 0")
    if image.dim() != 3:
        raise UserError(f"image 0 has shape {list(image.shape)}, expected [C, H, W]")
    return image


def described(items: Items, classes: Sequence[str], name: str) -> GivenImages:
    """``items`` as a dataset called ``name`` with these classes; UserError where the first image is
    no image.
    """
    channels, height, width = first_image(items, name).shape
    description = DatasetDescription(
        name,
        tuple(classes),
        (channels, height, width),
        mean=None,
        std=None,
        defaults=_DEFAULTS,
        crop_padding=0,
        horizontal_flip=False,
    )
    if isinstance(items, Arrays) and items.are_known:
        for index in (int(items.labels.argmin()), int(items.labels.argmax())):
            _label(int(items.labels[index]), len(classes), f"image {index}")
    return GivenImages(items, description)


def files_in(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and all images in folders, sorted; UserError where there are none."""
    files: list[Path] = []
    for path in paths:
        found = image_files(path.rglob("*")) if path.is_dir() else [path]
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

    def made(image: Image) -> np.ndarray:
        stays = preparation is None and image.size == size
        if not stays or image.mode != mode:
            changes[f"{image.width}x{image.height} pixels in {COLOURS[len(image.getbands())]}"] = (
                None
            )
        image = image.convert(mode)
        return planes(image) if stays else prepared.evaluation(image).numpy()

    pixels = np.stack([read_image(file, made, str(file), turned=True) for file in files])
    some = ", ".join([*changes][:3]) + ", ..." * (len(changes) > 3)
    said = f"images of {some} became {size[0]}x{size[1]} in {COLOURS[channels]}" if changes else ""
    found = replace(description, image_shape=(channels, *size))
    return GivenImages(Arrays(torch.from_numpy(pixels).float() / 255, None, False), found), said
