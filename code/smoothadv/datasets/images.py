"""The interface of datasets: single images, and batches for training and evaluation."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from smoothadv.base.cpus import usable_cpus
from smoothadv.base.errors import UserError
from smoothadv.base.files import digest
from smoothadv.base.settings import found_value
from smoothadv.datasets import Batches, DatasetDescription, ImageDataset, Indices
from smoothadv.datasets.preparation import Image, Preparation
from smoothadv.datasets.stored import StoredImages
from smoothadv.noise import Purpose, derive_generator

Item = tuple[torch.Tensor, int]
_READ_TWICE = 64  # of these, half are mirrored at random: all of them twice alike never happens


def changing_image(images: ImageDataset) -> int | None:
    """The index of an image that is another one, or has another label, when it is read again; None
    if there is none among those that are tried.
    """
    if isinstance(images, (InMemoryImages, StreamedImages)):
        return None
    count = _READ_TWICE if len(images) else 0
    tried = (number * len(images) // count for number in range(count))
    reads = (
        (index, {fingerprint_of(*map(torch.as_tensor, images[index])) for _ in range(2)})
        for index in tried
    )
    return next((index for index, found in reads if len(found) > 1), None)


def fingerprint_of(images: torch.Tensor | np.ndarray, labels: torch.Tensor | np.ndarray) -> str:
    """A hash of images [N, C, H, W] and labels [N] in memory."""
    arrays = (torch.as_tensor(part).cpu().contiguous().numpy() for part in (images, labels))
    return digest([repr(tuple(images.shape)), *arrays])


def draw_augmentation(
    images: int, crop_padding: int, horizontal_flip: bool, generator: torch.Generator
) -> torch.Tensor:
    """A random augmentation of N images, int64 [3, N], drawn from a CPU generator.

    For each image: 1 if it is mirrored, else 0; and how many pixels below and to the right of the
    image's corner its crop starts, from -``crop_padding`` to ``crop_padding``.
    """
    chosen = torch.zeros(3, images, dtype=torch.int64)
    if horizontal_flip:
        chosen[0] = torch.rand(images, generator=generator) < 0.5
    if crop_padding:
        chosen[1:] = (
            torch.randint(2 * crop_padding + 1, (2, images), generator=generator) - crop_padding
        )
    return chosen


def augmented(
    pixels: torch.Tensor, shape: tuple[int, int], indices: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The images ``indices`` int64 [B], cropped and mirrored as ``chosen`` says: [B, C, H, W],
    channels last.

    ``pixels`` [N * H * W + 1, C] holds the pixels of all N images, row by row, and last one pixel
    in the colour of the padding; ``shape`` is (H, W); ``chosen`` [3, B] is what
    ``draw_augmentation`` returns, of these images.
    """
    height, width = shape
    is_mirrored, below, right = chosen[:, :, None]
    rows = torch.arange(height, device=indices.device) + below
    columns = torch.arange(width, device=indices.device)
    columns = torch.where(is_mirrored == 1, width - 1 - columns, columns) + right
    position = (indices[:, None] * height + rows)[:, :, None] * width + columns[:, None, :]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None, :
    ]
    position = torch.where(inside, position, len(pixels) - 1)
    return (
        pixels.index_select(0, position.flatten())
        .view(len(indices), height, width, -1)
        .permute(0, 3, 1, 2)
    )


def pixels_of(images: torch.Tensor) -> torch.Tensor:
    """The pixels [N * H * W + 1, C] of images [N, C, H, W], and a black one last."""
    channels = images.shape[1]
    pixels = images.new_zeros((len(images) * images.shape[2] * images.shape[3] + 1, channels))
    pixels[:-1].view(len(images), *images.shape[2:], channels).copy_(images.permute(0, 2, 3, 1))
    return pixels


