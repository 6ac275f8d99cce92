"""Base classifiers: an input layer, followed by a network; one family per file.

``get_architecture`` returns ``Sequential(input layer, network)``: it takes images in [0, 1] (plus
noise) and returns logits, and its state dict has the released checkpoints' keys
(``1.conv1.weight``, ...; the input layer's constants are buffers that are not saved there). A
family registers builders, functions of a DatasetDescription, in ``ARCHITECTURES``. ``libraries``
has networks of libraries, like ``timm:resnet18``.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from smoothadv.architectures.input_layers import INPUT_LAYERS, build_input_layer
from smoothadv.architectures.libraries import LIBRARIES, library_network
from smoothadv.architectures.logits import logits_of
from smoothadv.base import plugins
from smoothadv.base.errors import UserError
from smoothadv.base.registry import Registry, discover
from smoothadv.datasets import DatasetDescription, describe_dataset

ARCHITECTURES: Registry[Callable[[DatasetDescription], nn.Module]] = Registry("architecture")


def require_architecture(name: str) -> str:
    """``name`` if it is that of an architecture; UserError otherwise."""
    plugins.refuse_code(name)
    kind, colon, _ = name.partition(":")
    if colon and name not in ARCHITECTURES:
        LIBRARIES.require(kind)
    else:
        ARCHITECTURES.require(name)
    return name


def get_architecture(
    arch: str, dataset: str | DatasetDescription, input_layer: str = "normalize"
) -> nn.Sequential:
    """A freshly initialised base classifier for ``dataset``, in train mode.

    ``arch`` is a name in ARCHITECTURES, or KIND:LOCATION of a library; ``dataset`` a dataset's name
    or description; ``input_layer`` is "normalize" ((x - mean) / std), "center" (x - mean) or
    "none". Maps float images [B, C, H, W] to logits [B, num_classes]. UserError on unknown names,
    where the dataset has no constants to normalize with, or where a network of a library does not
    fit the images.
    """
    description = describe_dataset(dataset) if isinstance(dataset, str) else dataset
    return made_architecture(arch, description, input_layer)[1]


def made_architecture(
    arch: str, description: DatasetDescription, input_layer: str, pretrained: bool = False
) -> tuple[DatasetDescription, nn.Sequential]:
    """As ``get_architecture``; ``pretrained``, with the weights of the library of ``arch``, but for
    a last layer of other classes.

    The description then has the library's mean and standard deviation. UserError where there are no
    such weights.
    """
    if pretrained and arch.partition(":")[0] not in LIBRARIES:
        raise UserError(
            f"--pretrained: {arch} is not of a library that has weights: {', '.join(LIBRARIES)}"
        )
    if require_architecture(arch) in ARCHITECTURES:
        network = ARCHITECTURES[arch](description)
        return description, nn.Sequential(build_input_layer(input_layer, description), network)
    found = library_network(arch, pretrained, description)
    if pretrained and found.mean is not None and len(found.mean) == description.image_shape[0]:
        description = replace(description, mean=found.mean, std=found.std)
    network = logits_of(found.module, description, arch)
    entrance = build_input_layer(input_layer, description)
    return description, nn.Sequential(entrance, network).train()


discover(__name__, __path__)

__all__ = ["ARCHITECTURES", "INPUT_LAYERS", "LIBRARIES", "get_architecture"]
