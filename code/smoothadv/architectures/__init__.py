"""Base classifiers: an input layer, followed by a network; one family per file.

``get_architecture`` returns ``Sequential(input layer, network)``: it takes images in [0, 1] (plus noise) and returns
logits, and its state dict has the released checkpoints' keys (``1.conv1.weight``, ...; the input layer's constants are
buffers that are not saved there). A family registers builders, functions of a DatasetDescription, in ``ARCHITECTURES``.
"""

from collections.abc import Callable

from torch import nn

from smoothadv.architectures.input_layers import INPUT_LAYERS, build_input_layer
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.description import DatasetDescription
from smoothadv.registry import Registry, discover

ARCHITECTURES: Registry[Callable[[DatasetDescription], nn.Module]] = Registry("architecture")


def get_architecture(arch: str, dataset: str | DatasetDescription, input_layer: str = "normalize") -> nn.Sequential:
    """A freshly initialised base classifier for ``dataset``, in train mode.

    ``arch`` is a name in ARCHITECTURES; ``dataset`` a dataset's name or description; ``input_layer`` is
    "normalize" ((x - mean) / std) or "center" (x - mean). Maps float images [B, C, H, W] to logits
    [B, num_classes]. UserError on unknown names or where the dataset has no constants to normalize with.
    """
    builder = ARCHITECTURES[arch]
    description = describe_dataset(dataset) if isinstance(dataset, str) else dataset
    return nn.Sequential(build_input_layer(input_layer, description), builder(description))


discover(__name__, __path__)

__all__ = ["ARCHITECTURES", "INPUT_LAYERS", "get_architecture"]
