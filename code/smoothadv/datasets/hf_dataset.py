"""Images of the package datasets: hf-dataset:FOLDER that it has saved, or hf-dataset:NAME of its
hub.
"""

import importlib
import io
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError, first_line
from smoothadv.datasets import DATASETS
from smoothadv.datasets.image_files import File, StoredImages
from smoothadv.datasets.stored import stored_source

_SPLITS = {"train": ("train",), "test": ("test", "validation")}


class _Rows(StoredImages):
    """A split: labels, and the bytes of image files, which are read from the disk one by one."""

    def __init__(self, name: str, table: Any, datasets: Any) -> None:
        self.name, kinds = f"{name}, row ", table.features.items()
        images = [column for column, kind in kinds if isinstance(kind, datasets.Image)]
        labels = [column for column, kind in kinds if isinstance(kind, datasets.ClassLabel)]
        labels = ["label"] if "label" in labels else labels
        if len(images) != 1 or len(labels) != 1 or not len(table):
            columns = ", ".join(f"{column}: {type(kind).__name__}" for column, kind in kinds)
            raise UserError(
                f"{name} has {len(table)} rows of {columns}; expected a column of Image and a "
                "ClassLabel, called label if several"
            )
        self.classes, self.labels = tuple(table.features[labels[0]].names), list(table[labels[0]])
        if unknown := [
            row for row, label in enumerate(self.labels) if label not in range(len(self.classes))
        ]:
            raise UserError(f"{name}, row {unknown[0]} has no label: take images that have one")
        self._files = table.select_columns(images).cast_column(
            images[0], datasets.Image(decode=False)
        )
        self._column = images[0]

    def file(self, row: int) -> File:
        stored = self._files[row][self._column] or {"bytes": b""}
        return Path(stored["path"]) if stored["bytes"] is None else io.BytesIO(stored["bytes"])


@cache
def _rows(path: str) -> dict[str, StoredImages]:
    """The splits "train" and "test"; what has no splits is for testing."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"hf-dataset:{path} needs the package datasets: pip install 'smoothadv[datasets]'"
        ) from error
    folder = os.path.expanduser(path)
    logging.getLogger("huggingface_hub.utils._http").setLevel(
        logging.ERROR
    )  # it tells of each attempt
    try:
        found = (
            datasets.load_from_disk(folder)
            if os.path.isdir(folder)
            else datasets.load_dataset(path)
        )
    except Exception as error:  # the package has no exception of its own for what it cannot read
        raise UserError(
            f"hf-dataset:{path} is neither a folder that save_to_disk has written nor found on the "
            f"hub ({first_line(error)[:300]})"
        ) from error
    tables = found if isinstance(found, dict) else {"test": found}
    rows: dict[str, StoredImages] = {
        split: _Rows(f"hf-dataset:{path}, split {name}", tables[name], datasets)
        for split, names in _SPLITS.items()
        for name in reversed(names)
        if name in tables
    }
    if len({each.classes for each in rows.values()}) != 1:
        raise UserError(
            f"hf-dataset:{path} has {', '.join(tables)}; expected train and test of the same "
            "classes"
        )
    return rows


DATASETS.register("hf-dataset")(
    stored_source(
        "hf-dataset", _rows, {"train": "a split train", "test": "a split test or validation"}
    )
)
