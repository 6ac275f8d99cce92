"""Tiny ImageNet, 200 classes of 64x64 images: the published folder tiny-imagenet-200."""

from pathlib import Path

from smoothadv.base.errors import UserError, first_line
from smoothadv.datasets import (
    CIFAR_TRAINING,
    DATASETS,
    DEFAULT_DATA_DIR,
    DatasetDescription,
    ImageDataset,
    Source,
)
from smoothadv.datasets.imagefolder import FolderImages

_CLASSES = 200
_DESCRIPTION = DatasetDescription(
    name="tiny-imagenet",
    class_names=tuple(f"class {label}" for label in range(_CLASSES)),
    image_shape=(3, 64, 64),
    # Of all training pixels, as commonly stated. Another std in use is smaller: the mean of those
    # of single images.
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
    defaults=CIFAR_TRAINING,
)


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    """Labels number the sorted names of classes, as for ImageNet; the validation images are for
    testing, in the order of their annotations.
    """
    from smoothadv.datasets.images import ImagesOnDemand

    folder = (data_dir or DEFAULT_DATA_DIR) / "tiny-imagenet-200"
    try:
        classes = sorted((folder / "wnids.txt").read_text().split())
        if len(classes) != _CLASSES:
            raise ValueError(f"wnids.txt holds {len(classes)} classes, not {_CLASSES}")
        if split == "train":
            folders = [folder / "train" / name / "images" for name in classes]
            files = [
                (path, label) for label, of in enumerate(folders) for path in sorted(of.iterdir())
            ]
        else:
            lines = (folder / "val/val_annotations.txt").read_text().splitlines()
            rows = [line.split("\t") for line in lines]
            files = [(folder / "val/images" / row[0], classes.index(row[1])) for row in rows]
    except (OSError, ValueError, IndexError) as error:
        raise UserError(
            f"tiny-imagenet: {folder} is not as published, with wnids.txt, train/WNID/images/, "
            f"val/images/ and val/val_annotations.txt: {first_line(error)}; --data-dir names the "
            "folder above it"
        ) from error
    images = FolderImages(folder, classes)
    images.files = files
    return ImagesOnDemand(images, _DESCRIPTION)


DATASETS.register("tiny-imagenet")(
    Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load)
)
