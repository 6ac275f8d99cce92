"""What every dataset provides: single images, and batches for training and evaluation."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from smoothadv.datasets.augmentation import augmented, draw_augmentation, pixels_of
from smoothadv.datasets.description import DatasetDescription
from smoothadv.errors import UserError
from smoothadv.noise import Purpose, derive_generator

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class ImageDataset(Protocol):
    """The interface that training, certification and prediction rely on.

    Items are (float32 image [C, H, W] in [0, 1], int label) without augmentation. Batches are
    (images [B, C, H, W], labels int64 [B]) on the device asked for.
    """

    description: DatasetDescription

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]: ...

    def training_batches(
        self, batches: Sequence[torch.Tensor], device: torch.device, generator: torch.Generator
    ) -> Batches:
        """The images of each of ``batches``, tensors of indices int64 [B] on the CPU, augmented.

        How an image is augmented is a function of the state of ``generator`` (a CPU generator) and of its index: in
        which batch it is, and what other batches are asked for, does not matter.
        """

    def evaluation_batches(self, batches: Sequence[torch.Tensor], device: torch.device) -> Batches:
        """The images of each of ``batches``, as above, unaugmented."""

    def fingerprint(self) -> str:
        """A hash that changes whenever an image, a label or their order does."""


class InMemoryImages(Dataset):
    """Small images, uint8 [N, C, H, W]; augmented in batches on the device.

    ``images`` is a view of the pixels, which lie channels last, followed by one black pixel for the padding of crops.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, description: DatasetDescription) -> None:
        assert images.dtype == torch.uint8 and images.shape[1:] == description.image_shape
        assert labels.dtype == torch.int64 and labels.shape == images.shape[:1]
        self._pixels, self.labels, self.description = pixels_of(images), labels, description

    @property
    def images(self) -> torch.Tensor:
        channels, *shape = self.description.image_shape
        return self._pixels[:-1].view(len(self.labels), *shape, channels).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index].contiguous().float() / 255, int(self.labels[index])

    def training_batches(
        self, batches: Sequence[torch.Tensor], device: torch.device, generator: torch.Generator
    ) -> Batches:
        self._move_to(device)
        padding, flip = self.description.crop_padding, self.description.horizontal_flip
        chosen = draw_augmentation(len(self), padding, flip, generator).to(device)
        for indices in batches:
            indices = indices.to(device, non_blocking=True)
            images = augmented(self._pixels, self.description.image_shape[1:], indices, chosen.of(indices))
            yield images.float().div_(255), self.labels[indices]

    def evaluation_batches(self, batches: Sequence[torch.Tensor], device: torch.device) -> Batches:
        self._move_to(device)
        for indices in batches:
            indices = indices.to(device, non_blocking=True)
            yield self.images[indices].float() / 255, self.labels[indices]

    def _move_to(self, device: torch.device) -> None:
        """Keep the whole set on the device: CIFAR-10 is 150 MB there, and no batch waits for a copy."""
        # The evaluation that asks first may run in inference mode, whose tensors training cannot use.
        with torch.inference_mode(False):
            self._pixels, self.labels = self._pixels.to(device), self.labels.to(device)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        digest.update(self.images.cpu().contiguous().numpy())
        digest.update(self.labels.cpu().contiguous().numpy())
        return digest.hexdigest()


class _WithTransform(Dataset):
    """The files of an image folder seen through one transform."""

    def __init__(self, files: list[tuple[str, int]], load, transform) -> None:
        self.files, self.load, self.transform = files, load, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        try:
            image = self.load(path)
        except Exception as error:  # Pillow meets a damaged file with nearly any exception
            reason = " ".join(str(error).split())
            raise UserError(f"{path} cannot be read as an image: {reason}") from error
        return self.transform(image), label


class _Augmented(_WithTransform):
    """As above, for a transform that draws from torch's global generator: each image of each epoch has its seed.

    A worker's own seed would let the images depend on how many workers this machine has.
    """

    def __init__(self, images: _WithTransform, epoch_seed: int) -> None:
        super().__init__(images.files, images.load, images.transform)
        self.epoch_seed = epoch_seed

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_generator("cpu", self.epoch_seed, index, Purpose.AUGMENTATION).initial_seed())
            return super().__getitem__(index)


class _ErrorsAsValues(Dataset):
    """Items, or the UserError in their place: a DataLoader would bury an exception in a worker's traceback."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int] | UserError:
        try:
            return self.dataset[index]
        except UserError as error:
            return error


def _collate(items: list) -> list[torch.Tensor] | UserError:
    """A batch, or the first error among its items."""
    return next((item for item in items if isinstance(item, UserError)), None) or default_collate(items)


def _workers() -> int:
    """Processes that read files: one for each usable core, at most 8, shared by the processes that train here."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


class StreamedImages(Dataset):
    """Images read from files by worker processes, for datasets that do not fit in memory.

    ``files`` are (path, label) pairs; ``load`` reads a path as a PIL image; the two transforms give uint8 [C, H, W].
    """

    def __init__(
        self,
        files: list[tuple[str, int]],
        load,
        training_transform,
        evaluation_transform,
        description: DatasetDescription,
    ) -> None:
        self.description = description
        self._training = _WithTransform(files, load, training_transform)
        self._evaluation = _WithTransform(files, load, evaluation_transform)

    def __len__(self) -> int:
        return len(self._evaluation)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels, label = self._evaluation[index]
        return pixels.float() / 255, label

    def training_batches(
        self, batches: Sequence[torch.Tensor], device: torch.device, generator: torch.Generator
    ) -> Batches:
        epoch_seed = int(torch.randint(2**62, (), generator=generator))
        return self._batches(_Augmented(self._training, epoch_seed), batches, device)

    def evaluation_batches(self, batches: Sequence[torch.Tensor], device: torch.device) -> Batches:
        return self._batches(self._evaluation, batches, device)

    @staticmethod
    def _batches(images: Dataset, batches: Sequence[torch.Tensor], device: torch.device) -> Batches:
        loader = DataLoader(
            _ErrorsAsValues(images),
            batch_sampler=[indices.tolist() for indices in batches],
            num_workers=_workers(),
            pin_memory=device.type == "cuda",
            collate_fn=_collate,
            generator=torch.Generator(),  # unused seeds of the workers; else the global one would move
        )
        for batch in loader:
            if isinstance(batch, UserError):
                raise batch
            # As bytes, which take a quarter of the time to the device.
            pixels, labels = (part.to(device, non_blocking=True) for part in batch)
            yield pixels.float().div_(255), labels

    def fingerprint(self) -> str:
        """Of the relative names, sizes and labels: reading all of ImageNet to start a job would take hours."""
        digest = hashlib.sha256()
        for path, label in self._evaluation.files:
            name = "/".join(path.replace(os.sep, "/").split("/")[-2:])
            digest.update(f"{name}\t{os.path.getsize(path)}\t{label}\n".encode())
        return digest.hexdigest()
