"""ImageNet (ILSVRC 2012) from a folder with train/ and val/, a folder per class in each."""

import os
from functools import cache
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.datasets import DATASETS, DEFAULT_DATA_DIR, ImageDataset, Source, photographs
from smoothadv.datasets.preparation import Preparation

_CLASSES = 1000
_FOLDERS = {"train": "train", "test": "val"}
_SIZE = 224
_DESCRIPTION = photographs("imagenet", tuple(f"class {label}" for label in range(_CLASSES)), _SIZE)


@cache
def _files(folder: Path) -> list[tuple[str, int]]:
    """(path, label) of all images; labels number the sorted class folders, as in torchvision."""
    from torchvision.datasets import ImageFolder

    try:
        found = ImageFolder(str(folder))
    except OSError as error:
        raise UserError(
            f"imagenet needs images in the folder {folder} ({' '.join(str(error).split())}): set "
            "IMAGENET_DIR or --data-dir to the folder that holds train/ and val/ with one folder "
            "per class"
        ) from error
    if len(found.classes) != _CLASSES:
        raise UserError(
            f"imagenet folder {folder} holds {len(found.classes)} class folders, not {_CLASSES}: "
            "the labels would be wrong (for a subset of classes use imagefolder:PATH)"
        )
    return found.samples


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    from smoothadv.datasets.images import StreamedImages

    root = data_dir or Path(os.environ.get("IMAGENET_DIR") or DEFAULT_DATA_DIR / "imagenet")
    return StreamedImages(
        _files((root / _FOLDERS[split]).resolve()), Preparation(_SIZE), _DESCRIPTION
    )


DATASETS.register("imagenet")(Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load))
