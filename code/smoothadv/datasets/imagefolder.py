"""The user's images: PATH/train/CLASS/* and PATH/test/CLASS/*, or PATH/CLASS/* to test on; of one
size or prepared.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from smoothadv.base.digests import digest
from smoothadv.base.errors import UserError
from smoothadv.base.files import cached
from smoothadv.datasets import (
    DATASETS,
    SPLITS,
    DatasetDescription,
    ImageDataset,
    Source,
    photographs,
)
from smoothadv.datasets.image_files import StoredImages
from smoothadv.datasets.preparation import split_location

_SUFFIXES = tuple(".jpg .jpeg .png .bmp .ppm .pgm .tif .tiff .webp .gif".split())


def _folder(root: Path, split: str) -> Path:
    """The folder of a split's classes: ``root`` for the test split without train/ and test/."""
    is_whole = split == "test" and not any((root / name).is_dir() for name in SPLITS)
    return root if is_whole else root / split


def _class_folders(root: Path, split: str) -> list[str]:
    folder = _folder(root, split)
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
    )


def _classes(root: Path) -> list[str]:
    """The class names, which must be the same in train/ and test/ where both exist."""
    found = {split: _class_folders(root, split) for split in SPLITS}
    if not any(found.values()):
        files = (
            file for folder in (root, root / "train", root / "test") for file in folder.glob("*.*")
        )
        if flat := next((file for file in files if file.suffix.lower() in _SUFFIXES), None):
            raise UserError(
                f"imagefolder: {flat} is in no class: put it into a folder per class, "
                f"CLASS/{flat.name}"
            )
        raise UserError(
            f"imagefolder: {root} holds neither train/CLASS/ and test/CLASS/ folders nor CLASS/ "
            "folders"
        )
    if all(found.values()) and found["train"] != found["test"]:
        odd = sorted(set(found["train"]) ^ set(found["test"]))
        raise UserError(
            f"imagefolder: the classes of {root}/train and {root}/test differ in "
            f"{', '.join(odd[:5])}"
        )
    return found["train"] or found["test"]


def stamp(path: Path) -> str:
    """What changes whenever a file is written or replaced."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


class _FolderImages(StoredImages):
    """The images of a split, sorted by class and name; hidden files are none."""

    def __init__(self, root: Path, split: str) -> None:
        self.classes, folder = tuple(_classes(root)), _folder(root, split)
        files = [
            (path, label)
            for label, name in enumerate(self.classes)
            if (folder / name).is_dir()
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
        ]
        if not files:
            expected = f"expected {folder}/CLASS/ with files that end in {', '.join(_SUFFIXES)}"
            if _folder(root, "test") == root:
                expected = (
                    f"{root} has no train/CLASS/ beside a test/CLASS/, so its CLASS/ folders are "
                    "for testing alone"
                )
            raise UserError(f"imagefolder: no images under {folder}; {expected}")
        self.name, self.files = f"imagefolder: {folder}/", files
        self.labels = [label for _, label in files]
        self._stamps = [stamp(path) for path, _ in files]

    def file(self, index: int) -> Path:
        path, _ = self.files[index]
        if stamp(path) != self._stamps[index]:
            raise UserError(f"imagefolder: {path} was changed while it was in use")
        return path

    def place(self, index: int) -> str:
        path, _ = self.files[index]
        return f"{path.parent.name}/{path.name}"

    def remembered(self, what: str, indices: Sequence[int], compute: Callable[[], str]) -> str:
        import PIL

        files = [
            f"{os.path.abspath(path)} {label} {stamp(path)}"
            for path, label in (self.files[index] for index in indices)
        ]
        name = f"imagefolder-{digest([repr([what, PIL.__version__, *files])])}"
        return cached(name, lambda: compute().encode()).decode()


def _describe(location: str, data_dir: Path | None) -> DatasetDescription:
    path, preparation = split_location(location)
    root, name = Path(path).expanduser().resolve(), f"imagefolder:{location}"
    if preparation is not None:
        return photographs(name, tuple(_classes(root)), preparation.size)
    return replace(_describe_folder(root), name=name)


@cache
def _describe_folder(root: Path) -> DatasetDescription:
    split = "train" if _class_folders(root, "train") else "test"
    return _FolderImages(root, split).described(str(root), split == "train")


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    from smoothadv.datasets.images import stored_dataset

    description, (root, preparation) = _describe(location, data_dir), split_location(location)
    return stored_dataset(_FolderImages(Path(root).expanduser(), split), description, preparation)


DATASETS.register("imagefolder")(
    Source(_describe, _load, takes_location=True, takes_preparation=True)
)
