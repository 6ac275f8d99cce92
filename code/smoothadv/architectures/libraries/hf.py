"""``hf:PATH_OR_NAME``: image classifiers of the library transformers, from a folder or from the
Hugging Face hub.
"""

from typing import Any

from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork, hub_asked_once
from smoothadv.base.errors import UserError, warn
from smoothadv.base.files import digest
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.preparation import SQUASH, Preparation

_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
_WITHOUT_CROP = 384
_NOT_OF_THE_FUNCTION = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@LIBRARIES.register("hf")
@hub_asked_once()
def hf_network(
    location: str, pretrained: bool, images: DatasetDescription | None
) -> LibraryNetwork:
    """A network that ``transformers.AutoModelForImageClassification`` makes; code beside the
    weights is never run.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForImageClassification
    from transformers.image_processing_base import ImageProcessingMixin

    name = f"hf:{location}"
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # of a new last layer
    config = AutoConfig.from_pretrained(location)
    names = [text for _, text in sorted(config.id2label.items())]
    if images is not None:
        config.num_labels = images.num_classes
    if pretrained:
        fit = {
            "config": config,
            "ignore_mismatched_sizes": images is not None,
            "output_loading_info": True,
        }
        module, loaded = AutoModelForImageClassification.from_pretrained(location, **fit)
        if absent := ", ".join(sorted(loaded["missing_keys"])[:3]):
            if images is None:
                raise UserError(f"{name} has no weights of {absent}: it is no trained classifier")
            warn(f"{name} has no weights of {absent}: these start at random")
    else:
        shape = images.image_shape if images else ()
        for field, value in zip(("num_channels", "image_size"), shape):
            if hasattr(config, field):
                setattr(config, field, value)
        module = AutoModelForImageClassification.from_config(config)
    try:
        processor = ImageProcessingMixin.get_image_processor_dict(location)[0]
    except OSError:  # there is none
        processor = {}
    if pretrained and any(
        map(processor.get, ("do_flip_channel_order", "rescale_offset", "include_top"))
    ):
        raise UserError(
            f"{name} needs channels in another order or on another scale, which is not offered"
        )
    facts = [one for one in sorted(config.to_dict().items()) if one[0] not in _NOT_OF_THE_FUNCTION]
    known = not all(text == f"LABEL_{number}" for number, text in enumerate(names))
    return LibraryNetwork(
        module=module.float(),
        version=f"transformers {transformers.__version__}, configuration {digest([repr(facts)])}",
        class_names=tuple((text,) for text in names) if known else (),
        mean=_constants(processor, "image_mean"),
        std=_constants(processor, "image_std"),
        preparation=_preparation(processor),
    )


def _constants(processor: dict[str, Any], field: str) -> tuple[float, ...] | None:
    return (
        tuple(processor[field])
        if processor.get("do_normalize", True) and processor.get(field)
        else None
    )


def _preparation(processor: dict[str, Any]) -> Preparation | None:
    """The transform of preprocessor_config.json; None where it is another one than a Preparation
    can be.
    """
    sizes: list[Any] = [processor.get("size") or {}, processor.get("crop_size") or {}]
    size, crop = (
        dict[str, Any](height=one, width=one) if isinstance(one, int) else one for one in sizes
    )
    edge, side, resample = (
        size.get("shortest_edge"),
        crop.get("height", 0),
        processor.get("resample", 2),
    )
    if not processor.get("do_resize", True) or not 0 <= resample < len(_FILTERS):
        return None
    if edge and processor.get("crop_pct"):  # ConvNeXt's
        return Preparation(
            edge,
            int(edge / processor["crop_pct"]) if edge < _WITHOUT_CROP else SQUASH,
            _FILTERS[resample],
        )
    if processor.get("do_center_crop"):
        fits = side and edge and side == crop.get("width") and edge >= side
        return Preparation(side, edge, _FILTERS[resample]) if fits else None
    side = size.get("height")
    return (
        Preparation(side, SQUASH, _FILTERS[resample])
        if side and side == size.get("width")
        else None
    )
