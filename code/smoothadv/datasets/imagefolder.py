"""The user's images: PATH/train/CLASS/* and PATH/test/CLASS/*, or PATH/CLASS/* to test on; of one
size or prepared.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from smoothadv.base.cpus import usable_cpus
from smoothadv.base.digests import digest
from smoothadv.base.errors import UserError
from smoothadv.base.progress import Progress
from smoothadv.datasets import (
    CIFAR_TRAINING,
    DATASETS,
    SPLITS,
    DatasetDescription,
    ImageDataset,
    Source,
    constants,
    photographs,
    spread,
)
from smoothadv.datasets.image_files import Image, Made, read_image, read_pixels, remembered, stamp
from smoothadv.datasets.preparation import split_location

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def _folder(root: Path, split: str) -> Path:
    """The folder of a split's classes: ``root`` for the test split without train/ and test/."""
    is_whole = split == "test" and not any((root / name).is_dir() for name in SPLITS)
    return root if is_whole else root / split


def _class_folders(root: Path, split: str) -> list[str]:
    folder = _folder(root, split)
    if not folder.is_dir():
        return []
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
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


def _files(root: Path, split: str, prepared: bool = False) -> list[tuple[Path, int]]:
    """(path, label) of the images of a split, sorted by class and name; if ``prepared``, GIF too,
    no hidden ones.
    """
    suffixes, folder = (*_SUFFIXES, *((".gif",) * prepared)), _folder(root, split)
    files = [
        (path, label)
        for label, name in enumerate(_classes(root))
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in suffixes and not (prepared and path.name.startswith("."))
    ]
    if not files:
        if _folder(root, "test") == root:
            expected = (
                f"{root} has no train/CLASS/ beside a test/CLASS/, so its CLASS/ folders are for "
                "testing alone"
            )
        else:
            expected = f"expected {folder}/CLASS/ with files that end in {', '.join(_SUFFIXES)}"
        raise UserError(f"imagefolder: no images under {folder}; {expected}")
    return files


def _read(path: Path, shape: tuple[int, int, int] | None = None) -> np.ndarray:
    """An image file as uint8 [C, H, W]; UserError if it is damaged, too large or not of the given
    ``shape``.
    """
    return read_pixels(path, f"imagefolder: {path}", shape)


def _read_all(files: list[tuple[Path, int]], shape: tuple[int, int, int]) -> np.ndarray:
    """All files as uint8 [N, C, H, W]; decoding releases the interpreter lock, so threads help."""
    images = np.empty((len(files), *shape), dtype=np.uint8)
    with ThreadPoolExecutor(usable_cpus()) as pool:
        decoded = pool.map(lambda item: _read(item[0], shape), files)
        for index, image in enumerate(Progress(decoded, "reading images", len(files), delay=2)):
            images[index] = image
    return images


def _describe(location: str, data_dir: Path | None) -> DatasetDescription:
    path, preparation = split_location(location)
    root, name = Path(path).expanduser().resolve(), f"imagefolder:{location}"
    if preparation is not None:
        return photographs(name, tuple(_classes(root)), preparation.size)
    return replace(_describe_folder(root), name=name)


@cache
def _describe_folder(root: Path) -> DatasetDescription:
    classes = _classes(root)
    split = "train" if _class_folders(root, "train") else "test"
    files = _files(root, split)
    shape = _read(files[0][0]).shape
    mean = std = None
    if split == "train":
        some = [files[index] for index in spread(len(files))]
        text = remembered("constants", some, lambda: json.dumps(constants(_read_all(some, shape))))
        mean, std = map(tuple, json.loads(text))
    return DatasetDescription(
        f"imagefolder:{root}", tuple(classes), shape, mean, std, CIFAR_TRAINING
    )


def _load(split: str, location: str, data_dir: Path | None) -> ImageDataset:
    from smoothadv.datasets.images import ImagesOnDemand, StreamedImages

    description, (root, preparation) = _describe(location, data_dir), split_location(location)
    files = _files(Path(root).expanduser(), split, preparation is not None)
    stamped, labels = [(path, stamp(path)) for path, _ in files], [label for _, label in files]
    if preparation is not None:
        content = partial(remembered, "bytes", files, partial(_digest, files))
        return StreamedImages(
            list(zip(stamped, labels)), preparation, description, _read_prepared, content
        )

    def read(index: int) -> np.ndarray:
        return _read(_unchanged(*stamped[index]), description.image_shape)

    known = partial(remembered, "fingerprint", files)
    return ImagesOnDemand(
        labels, read, lambda: _read_all(files, description.image_shape), known, description
    )


def _unchanged(path: Path, before: str) -> Path:
    if stamp(path) != before:
        raise UserError(f"imagefolder: {path} was changed while it was in use")
    return path


def _read_prepared(file: tuple[Path, str], make: Callable[[Image], Made]) -> Made:
    return read_image(_unchanged(*file), make, f"imagefolder: {file[0]}", turned=True)


def _digest(files: list[tuple[Path, int]]) -> str:
    """A hash of the content, the relative names and the labels of all files."""
    with ThreadPoolExecutor(usable_cpus()) as pool:  # hashing releases the interpreter lock
        hashed = pool.map(lambda file: digest([file[0].read_bytes()]), files)
        pairs = zip(files, Progress(hashed, "hashing images", len(files), delay=2))
        return digest(
            f"{file.parent.name}/{file.name}\t{label}\t{content}\n"
            for (file, label), content in pairs
        )


DATASETS.register("imagefolder")(
    Source(_describe, _load, takes_location=True, takes_preparation=True)
)
