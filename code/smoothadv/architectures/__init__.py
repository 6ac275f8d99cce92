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
from smoothadv.architectures.libraries import LIBRARIES, library_network
from smoothadv.architectures.logits import logits_of
from smoothadv.base import plugins
from smoothadv.base.errors import UserError, first_line
from smoothadv.base.registry import Registry, discover
from smoothadv.datasets import DatasetDescription, describe_dataset

ARCHITECTURES: Registry[Callable[[DatasetDescription], nn.Module]] = Registry("architecture")


def names_network(name: str) -> bool:
    """Whether ``name`` is KIND:LOCATION of a known library, or FILE.py:FUNCTION."""
    kind, colon, _ = name.partition(":")
    return plugins.names_function(name) or bool(
        colon and kind in LIBRARIES and name not in ARCHITECTURES
    )


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
    is_new = plugins.names_function(name) and name not in plugins.FUNCTIONS
    return plugins.load(name).name if is_new else require_architecture(name)


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
    name = chosen_architecture(arch)
    description = describe_dataset(dataset) if isinstance(dataset, str) else dataset
    entrance = build_input_layer(input_layer, description)
    if name in ARCHITECTURES:
        return nn.Sequential(entrance, ARCHITECTURES[name](description))
    if name in plugins.FUNCTIONS:
        network = user_network(name, description)
    else:
        network = library_network(name, False, description).module
    return nn.Sequential(entrance, logits_of(network, description, name)).train()


def pretrained_architecture(
    arch: str, description: DatasetDescription, input_layer: str
) -> tuple[DatasetDescription, nn.Sequential]:
    """As ``get_architecture``, with the weights of the library of ``arch``, but for a last layer of
    other classes.

    The description has the library's mean and standard deviation. UserError where there are no such
    weights.
    """
    if arch.partition(":")[0] not in LIBRARIES:
        raise UserError(
            f"--pretrained: {arch} is not of a library that has weights: {', '.join(LIBRARIES)}"
        )
    found = library_network(arch, pretrained=True, images=description)
    if found.mean is not None and len(found.mean) == description.image_shape[0]:
        description = replace(description, mean=found.mean, std=found.std)
    entrance = build_input_layer(input_layer, description)
    network = logits_of(found.module, description, arch)
    return description, nn.Sequential(entrance, network).train()


def user_network(name: str, description: DatasetDescription) -> nn.Module:
    """What the function FILE.py:FUNCTION, which is loaded, returns for a description; UserError
    unless a module.
    """
    try:
        network = plugins.FUNCTIONS[name](description)
    except Exception as error:  # of the user's code
        raise UserError(
            f"{name} fails for '{description.name}': {type(error).__name__}: {first_line(error)} "
            "(it is called with a DatasetDescription: docs/networks.md)"
        ) from error
    if not isinstance(network, nn.Module):
        raise UserError(f"{name} returns a {type(network).__name__}, expected a torch.nn.Module")
    return network


discover(__name__, __path__)

__all__ = ["ARCHITECTURES", "INPUT_LAYERS", "LIBRARIES", "get_architecture"]
