"""MNIST and Fashion-MNIST, downloaded by torchvision into the data folder."""

from smoothadv.datasets import DATASETS, DatasetDescription, TrainingDefaults
from smoothadv.datasets.downloaded import downloaded

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

DATASETS.register("mnist")(downloaded("MNIST", _MNIST))
DATASETS.register("fashion-mnist")(downloaded("FashionMNIST", _FASHION))
