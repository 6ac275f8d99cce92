"""Sets of images that have a name: ranges of indices, some images of each class, or a file."""

import os
import re
from collections import Counter
from pathlib import Path

from smoothadv.base.errors import UserError, counted, escape
from smoothadv.base.files import digest
from smoothadv.base.settings import SettingError
from smoothadv.datasets import ImageDataset, refusing

_RANGE = "([0-9]{1,10})(?:-([0-9]{1,10}))?"
_LIST, _OF_CLASSES = f"{_RANGE}(?:,{_RANGE})*", "per-class:([1-9][0-9]{0,8})(?::([0-9]{1,9}))?"


def image_set(text: str) -> str:
    """Parses the name of a set of images, as ``images_named`` reads it."""
    if not re.fullmatch(f"{_LIST}|{_OF_CLASSES}", text) and not os.path.isfile(text):
        raise SettingError(
            f"'{escape(text, 80)}' is not a set of images: write A-B for the indices from A to B, "
            "per-class:N or per-class:N:SEED for N of each class, or the path of a file with an "
            "index, or the name of an image file, in each line"
        )
    return text


def images_named(text: str, dataset: ImageDataset) -> list[int]:
    """The indices of a set of images of a dataset, ascending; UserError where it has not all of
    them, and where one is named twice.

    ``text`` is like "500-999" or "3,7,20-30", like "per-class:N" or "per-class:N:SEED", or the path
    of a file with an index, or the name of an image file, in each line. "#" begins a comment.
    """
    size, found, files = len(dataset), list[int](), list[str]()
    what = f"images {escape(text, 80)}: '{dataset.description.name}' has"
    if drawn := re.fullmatch(_OF_CLASSES, text):
        found = _of_each_class(dataset, int(drawn[1]), int(drawn[2] or 0), what)
    for word in [] if drawn else text.split(",") if re.fullmatch(_LIST, text) else _lines(text):
        if ends := re.fullmatch(_RANGE, word):
            found += range(int(ends[1]), min(int(ends[2] or ends[1]), size) + 1)
        else:
            files.append(word)
    found += _of_files(files, dataset, what) if files else []
    if not found or max(found) >= size:
        wanted = f"no image {max(found)}" if found else "none of no images"
        raise UserError(f"{what} {counted(size, 'image')}, and {wanted}")
    if len({*found}) < len(found):
        raise UserError(f"{what} one image {Counter(found).most_common(1)[0][0]}, named twice")
    return sorted(found)


def _lines(path: str) -> list[str]:
    with refusing(f"'{escape(path, 80)}' cannot be read as a list of images"):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [word for line in lines if (word := re.split(r"(?:^|\s)#", line)[0].strip())]


def _of_each_class(dataset: ImageDataset, each: int, seed: int, what: str) -> list[int]:
    """Of every class that has images, those of which the SHA-256 of the text "SEED INDEX" is
    smallest, a choice that any program can repeat.
    """
    labels, by_class = labels_of(dataset), dict[int, list[int]]()
    for index in sorted(range(len(dataset)), key=lambda index: digest([f"{seed} {index}"])):
        by_class.setdefault(labels[index] if labels else dataset[index][1], []).append(index)
    for label, images in by_class.items():
        if len(images) < each:
            raise UserError(f"{what} {counted(len(images), 'image')} of class {label}")
    return [index for images in by_class.values() for index in images[:each]]


def _of_files(files: list[str], dataset: ImageDataset, what: str) -> list[int]:
    """The images in files called like CLASS/FILE, or FILE where no other has this name."""
    stored = getattr(dataset, "stored", None)
    places = [stored.place(index) for index in range(len(dataset))] if stored else []
    names = [(place, place.rpartition("/")[2]) for place in places]
    known = {name: index for index, both in enumerate(names) for name in both}
    times = Counter(name for both in names for name in {*both})
    if wrong := [name for name in files if times[name] != 1]:
        found = counted(times[wrong[0]], "image file")
        raise UserError(f"{what} {found} called '{escape(wrong[0], 80)}'")
    return [known[name] for name in files]


def labels_of(dataset: ImageDataset) -> list[int] | None:
    """The labels of all images; None where only the items tell."""
    labels = getattr(dataset, "labels", None)
    return None if labels is None else [int(label) for label in labels]
