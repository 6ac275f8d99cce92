"""Images of the package datasets: hf-dataset:PATH of a folder, of a repository of the hub or of a
file of Parquet, or hf-dataset:NAME of the hub; PATH:COLUMN names the column of labels.
"""

import io
import logging
import os
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError, counted, optional_module
from smoothadv.base.files import digest, state_of
from smoothadv.datasets import DATASETS, refusing
from smoothadv.datasets.arrays import MOST_CLASSES
from smoothadv.datasets.sources import stored_source
from smoothadv.datasets.stored import File, StoredImages

_SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val")}
_SAVED = ("state.json", "dataset_dict.json")
# How the types of columns begin that may be labels.
_LABELS = ("ClassLabel", *(f"Value('{kind}" for kind in ("int", "uint", "bool", "str", "large_s")))


class _Rows(StoredImages):
    """A split: labels, and the bytes of image files, which are read from the disk one by one."""

    def __init__(self, name: str, images: Any, labels: Any) -> None:
        (self._column,), (column,) = images.column_names, labels.column_names
        self.name, self._files, self._labels = f"{name}, row ", images, labels[column]
        self.classes = tuple(labels.features[column].names)

    @cached_property
    def labels(self) -> list[int]:  # type: ignore[override]  # cached, it can be written
        """UserError where a row has none, which matters only for a split that is used."""
        labels = list(self._labels)
        for row, label in enumerate(labels):
            if label not in range(len(self.classes)):
                raise UserError(
                    f"{self.name}{row} has no label of a class: {label}; take images that have one"
                )
        return labels

    def file(self, row: int) -> File:
        stored = self._files[row][self._column] or {"bytes": b""}
        return Path(stored["path"]) if stored["bytes"] is None else io.BytesIO(stored["bytes"])


def _columns(table: Any, chosen: str) -> tuple[str, str]:
    """The column of images, and that of labels, which may be ``chosen``; ValueError unless there is
    one of each.
    """
    kinds = {column: repr(kind) for column, kind in table.features.items()}
    images = [
        column for column in kinds if kinds[column].startswith("Image") or "binary" in kinds[column]
    ]
    known = [column for column in kinds if kinds[column].startswith("ClassLabel")]
    labels = [column for column in kinds if column == (chosen or "label")] or known
    fits = chosen in ("", *labels) and all(kinds[column].startswith(_LABELS) for column in labels)
    if len(images) != 1 or len(labels) != 1 or not fits or not len(table):
        columns = ", ".join(f"{column}: {kinds[column][:40]}" for column in kinds)
        raise ValueError(
            f"it has {counted(len(table), 'row')} of {columns[:400]}; expected a column of "
            "Image, and of labels one called label, or one ClassLabel, or one named by "
            "hf-dataset:PATH:COLUMN"
        )
    return images[0], labels[0]


def _has_labels(table: Any, chosen: str) -> bool:
    """Whether a row has a label: the test images of a competition have none, or -1."""
    try:
        _, column = _columns(table, chosen)
    except ValueError:
        return False
    return bool({*table.unique(column)} - {None, -1})


def _class_names(values: set[Any]) -> list[str]:
    """The names of the classes that a column of texts, or of numbers, holds."""
    last = max(values, default=0)
    if isinstance(last, str):
        return sorted(values)
    return [str(number) for number in range(min(last, MOST_CLASSES) + 1)]


@cache
def _rows(location: str) -> dict[str, StoredImages]:
    """The splits "train" and "test"; what has no splits is for testing."""
    path, _, chosen = location.rpartition(":")
    if not path or os.path.exists(os.path.expanduser(location)):
        path, chosen = location, ""
    datasets = optional_module(
        "datasets",
        f"hf-dataset:{path} needs the package datasets: pip install 'smoothadv[datasets]'",
    )
    datasets.disable_progress_bars()
    for logger in ("datasets", "huggingface_hub.utils._http"):  # they tell of each attempt
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    place, rows = os.path.expanduser(path), dict[str, StoredImages]()
    # In its usual cache the package knows files by their times of modification.
    tree = [file for file in (Path(place), *sorted(Path(place).rglob("*"))) if file.exists()]
    facts = digest(state_of(file) for file in tree if ".git" not in file.parts)
    own = f"{datasets.config.HF_DATASETS_CACHE}/smoothadv-{facts}" if tree else None
    with refusing(
        f"hf-dataset:{path} cannot be read, as a folder that save_to_disk has written or one of "
        "files (in a clone, git lfs pull gets them), as a file of Parquet, or on the hub"
    ):
        if any(os.path.exists(os.path.join(place, name)) for name in _SAVED):
            found = datasets.load_from_disk(place)
        elif os.path.isfile(place):
            found = datasets.load_dataset("parquet", data_files={"test": place}, cache_dir=own)
        else:
            found = datasets.load_dataset(place, cache_dir=own)
        tables = found if isinstance(found, dict) else {"test": found}
        names = {
            split: max(there, key=lambda name: _has_labels(tables[name], chosen))  # the first one
            for split, known in _SPLITS.items()
            if (there := [name for name in known if name in tables])
        }
        for split, name in names.items():
            about, table = f"hf-dataset:{path}, split {name}", tables[name]
            image, label = _columns(table, chosen)
            labels, kind = table.select_columns([label]), table.features[label]
            if not isinstance(kind, datasets.ClassLabel):
                values = {value for each in names.values() for value in tables[each].unique(label)}
                kind = datasets.ClassLabel(names=_class_names(values - {None}))
            files = table.cast_column(image, datasets.Image(decode=False)).select_columns([image])
            rows[split] = _Rows(about, files, labels.cast_column(label, kind))
        if len({each.classes for each in rows.values()}) != 1:
            raise ValueError(
                f"it has {', '.join(tables)}; expected train and test of the same classes"
            )
    return rows


DATASETS.register("hf-dataset")(
    stored_source(
        "hf-dataset", _rows, {"train": "a split train", "test": "a split test or validation"}
    )
)
