"""Writes logs of examples: into a file that survives being killed, or into memory. No torch.

Each row is on the disk before the next row is written. When a log is resumed, a last row that a
crash left incomplete is dropped. Beside each log lies a manifest that records how the log was made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from smoothadv.base.errors import UserError
from smoothadv.base.files import append_whole, lock, refuse_to_replace, write_json
from smoothadv.records.images import forget_images, image_record, open_images
from smoothadv.records.logs import (
    LOG,
    MODEL,
    REAL_COLUMNS,
    SELECTION,
    differing_settings,
    manifest_path,
    read_manifest_file,
    spool_path,
    warn_of_other_logits,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

Row = dict[str, Any]
"""The columns of an example in a log."""


@dataclass(frozen=True)
class WrittenLog:
    """A log and the batches that made it.

    ``is_whole`` is False where this process has written only a share of the log. ``rows`` are those
    of a log that is kept in memory, whose ``path`` is empty.
    """

    path: Path
    is_whole: bool
    batch: int
    attack_batch: int | None
    rows: Sequence[Row] | None = None

    def table(self, read: Callable[[Path], pd.DataFrame]) -> pd.DataFrame:
        """The rows, as ``read`` returns those of a file: sorted by idx, with a column int64 or
        float64 for each column of numbers.
        """
        if self.rows is None:
            return read(self.path)
        import pandas as pd

        if not self.rows:
            raise UserError("there are no images, so there are no rows")
        frame = pd.DataFrame(list(self.rows)).drop(columns=["time", "basePredict"], errors="ignore")
        frame = frame.astype({name: "float64" for name in frame if name in REAL_COLUMNS})
        frame["correct"] = frame.pop("correct")
        frame.attrs["notes"] = []
        return frame.select_dtypes("number").sort_values("idx", kind="stable", ignore_index=True)


def read_rows(content: bytes) -> tuple[str, dict[int, str]]:
    """The header of a log and its rows by example; ValueError naming the first line that is no row.

    A last line without its end is left out.
    """
    text = content[: content.rfind(b"\n") + 1].decode(errors="replace")
    header, *lines = text.splitlines() or [""]
    rows: dict[int, str] = {}
    for number, line in enumerate(lines, start=2):
        index = line.partition("\t")[0]
        if (
            line.count("\t") != header.count("\t")
            or not re.fullmatch("[0-9]{1,18}", index)
            or int(index) in rows
        ):
            raise ValueError(
                f"line {number} is no row of this log, or its idx is there twice: '{line[:80]}'"
            )
        rows[int(index)] = line
    return header, rows


def check_path(path: Path, existing: str) -> bool:
    """Whether a log at ``path`` is to be continued; UserError where none may be written there.

    ``existing`` is "refuse", "resume" or "overwrite", as in ``LogWriter``.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the log file to write")
    if path.exists() and existing == "refuse":
        raise UserError(
            f"{path} exists already: add --resume to continue it or --overwrite to start it anew"
        )
    if existing == "overwrite" or not path.is_file():
        refuse_to_replace(path, *LOG)
    return existing == "resume" and path.is_file() and path.stat().st_size > 0


def read_begun(
    path: Path,
    columns: tuple[str, ...],
    settings: dict[str, Any],
    examples: Collection[int] | None,
) -> tuple[dict[str, Any], bytes, set[int]]:
    """The manifest of a log that is to be continued, its bytes and the examples of its rows.

    UserError where it is not one with these settings, columns and examples (None: any).
    """
    try:
        manifest = read_manifest_file(path)
    except UserError as error:
        raise UserError(f"cannot resume {path}: {error}; --overwrite starts anew") from error
    before = manifest["settings"]
    if difference := differing_settings(before, settings):
        is_other = any(before.get(name) != settings.get(name) for name in MODEL)
        what = "another model" if is_other else "other settings"
        raise UserError(f"cannot resume {path} with {what}: {difference}; --overwrite starts anew")
    warn_of_other_logits(path, before, settings)
    content = path.read_bytes()
    header = content.partition(b"\n")[0].decode(errors="replace")
    if b"\n" in content and tuple(header.split("\t")) != columns:
        raise UserError(
            f"cannot resume {path}: its columns are '{header}', expected '{' '.join(columns)}'"
        )
    try:
        done = set(read_rows(content)[1])
    except ValueError as error:
        raise UserError(f"cannot resume {path}: {error}") from error
    if foreign := set() if examples is None else done.difference(examples):
        raise UserError(
            f"cannot resume {path}: it holds example {min(foreign)}, which the present options "
            "leave out"
        )
    return manifest, content, done


