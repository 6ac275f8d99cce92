"""Tiny ImageNet, 200 classes of 64x64 images: the published folder tiny-imagenet-200."""

from pathlib import Path

from smoothadv.datasets import (
    CIFAR_TRAINING,
    DATASETS,
    DEFAULT_DATA_DIR,
    DatasetDescription,
    ImageDataset,
    Source,
    refusing,
)
from smoothadv.datasets.sources.imagenet import OF_TINY
from smoothadv.datasets.stored import ImageFiles, image_files

_DESCRIPTION = DatasetDescription(
    name="tiny-imagenet",
    class_names=OF_TINY,
    image_shape=(3, 64, 64),
    # Of all training pixels, as commonly stated. Another std in use is smaller: the mean of those
    # of single images.
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
    defaults=CIFAR_TRAINING,
)


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    """Labels number the sorted synsets, as for ImageNet; the validation images are for testing, in
    the order of their annotations, or in folders of classes like the training images.
    """
    from smoothadv.datasets.images import ImagesOnDemand

    folder = (data_dir or DEFAULT_DATA_DIR) / "tiny-imagenet-200"
    images = ImageFiles(folder, OF_TINY)
    with refusing(
        f"tiny-imagenet: {folder} (--data-dir names the folder above it) is not as published, with "
        "train/WNID/images/, val/images/ and val/val_annotations.txt, and has no val/WNID/ instead"
    ):
        if split == "test" and not (folder / "val" / OF_TINY[0]).is_dir():
            lines = (folder / "val/val_annotations.txt").read_text().splitlines()
            rows = [line.split("\t") for line in lines]
            images.files = [(folder / "val/images" / row[0], OF_TINY.index(row[1])) for row in rows]
        else:
            folders = [folder / ("val" if split == "test" else split) / name for name in OF_TINY]
            images.files = [
                (path, label)
                for label, of in enumerate(folders)
                for path in image_files(
                    (of / "images" if (of / "images").is_dir() else of).iterdir()
                )
            ]
    return ImagesOnDemand(images, _DESCRIPTION)


DATASETS.register("tiny-imagenet")(
    Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load)
)
