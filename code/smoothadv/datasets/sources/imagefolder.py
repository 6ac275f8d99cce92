"""The user's images: PATH/train/CLASS/* and PATH/test/CLASS/*, or PATH/CLASS/* to test on; of one
size or prepared.
"""

import re
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.datasets import DATASETS, SPLITS
from smoothadv.datasets.sources import stored_source
from smoothadv.datasets.stored import ImageFiles, StoredImages, class_folders

_WORDS = (
    ("train", {"train", "training"}),
    ("test", {"test", "testing"}),
    ("test", {"val", "valid", "validation"}),  # where there is nothing else to test on
)


def _split_folders(root: Path) -> dict[str, Path]:
    """The folders below ``root`` that hold folders of classes and that these words name; UserError
    where several may be the same split.
    """
    found: dict[str, Path] = {}
    left = [name for name in class_folders(root) if class_folders(root / name)]
    for split, words in _WORDS:
        named = [name for name in left if words & {*re.split("[^a-z]+", name.lower())}]
        named = [split] if split in named else named
        if len(named) > 1 and split not in found:
            raise UserError(
                f"imagefolder: {root} holds {' and '.join(named)}: to test on one of them write "
                f"imagefolder:{root / named[0]}"
            )
        for name in named:
            left.remove(name)
            # Archives are often unpacked into a folder of their own name: seg_test/seg_test/.
            inner = root / name / name
            found.setdefault(split, inner if class_folders(inner) else root / name)
    return found


def _splits(path: str) -> dict[str, StoredImages]:
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        raise UserError(f"imagefolder: there is no folder {root}")
    folders, names = _split_folders(root), class_folders(root)
    are_splits = all(any(name.lower() in words for _, words in _WORDS) for name in names)
    if not (folders or are_splits or {*SPLITS} & {*names}):
        folders = {"test": root}
    if not folders:
        held = ", ".join(sorted(path.name for path in root.iterdir())[:3]) or "nothing"
        raise UserError(
            f"imagefolder: {root} holds {held}, neither train/CLASS/ and test/CLASS/ folders nor "
            f"CLASS/ folders: name {root.parent} if this is a class of it, put images into a "
            "folder per class, or give them to `certify images`, which needs no classes"
        )
    first = next(iter(folders.values()))
    classes = class_folders(first)
    for folder in folders.values():
        if odd := {*classes} ^ {*class_folders(folder)}:
            raise UserError(
                f"imagefolder: the classes of {first} and {folder} differ in "
                f"{', '.join(sorted(odd)[:5])}"
            )
    # Beside masks or annotations, such a folder holds all images.
    if other := [name for name in classes if re.fullmatch("(jpeg)?(image|img)s?", name.lower())]:
        raise UserError(
            f"imagefolder: {first} holds {', '.join(classes)[:200]}, and {other[0]} is no class: "
            "put images into a folder per class"
        )
    return {split: ImageFiles(folder, classes) for split, folder in folders.items()}


DATASETS.register("imagefolder")(
    stored_source(
        "imagefolder",
        _splits,
        {
            "train": "train/CLASS/ in it, or the folder above it if it is itself one split",
            "test": "test/CLASS/ or val/CLASS/ in it",
        },
    )
)
