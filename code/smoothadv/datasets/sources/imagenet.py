"""ImageNet (ILSVRC 2012) from a folder with train/ and val/, a folder per class in each; and the
names of its classes.
"""

import os
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.base.files import digest
from smoothadv.datasets import DATASETS, DEFAULT_DATA_DIR, ImageDataset, Source, photographs
from smoothadv.datasets.preparation import Preparation
from smoothadv.datasets.stored import ImageFiles, class_folders

# Of each class the synset, in order; its number in the development kit, from 1 on; and "tiny" if it
# is one of Tiny ImageNet.
_CLASSES = [
    line.split()
    for line in Path(__file__).with_name("imagenet_classes.txt").read_text().splitlines()
]
# The classes in the order of labels, here and in the networks of libraries.
SYNSETS = tuple(synset for synset, *_ in _CLASSES)
# All classes in the order of the development kit, and those of Tiny ImageNet.
OF_KIT = tuple(synset for synset, *_ in sorted(_CLASSES, key=lambda row: int(row[1])))
OF_TINY = tuple(synset for synset, *_, last in _CLASSES if last == "tiny")
_SIZE = 224
_DESCRIPTION = photographs("imagenet", SYNSETS, _SIZE)


class _Files(ImageFiles):
    turned = False

    def digest(self) -> str:
        """A hash of relative names, sizes and labels: to read all of ImageNet takes hours."""
        return digest(
            f"{self.place(index)}\t{path.stat().st_size}\t{label}\n"
            for index, (path, label) in enumerate(self.files)
        )


def _in_order(folder: Path) -> list[str]:
    """The class folders in the order of labels: called by synsets, or by their places 0 to 999 in
    this order, as those of ImageNetV2 are.
    """
    found = class_folders(folder)
    order = sorted(found, key=int) if all(map(str.isdecimal, found)) else found
    places = [name.lstrip("0") or "0" for name in order]
    if tuple(order) != SYNSETS and places != [str(label) for label in range(len(SYNSETS))]:
        raise UserError(
            f"imagenet folder {folder} holds {len(found)} class folders, {', '.join(found[:3])}, "
            "..., not the 1000 synsets, n01440764, ..., or their places in this order, 0 to 999 (1 "
            "to 1000 are the development kit's, in another order): set IMAGENET_DIR or --data-dir "
            "to the folder that holds train/ and val/ (for other classes use imagefolder:PATH)"
        )
    return order


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    from smoothadv.datasets.images import StreamedImages

    root = data_dir or Path(os.environ.get("IMAGENET_DIR") or DEFAULT_DATA_DIR / "imagenet")
    folder = (root / ("val" if split == "test" else split)).resolve()
    return StreamedImages(_Files(folder, _in_order(folder)), _DESCRIPTION, Preparation(_SIZE))


DATASETS.register("imagenet")(Source(describe=lambda location, data_dir: _DESCRIPTION, load=_load))
