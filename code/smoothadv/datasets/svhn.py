"""Street View House Numbers, cropped to 32x32, downloaded by torchvision into the data folder."""

from smoothadv.datasets import CIFAR_TRAINING, DATASETS, DatasetDescription
from smoothadv.datasets.downloaded import downloaded

_DESCRIPTION = DatasetDescription(
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

DATASETS.register("svhn")(downloaded("SVHN", _DESCRIPTION))
