"""What is known of a dataset without its images: names, shapes, constants, training defaults. No
torch.
"""

from dataclasses import dataclass

import numpy as np

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
CIFAR_RADII = tuple(0.25 * step for step in range(10))
"""SmoothAdv, table 2: CIFAR-10; and 0."""
IMAGENET_RADII = tuple(0.5 * step for step in range(8))
"""SmoothAdv, table 1: ImageNet; and 0."""


@dataclass(frozen=True)
class DatasetDescription:
    """Facts about a dataset.

    ``image_shape`` is (C, H, W); ``mean`` and ``std`` are per channel on images in [0, 1], None
    where they cannot be known (an image folder without training images). Augmentation is a random
    crop after zero padding by ``crop_padding`` pixels and, if ``horizontal_flip``, a mirror image
    with probability 1/2. ``radii`` are the columns of tables of certified accuracy.
    """

    name: str
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    defaults: TrainingDefaults
    crop_padding: int = 4
    horizontal_flip: bool = True
    radii: tuple[float, ...] = CIFAR_RADII

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


def photographs(name: str, class_names: tuple[str, ...], size: int) -> DatasetDescription:
    """Photographs prepared to ``size`` x ``size`` pixels: with the constants and the training
    defaults of ImageNet.
    """
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return DatasetDescription(
        name, class_names, (3, size, size), mean, std, IMAGENET_TRAINING, radii=IMAGENET_RADII
    )


def spread(images: int) -> range:
    """Of so many images, those that decide the constants: evenly spaced, of all classes, enough for
    4 decimals.
    """
    return range(0, images, -(-images // 10_000))


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