class InMemoryImages(Dataset[Item]):
    """Small images, uint8 [N, C, H, W]; augmented in batches on the device.

    ``images`` is a view of the pixels, which are stored channels last and followed by a black one
    that pads crops.
    """

    def __init__(
        self,
        images: torch.Tensor | np.ndarray,
        labels: torch.Tensor | np.ndarray,
        description: DatasetDescription,
    ) -> None:
        images, labels = torch.as_tensor(images), torch.as_tensor(labels)
        shape, classes = description.image_shape, description.num_classes
        if images.dtype != torch.uint8 or images.shape[1:] != shape:
            raise UserError(
                f"images of {description.name}: {found_value(images)}, expected grey levels from "
                f"0 to 255, uint8 [N, {', '.join(map(str, shape))}]"
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise UserError(
                f"labels of {description.name}: {found_value(labels)}, expected int64 "
                f"[{len(images)}]"
            )
        if not bool(((labels >= 0) & (labels < classes)).all()):
            raise UserError(
                f"labels of {description.name}: found {labels.min()} to {labels.max()}, expected "
                f"0 to {classes - 1}"
            )
        self._pixels, self.labels, self.description = pixels_of(images), labels, description

    @property
    def images(self) -> torch.Tensor:
        channels, *shape = self.description.image_shape
        return self._pixels[:-1].view(len(self.labels), *shape, channels).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        return self.images[index].contiguous().float() / 255, int(self.labels[index])

    def training_batches(
        self, batches: Indices, device: torch.device, generator: torch.Generator
    ) -> Batches:
        self._move_to(device)
        padding, flip = self.description.crop_padding, self.description.horizontal_flip
        chosen = draw_augmentation(len(self), padding, flip, generator).to(device)
        for indices in batches:
            indices = indices.to(device, non_blocking=True)
            images = augmented(
                self._pixels, self.description.image_shape[1:], indices, chosen[:, indices]
            )
            yield images.float().div_(255), self.labels[indices]

    def evaluation_batches(self, batches: Indices, device: torch.device) -> Batches:
        self._move_to(device)
        for indices in batches:
            indices = indices.to(device, non_blocking=True)
            yield self.images[indices].float() / 255, self.labels[indices]

    def _move_to(self, device: torch.device) -> None:
        """Keep the whole set on the device: CIFAR-10 is 150 MB there, and no batch waits for a
        copy.
        """
        # The first caller may be an evaluation in inference mode, whose tensors training cannot
        # use.
        with torch.inference_mode(False):
            self._pixels, self.labels = self._pixels.to(device), self.labels.to(device)

    def fingerprint(self) -> str:
        return fingerprint_of(self.images, self.labels)


class ImagesOnDemand(InMemoryImages):
    """Small images in files, which are read one by one where single images are asked for, and all
    at once for batches.
    """

    def __init__(self, stored: StoredImages, description: DatasetDescription) -> None:
        self.labels, self.description = torch.tensor(stored.labels), description
        self.stored, self._everything = stored, range(len(stored.labels))

    @cached_property
    def _pixels(self) -> torch.Tensor:  # type: ignore[override]  # cached, it can be written
        images = self.stored.all_pixels(self._everything, self.description.image_shape)
        with torch.inference_mode(False):  # whoever asks first
            return pixels_of(torch.from_numpy(images))

    def __getitem__(self, index: int) -> Item:
        if "_pixels" in vars(self):
            return super().__getitem__(index)
        pixels = self.stored.pixels(index, self.description.image_shape)
        return torch.tensor(pixels).float() / 255, int(self.labels[index])

    def fingerprint(self) -> str:
        return self.stored.remembered("fingerprint", self._everything, super().fingerprint)


class _Photographs(Dataset[Item | UserError]):
    """Photographs, read and passed through one transform. One that cannot be read gives a UserError
    as a value.

    If the error was raised, a DataLoader would hide it in a worker's traceback. With ``epoch_seed``
    each image has a seed for a transform that draws from torch's global generator; with a seed for
    each worker the images would depend on how many workers this machine has.
    """

    def __init__(
        self,
        stored: StoredImages,
        transform: Callable[[Image], torch.Tensor],
        epoch_seed: int | None = None,
    ) -> None:
        self.stored, self.transform, self.epoch_seed = stored, transform, epoch_seed

    def __getitem__(self, index: int) -> Item | UserError:
        try:
            with torch.random.fork_rng(devices=[]):
                if self.epoch_seed is not None:
                    key = (self.epoch_seed, index, Purpose.AUGMENTATION)
                    torch.manual_seed(derive_generator("cpu", *key).initial_seed())
                pixels = self.stored.photograph(
                    index, lambda image: self.transform(image.convert("RGB"))
                )
                return pixels, self.stored.labels[index]
        except UserError as error:
            return error


def _collate(items: list[Item | UserError]) -> list[torch.Tensor] | UserError:
    """A batch, or the first error among its items."""
    errors = [item for item in items if isinstance(item, UserError)]
    return errors[0] if errors else default_collate(items)


class StreamedImages(Dataset[Item]):
    """Photographs read by worker processes, for datasets that do not fit in memory, as a
    ``preparation`` makes them.
    """

    def __init__(
        self, stored: StoredImages, description: DatasetDescription, preparation: Preparation
    ) -> None:
        self.description, self._preparation = description, preparation
        self.stored, self.labels = stored, stored.labels
        self._evaluation = _Photographs(stored, preparation.evaluation)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        item = self._evaluation[index]
        if isinstance(item, UserError):
            raise item
        return item[0].float() / 255, item[1]

    def training_batches(
        self, batches: Indices, device: torch.device, generator: torch.Generator
    ) -> Batches:
        epoch_seed = int(torch.randint(2**62, (), generator=generator))
        transform = self._preparation.training(self.description.horizontal_flip)
        images = _Photographs(self.stored, transform, epoch_seed)
        return self._batches(images, batches, device)

    def evaluation_batches(self, batches: Indices, device: torch.device) -> Batches:
        return self._batches(self._evaluation, batches, device)

    @staticmethod
    def _batches(images: _Photographs, batches: Indices, device: torch.device) -> Batches:
        loader = DataLoader(
            images,
            batch_sampler=[indices.tolist() for indices in batches],
            num_workers=min(8, usable_cpus()),
            pin_memory=device.type == "cuda",
            collate_fn=_collate,
            # for unused seeds of the workers: the global one stays as it is
            generator=torch.Generator(),
        )
        for batch in loader:
            if isinstance(batch, UserError):
                raise batch
            # Moved as bytes, which takes a quarter of the time of floats.
            pixels, labels = (part.to(device, non_blocking=True) for part in batch)
            yield pixels.float().div_(255), labels

    def fingerprint(self) -> str:
        """Of content and preparation."""
        import PIL

        content = self.stored.digest()
        # The version, since versions differ.
        return digest([f"{content}\n{self._preparation}\nPillow {PIL.__version__}"])
