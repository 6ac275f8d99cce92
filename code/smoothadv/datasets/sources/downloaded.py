"""CIFAR-10, CIFAR-100 with its 100 fine classes, MNIST, Fashion-MNIST and SVHN (Street View House
Numbers, cropped to 32x32), which torchvision downloads into the data folder, or finds there.
"""

from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.datasets import (
    CIFAR_MEAN,
    CIFAR_STD,
    CIFAR_TRAINING,
    DATASETS,
    DEFAULT_DATA_DIR,
    DatasetDescription,
    ImageDataset,
    Source,
    TrainingDefaults,
)
from smoothadv.datasets.arrays import in_memory

_CIFAR10_CLASSES = (
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
CIFAR10 = DatasetDescription(
    "cifar10", _CIFAR10_CLASSES, (3, 32, 32), CIFAR_MEAN, CIFAR_STD, CIFAR_TRAINING
)
_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle
    bowl boy bridge bus butterfly camel can castle caterpillar cattle
    chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket
    rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
# Constants and schedule of Jeong et al. (2023, CAT-RS), whose released models are of ResNet-110.
_CIFAR100 = DatasetDescription(
    name="cifar100",
    class_names=tuple(_CIFAR100_CLASSES.split()),
    image_shape=(3, 32, 32),
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
    defaults=CIFAR_TRAINING,
)
# Means and standard deviations are those of all training pixels: of MNIST as in PyTorch's example,
# of Fashion-MNIST as commonly stated. Published models of smoothing get images in [0, 1] without
# them, --input-layer none, and without augmentation.
_MNIST = DatasetDescription(
    name="mnist",
    class_names=tuple("0123456789"),
    image_shape=(1, 28, 28),
    mean=(0.1307,),
    std=(0.3081,),
    # Jeong and Shin (2020, consistency), and Jeong et al. (2021, SmoothMix).
    defaults=TrainingDefaults(batch=256, epochs=90, learning_rate=0.01, learning_rate_step=30),
    crop_padding=0,
    horizontal_flip=False,
)
_FASHION = DatasetDescription(
    name="fashion-mnist",
    class_names=(
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
    image_shape=(1, 28, 28),
    mean=(0.2860,),
    std=(0.3530,),
    # Jeong et al. (2023, CAT-RS).
    defaults=TrainingDefaults(batch=256, epochs=150, learning_rate=0.01, learning_rate_step=50),
    crop_padding=0,
    horizontal_flip=False,
)
_SVHN = DatasetDescription(
    name="svhn",
    class_names=tuple("0123456789"),
    image_shape=(3, 32, 32),
    # Of all pixels of the 73,257 training images, as commonly stated.
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    # Zhai et al. (2020, MACER) train the network of CIFAR-10 here as they do there. They mirror
    # images, too; but a mirrored digit is none.
    defaults=CIFAR_TRAINING,
    horizontal_flip=False,
)


def _files(kind: Any, split: str) -> dict[str, str]:
    """The published files of a class of torchvision.datasets: MD5 by path below the data folder."""
    if hasattr(kind, "resources"):
        return {f"{kind.__name__}/raw/{name}": md5 for name, md5 in kind.resources}
    if hasattr(kind, "split_list"):
        _, name, md5 = kind.split_list[split]
        return {name: md5}
    return {kind.filename: kind.tgz_md5}


def _downloaded(kind: str, description: DatasetDescription) -> Source:
    """The source of the images of the class ``kind`` of torchvision.datasets: CIFAR10, CIFAR100,
    MNIST, FashionMNIST or SVHN.
    """

    def load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
        from torchvision import datasets
        from torchvision.datasets.utils import check_integrity

        folder, found = data_dir or DEFAULT_DATA_DIR, getattr(datasets, kind)
        splits = {"split": split} if kind == "SVHN" else {"train": split == "train"}
        try:
            raw = found(str(folder), download=True, **splits)
            labels = raw.labels if kind == "SVHN" else raw.targets
            return in_memory(np.asarray(raw.data), np.asarray(labels), description)
        except Exception as error:  # a damaged file that has no MD5 can raise nearly anything
            files = _files(found, split)
            batches = (*getattr(found, "train_list", ()), *getattr(found, "test_list", ()))
            extracted = {f"{found.base_folder}/{name}": md5 for name, md5 in batches}
            damaged = [
                f"{folder / name} is damaged"
                for name, md5 in {**files, **extracted}.items()
                if (folder / name).exists() and not check_integrity(folder / name, md5)
            ]
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"{description.name}: {[*damaged, f'it is not, or not whole, in {folder}'][0]}, "
                f"and could not be downloaded ({reason}): put {', '.join(files)} into {folder}, in "
                "place of what is there, or name another folder with --data-dir"
            ) from error

    return Source(describe=lambda location, data_dir: description, load=load)


DATASETS.register("cifar10")(_downloaded("CIFAR10", CIFAR10))
DATASETS.register("cifar100")(_downloaded("CIFAR100", _CIFAR100))
DATASETS.register("mnist")(_downloaded("MNIST", _MNIST))
DATASETS.register("fashion-mnist")(_downloaded("FashionMNIST", _FASHION))
DATASETS.register("svhn")(_downloaded("SVHN", _SVHN))
