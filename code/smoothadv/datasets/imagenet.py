"""ImageNet (ILSVRC 2012) from a folder with train/ and val/, a folder per class in each."""

import os
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.base.files import digest
from smoothadv.datasets import DATASETS, DEFAULT_DATA_DIR, ImageDataset, Source, photographs
from smoothadv.datasets.image_files import ImageFiles, class_folders
from smoothadv.datasets.preparation import Preparation

_CLASSES = 1000
_FOLDERS = {"train": "train", "test": "val"}
_SIZE = 224
_DESCRIPTION = photographs("imagenet", tuple(f"class {label}" for label in range(_CLASSES)), _SIZE)


class _Files(ImageFiles):
    """Labels number the sorted class folders, as in torchvision."""

    turned = False

    def digest(self) -> str:
        """A hash of relative names, sizes and labels: to read all of ImageNet takes hours."""
        return digest(
            f"{self.place(index)}\t{path.stat().st_size}\t{label}\n"
            for index, (path, label) in enumerate(self.files)
        )


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    from smoothadv.datasets.images import StreamedImages

    root = data_dir or Path(os.environ.get("IMAGENET_DIR") or DEFAULT_DATA_DIR / "imagenet")
    folder = (root / _FOLDERS[split]).resolve()
    classes = class_folders(folder)
    if len(classes) != _CLASSES:
        raise UserError(
            f"imagenet folder {folder} holds {len(classes)} class folders, not {_CLASSES}: set "
            "IMAGENET_DIR or --data-dir to the folder that holds train/ and val/ (for a subset of "
            "classes use imagefolder:PATH)"
        )
    return StreamedImages(_Files(folder, classes), _DESCRIPTION, Preparation(_SIZE))


DATASETS.register("imagenet")(Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load))
