"""CIFAR-100 with its 100 fine classes, downloaded by torchvision into the data folder."""

from smoothadv.datasets import CIFAR_TRAINING, DATASETS, DatasetDescription
from smoothadv.datasets.downloaded import downloaded

_CLASSES = """
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
_DESCRIPTION = DatasetDescription(
    name="cifar100",
    class_names=tuple(_CLASSES.split()),
    image_shape=(3, 32, 32),
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
    defaults=CIFAR_TRAINING,
)

DATASETS.register("cifar100")(downloaded("CIFAR100", _DESCRIPTION))
