"""Sets of images that have a name: ranges of indices, some images of each class, or a file."""

import os
import re
from pathlib import Path

from smoothadv.base.errors import UserError, counted, escape
from smoothadv.base.files import digest
from smoothadv.base.settings import SettingError, refuse_any
from smoothadv.datasets import ImageDataset, labels_of, refusing
from smoothadv.records.logs import OF_CLASSES, RANGE, in_file


def image_set(text: str) -> str:
    """Parses the name of a set of images, as ``images_named`` reads it."""
    if in_file(text) and not os.path.isfile(text):
        raise SettingError(
            f"'{escape(text, 80)}' is no set of images and no file: write indices, like 3,7,20-30, "
            "per-class:N or per-class:N:SEED for N of each class, or the path of a file with an "
            "index, or the name of an image file, in each line"
        )
    return text


def images_named(text: str, dataset: ImageDataset) -> list[int]:
    """The indices of a set of images of a dataset, ascending; UserError where it has not all of
    them, and where one is named twice.

    ``text`` is like "500-999" or "3,7,20-30", like "per-class:N" or "per-class:N:SEED", or the path
    of a file with an index, or the name of an image file, like CLASS/FILE, in each line. In it,
    other lines that begin with "#" are comments.
    """
    size, found, words = len(dataset), list[int](), text.split(",")
    what = f"images {escape(text, 80)}: '{dataset.description.name}' has"
    files = dict[str, int]()
    if drawn := re.fullmatch(OF_CLASSES, text):
        found, words = _of_each_class(dataset, int(drawn[1]), int(drawn[2] or 0), what), []
    elif in_file(text):
        with refusing(f"'{escape(text, 80)}' cannot be read as a list of images"):
            lines = Path(text).read_text(encoding="utf-8-sig").splitlines()
        if stored := getattr(dataset, "stored", None):
            files = {stored.place(index): index for index in range(size)}
        words = [
            word for line in lines if (word := line.strip()) in files or word[:1] not in ("", "#")
        ]
    for word in words:
        if not re.fullmatch(RANGE, word) and word not in files:
            raise UserError(
                f"{what} no image file '{escape(word, 80)}'"
                + (f", but ones like '{escape(next(iter(files)), 80)}'" if files else "")
            )
        first, _, last = str(files.get(word, word)).partition("-")
        if last and int(last) < int(first):
            raise UserError(f"images {escape(text, 80)}: write {last}-{first}, not {first}-{last}")
        found += range(int(first), min(int(last or first), max(int(first), size)) + 1)
    found.sort()
    twice = [one for one, other in zip(found, found[1:]) if one == other]
    refuse_any(
        {
            f"{what} {counted(size, 'image')}, and none is named": not found,
            f"{what} {counted(size, 'image')}, and no image {max(found, default=0)}": (
                max(found, default=0) >= size
            ),
            f"{what} one image {max(twice, default=0)}, which is named twice": twice,
        }
    )
    return found


def _of_each_class(dataset: ImageDataset, each: int, seed: int, what: str) -> list[int]:
    """Of every class that has images, those of which the SHA-256 of the text "SEED INDEX" is
    smallest, a choice that any program can repeat.
    """
    import pandas as pd

    order = sorted(range(len(dataset)), key=lambda index: digest([f"{seed} {index}"]))
    by_class = pd.Series(labels_of(dataset, order), order)
    counts = by_class.value_counts()
    if counts.min() < each:
        raise UserError(
            f"{what} {counted(int(counts.min()), 'image')} of class {counts.idxmin()}, and {each} "
            "are to be chosen"
        )
    return by_class.groupby(by_class).head(each).index.tolist()
