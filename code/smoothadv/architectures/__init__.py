"""Base classifiers: an input layer, followed by a network; one family per file.

``get_architecture`` returns ``Sequential(input layer, network)``: it takes images in [0, 1] (plus
noise) and returns logits, and its state dict has the released checkpoints' keys
(``1.conv1.weight``, ...; the input layer's constants are buffers that are not saved there). A
family registers builders, functions of a DatasetDescription, in ``ARCHITECTURES``. ``libraries``
has networks of libraries, like ``timm:resnet18``, and FILE.py:FUNCTION names a builder of the
user's own.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from smoothadv.architectures.input_layers import INPUT_LAYERS, build_input_layer
from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork, library_network
from smoothadv.architectures.logits import logits_of
from smoothadv.base import plugins
from smoothadv.base.errors import UserError, first_line
from smoothadv.base.registry import Registry, discover
from smoothadv.datasets import DatasetDescription, describe_dataset

ARCHITECTURES: Registry[Callable[[DatasetDescription], nn.Module]] = Registry("architecture")


def require_architecture(name: str) -> str:
    """``name`` if it is that of an architecture, without loading code of the user's;
    UnknownNameError otherwise.
    """
    kind, colon, _ = name.partition(":")
    if plugins.names_function(name):
        plugins.FUNCTIONS.require(name)
    elif colon and name not in ARCHITECTURES:
        LIBRARIES.require(kind)
    elif name.endswith(".py"):
        raise UserError(f"{name} is a file: name its function, too, as in {name}:FUNCTION")
    else:
        ARCHITECTURES.require(name)
    return name


def chosen_architecture(name: str) -> str:
    """The name by which records know the architecture that a user names; loads the file of
    FILE.py:FUNCTION.

    UserError where there is none of this name or the file cannot be loaded.
    """
    return require_architecture(plugins.registered(name))


def get_architecture(
    arch: str, dataset: str | DatasetDescription, input_layer: str = "normalize"
) -> nn.Sequential:
    """A freshly initialised base classifier for ``dataset``, in train mode.

    ``arch`` is a name in ARCHITECTURES, KIND:LOCATION of a library or FILE.py:FUNCTION; ``dataset``
    a dataset's name or description; ``input_layer`` is "normalize" ((x - mean) / std), "center"
    (x - mean) or "none". Maps float images [B, C, H, W] to logits [B, num_classes]. UserError on
    unknown names, where the dataset has no constants to normalize with, or where a network of a
    library or of the user's does not fit the images.
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
    name = chosen_architecture(arch)
    if name in ARCHITECTURES:
        network = ARCHITECTURES[name](description)
        return description, nn.Sequential(build_input_layer(input_layer, description), network)
    found = named_network(name, pretrained, description)
    if pretrained and found.mean is not None and len(found.mean) == description.image_shape[0]:
        description = replace(description, mean=found.mean, std=found.std)
    network = logits_of(found.module, description, name)
    entrance = build_input_layer(input_layer, description)
    return description, nn.Sequential(entrance, network).train()


def named_network(
    name: str, pretrained: bool, description: DatasetDescription | None
) -> LibraryNetwork:
    """As ``library_network``; also what the function FILE.py:FUNCTION, which is loaded, returns for
    a description. UserError unless that is a module.
    """
    if name not in plugins.FUNCTIONS or description is None:
        return library_network(name, pretrained, description)
    try:
        network = plugins.FUNCTIONS[name](description)
    except Exception as error:  # of the user's code
        raise UserError(
            f"{name} fails for '{description.name}': {type(error).__name__}: {first_line(error)} "
            "(it is called with a DatasetDescription: docs/networks.md)"
        ) from error
    if not isinstance(network, nn.Module):
        raise UserError(f"{name} returns a {type(network).__name__}, expected a torch.nn.Module")
    return LibraryNetwork(network, "plug-in", tuple((name,) for name in description.class_names))


discover(__name__, __path__)

__all__ = ["ARCHITECTURES", "INPUT_LAYERS", "LIBRARIES", "get_architecture"]
