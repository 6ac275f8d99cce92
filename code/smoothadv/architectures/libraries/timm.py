"""``timm:NAME``: the classifiers of PyTorch Image Models, a name of ``timm.list_models()`` or with
a tag.
"""

import math
from contextlib import nullcontext
from typing import Any

from smoothadv.architectures.libraries import (
    LIBRARIES,
    LibraryNetwork,
    hub_asked_once,
    require_known,
)
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.preparation import INTERPOLATIONS, SQUASH, Preparation


@LIBRARIES.register("timm")
def timm_network(
    location: str, pretrained: bool, images: DatasetDescription | None
) -> LibraryNetwork:
    """A network of timm; for ``images`` with their classes and channels, and with their size where
    it has a fixed one.

    timm adapts pretrained weights to another number of channels, and positions to another size.
    """
    import timm
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if ":" not in location:  # else it is on a hub, or in a folder
        require_known(f"timm:{location}", location.partition(".")[0], timm.list_models())
    options = dict[str, Any]()
    if images is not None:
        options = {"num_classes": images.num_classes, "in_chans": images.image_shape[0]}
        if getattr(timm.models.get_pretrained_cfg(location), "fixed_input_size", False):
            options["img_size"] = images.image_shape[1:]
    with hub_asked_once() if pretrained else nullcontext():
        module = timm.create_model(location, pretrained=pretrained, **options)
    subset, config = infer_imagenet_subset(module), timm.data.resolve_model_data_config(module)
    info = ImageNetInfo(subset) if subset else None
    return LibraryNetwork(
        module=module,
        version=f"timm {timm.__version__}",
        class_names=tuple(zip(info.label_descriptions(), info.label_names())) if info else (),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        preparation=_preparation(config),
    )


def _preparation(config: dict[str, Any]) -> Preparation | None:
    """timm's evaluation transform; None where it is another one than a Preparation can be."""
    (_, height, width), share, mode = config["input_size"], config["crop_pct"], config["crop_mode"]
    if height != width or config["interpolation"] not in INTERPOLATIONS:
        return None
    if mode == "squash" and share == 1:
        return Preparation(height, SQUASH, config["interpolation"])
    return (
        Preparation(height, math.floor(height / share), config["interpolation"])
        if mode == "center"
        else None
    )
