"""``torchvision:NAME``: torchvision's classifiers, with their default weights."""

from torch import nn

from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork, fetched
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.preparation import Preparation


@LIBRARIES.register("torchvision")
def torchvision_network(
    location: str, pretrained: bool, images: DatasetDescription | None
) -> LibraryNetwork:
    """A network of ``torchvision.models``, with its default weights where it is pretrained."""
    import torchvision
    from torchvision import models

    name = f"torchvision:{location}"
    weights = models.get_model_weights(location).DEFAULT
    names, transform = weights.meta["categories"], weights.transforms()
    classes = len(names) if images is None else images.num_classes
    if pretrained:
        module = fetched(name, lambda: models.get_model(location, weights=weights), images)
    else:
        side = images.image_shape[1] if images else weights.meta["min_size"][0]
        options = {"image_size": side} if location.startswith("vit_") else {}
        options |= (
            {"init_weights": True} if location in ("googlenet", "inception_v3") else {}
        )  # else they warn
        module = models.get_model(location, weights=None, num_classes=classes, **options)
    if hasattr(
        module, "aux_logits"
    ):  # of googlenet and inception_v3: only training would return them
        module.aux_logits = module.aux1 = module.aux2 = module.AuxLogits = None
        module.transform_input = (
            True  # as with pretrained weights, from which a checkpoint may have been trained
        )
    if pretrained and classes != len(names):
        _replace_last_layer(module, classes)
    size, resize = transform.crop_size[0], transform.resize_size[0]
    return LibraryNetwork(
        module=module,
        version=f"torchvision {torchvision.__version__}",
        class_names=tuple((text,) for text in names),
        mean=tuple(transform.mean),
        std=tuple(transform.std),
        preparation=Preparation(size, max(size, resize), transform.interpolation.value),
    )


def _replace_last_layer(network: nn.Module, classes: int) -> None:
    """Put a new linear layer, for this number of classes, in place of the last one."""
    name, last = [
        (name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)
    ][-1]
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Linear(last.in_features, classes))