class LogWriter:
    """Writes a TSV log with one row per example.

    ``settings`` are the facts that decide the rows' numbers: they go into the manifest, and a log
    is resumed only under equal ones. ``run`` describes the process that writes, for the reader
    alone: the manifest lists each run that added rows, from which row on. ``existing`` says what to
    do with a log that is already there: "refuse", "resume" or "overwrite". ``examples`` are those
    that the log may have (None: any). ``image_shape`` is the shape of the images that are saved for
    each row (None: no images). ``done`` are the examples whose rows the log has.
    """

    def __init__(
        self,
        path: Path,
        columns: tuple[str, ...],
        settings: dict[str, Any],
        run: dict[str, Any],
        existing: str = "refuse",
        examples: Collection[int] | None = None,
        image_shape: Sequence[int] | None = None,
    ) -> None:
        self.path, self.columns, self.image_shape = path, columns, image_shape
        self.done: set[int] = set()
        self._manifest: dict[str, Any] = {"settings": settings, "runs": []}
        self._unrecorded_run: dict[str, Any] | None = run
        self._images: IO[bytes] | None = None
        is_continued = check_path(path, existing)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        try:
            lock(self._file, path)
            if is_continued:
                self._continue(settings, examples)
            else:
                forget_images(path)  # before its rows: no image may stay beside the row of another
                self._file.truncate(0)
                self._record_run()
            if not path.stat().st_size:
                self._write(columns)
        except BaseException:
            self.close()
            raise

    def append(self, row: Row, images: Sequence[np.ndarray] = ()) -> None:
        """Write one row, whole, to the disk; before it ``images``, that of the example and the
        adversarial one.

        An image without a row is computed again, but a row without its image could not be
        completed.
        """
        self._record_run()
        if images and self.image_shape is not None:
            if self._images is None:
                self._images = open_images(self.path, self.image_shape, self.done)
            record = image_record(int(row["idx"]), *images)
            append_whole(self._images, record, spool_path(self.path))
        self._write(str(row[column]) for column in self.columns)
        self.done.add(int(row["idx"]))

    def amend(self, run: dict[str, Any]) -> None:
        """Record in the manifest that ``run`` has changed for this process, from the next row
        on.
        """
        self._record_run()
        last = {
            name: value for name, value in self._manifest["runs"][-1].items() if name != "first_row"
        }
        self._unrecorded_run = {**last, **run}

    def close(self) -> None:
        self._file.close()
        if self._images is not None:
            self._images.close()

    def _continue(self, settings: dict[str, Any], examples: Collection[int] | None) -> None:
        """Find the rows that the log has, and drop a torn last row; UserError as ``read_begun``."""
        path, present = self.path, self._unrecorded_run or {}
        self._manifest, content, self.done = read_begun(path, self.columns, settings, examples)
        if self.image_shape is not None and self.done and self.done != set(examples or ()):
            self._images = open_images(path, self.image_shape, self.done)
        self._file.truncate(content.rfind(b"\n") + 1)
        last = (self._manifest["runs"] or [present])[-1]
        if any(present.get(name) != last.get(name) for name in SELECTION):
            self._record_run()  # how many rows a whole log has depends on it

    def _record_run(self) -> None:
        """Record in the manifest that this run adds rows; UserError if the file that is open is no
        longer at its path: every further row would be lost.
        """
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise UserError(
                f"{self.path} was deleted, moved or replaced while it was written, so nothing more "
                "is written: put it back and add --resume, or start anew"
            )
        if self._unrecorded_run is not None:
            self._manifest["runs"].append({"first_row": len(self.done), **self._unrecorded_run})
            self._unrecorded_run = None
            write_json(manifest_path(self.path), self._manifest)

    def _write(self, fields: Iterable[str]) -> None:
        append_whole(self._file, ("\t".join(fields) + "\n").encode(), self.path)


class MemoryLog:
    """Keeps the rows of a log in memory; a program that asked for no file gets them."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns, self.rows = columns, list[Row]()
        self.done: set[int] = set()

    def append(self, row: Row, images: Sequence[np.ndarray] = ()) -> None:
        self.rows.append({column: row[column] for column in self.columns})

    def amend(self, run: dict[str, Any]) -> None:
        """Nothing records the run."""

    def close(self) -> None:
        """Nothing is open."""
