"""``torchvision:NAME``: torchvision's classifiers, with their default weights."""

from torch import nn

from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork, require_known
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.preparation import Preparation


@LIBRARIES.register("torchvision")
def torchvision_network(
    location: str, pretrained: bool, images: DatasetDescription | None
) -> LibraryNetwork:
    """A network of ``torchvision.models``, with its default weights where it is pretrained."""
    import torchvision
    from torchvision import models

    require_known(f"torchvision:{location}", location.lower(), models.list_models())
    weights = models.get_model_weights(location).DEFAULT
    names, transform = weights.meta["categories"], weights.transforms()
    classes = len(names) if images is None else images.num_classes
    if pretrained:
        module = models.get_model(location, weights=weights)
    else:
        side = images.image_shape[1] if images else weights.meta["min_size"][0]
        options = {"image_size": side} if location.startswith("vit_") else {}
        if location in ("googlenet", "inception_v3"):
            options = {"init_weights": True}  # else they warn
        module = models.get_model(location, weights=None, num_classes=classes, **options)
    if hasattr(module, "aux_logits"):
        # Of googlenet and inception_v3: only training would return them.
        module.aux_logits = module.aux1 = module.aux2 = module.AuxLogits = None
        # As with pretrained weights, from which a checkpoint may have been trained.
        module.transform_input = True
    if pretrained and classes != len(names):
        linear = [one for one in module.named_modules() if isinstance(one[1], nn.Linear)]
        name, last = linear[-1]
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, nn.Linear(last.in_features, classes))
    size, resize = transform.crop_size[0], transform.resize_size[0]
    return LibraryNetwork(
        module=module,
        version=f"torchvision {torchvision.__version__}",
        class_names=tuple((text,) for text in names),
        mean=tuple(transform.mean),
        std=tuple(transform.std),
        preparation=Preparation(size, max(size, resize), transform.interpolation.value),
    )
