"""CIFAR-10, downloaded by torchvision into the data folder."""

from smoothadv.datasets import (
    CIFAR_MEAN,
    CIFAR_STD,
    CIFAR_TRAINING,
    DATASETS,
    DatasetDescription,
)
from smoothadv.datasets.downloaded import downloaded

_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
DESCRIPTION = DatasetDescription(
    "cifar10", _CLASSES, (3, 32, 32), CIFAR_MEAN, CIFAR_STD, CIFAR_TRAINING
)

DATASETS.register("cifar10")(downloaded("CIFAR10", DESCRIPTION))
