"""Writes logs of examples: into a file that survives being killed, or into memory. No torch.

Each row is on the disk before the next row is written. When a log is resumed, a last row that a
crash left incomplete is dropped. Beside each log lies a manifest that records how the log was made.

Adversarial examples lie there, too. While a log is written, its spool (``logs.spool_path``) grows
by one record before each row: the index, the image and the adversarial image, float32. From the
spool of a whole log ``finish_images`` makes ``logs.examples_path``, a compressed NumPy archive of
arrays with one entry per row, in the order of the indices.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from smoothadv.base.errors import UserError, counted
from smoothadv.base.files import (
    append_whole,
    lock,
    make_folder,
    refuse_to_replace,
    write_atomically,
    write_json,
)
from smoothadv.base.settings import refuse_any
from smoothadv.records.logs import (
    IMAGES,
    LOG,
    MODEL,
    REAL_COLUMNS,
    SCORE,
    SELECTION,
    differing_settings,
    examples_path,
    manifest_path,
    read_manifest_file,
    recorded_settings,
    spool_path,
    warn_of_other_logits,
)
from smoothadv.records.readers import UNREAD, DataFrame, kind_of, kind_of_log, read_examples

_COPIED = (
    *("idx", "label", "predict", "epsilon", "attack_norm", "target"),
    *("certified", "radius", "flipped"),
)
Row = dict[str, Any]
"""The columns of an example in a log."""


@dataclass(frozen=True)
class WrittenLog:
    """A log, its rows as lines by example, and the batches that made it, as far as known.

    ``is_whole`` is False where this process has written only a share of the log. The ``path`` of a
    log that is kept in memory is empty.
    """

    path: Path
    columns: Sequence[str]
    rows: Mapping[int, str]
    is_whole: bool = True
    batch: int | None = None
    attack_batch: int | None = None

    @property
    def table(self) -> DataFrame:
        """The rows, sorted by idx, with a column int64 or float64 for each column of numbers, as
        ``readers`` return those of any file; UserError where there are none, or a field was
        changed.
        """
        import pandas as pd

        if not self.rows:
            raise UserError(f"{self.path.name or 'the log'} has no rows: there are no images")
        fields = zip(*(line.split("\t") for _, line in sorted(self.rows.items())))
        kept = {name: texts for name, texts in zip(self.columns, fields) if name not in UNREAD}
        kept["correct"] = kept.pop("correct")
        try:
            frame = pd.DataFrame(kept).astype(
                {
                    name: "float64" if name in REAL_COLUMNS or name.startswith(SCORE) else "int64"
                    for name in kept
                }
            )
        except (ValueError, OverflowError) as error:
            raise UserError(f"{self.path} has a field that is no number: {error}") from error
        frame.attrs["notes"] = []
        return frame


def read_rows(content: bytes, refusal: str) -> tuple[str, dict[int, str]]:
    """The header of a log and its rows by example; UserError, which begins with the ``refusal`` and
    names the first line that is no row.

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
            raise UserError(
                f"{refusal}: line {number} is no row of this log, or its idx is there twice: "
                f"'{line[:80]}'"
            )
        rows[int(index)] = line
    return header, rows


def check_path(path: Path, existing: str) -> bool:
    """Whether a log at ``path`` is to be continued; UserError where none may be written there.

    ``existing`` is "refuse", "resume" or "overwrite", as in ``LogWriter``.
    """
    refuse_any(
        {
            f"{path} is a folder: name the log file to write": path.is_dir(),
            f"{path} exists already: add --resume to continue it or --overwrite to start it anew": (
                existing == "refuse" and path.exists()
            ),
        }
    )
    if existing == "overwrite" or not path.is_file():
        refuse_to_replace(path, *LOG)
    return existing == "resume" and path.is_file() and path.stat().st_size > 0


def read_existing(
    path: Path,
    columns: tuple[str, ...],
    settings: dict[str, Any],
    examples: Collection[int] | None,
) -> tuple[dict[str, Any], bytes, dict[int, str]]:
    """The manifest of a log that is to be continued, its bytes and its rows by example.

    UserError where it is not one with these settings, columns and examples (None: any).
    """
    try:
        manifest = read_manifest_file(path)
    except UserError as error:
        refuse_to_replace(path, *LOG)
        raise UserError(f"cannot resume {path}: {error}; --overwrite starts anew") from error
    before, kind = manifest["settings"], kind_of_log(path)
    difference = differing_settings(before, settings)
    is_other = any(before.get(name) != settings.get(name) for name in MODEL)
    what = "another model" if is_other else "other settings"
    refuse_any(
        {
            f"{path} is a {kind} log: name another file": kind and kind != kind_of(columns),
            f"cannot resume {path} with {what}: {difference}; --overwrite starts anew": difference,
        }
    )
    warn_of_other_logits(path, before, settings)
    content = path.read_bytes()
    header = content.partition(b"\n")[0].decode(errors="replace")
    if b"\n" in content and tuple(header.split("\t")) != columns:
        raise UserError(
            f"cannot resume {path}: its columns are '{header}', expected '{' '.join(columns)}'"
        )
    _, rows = read_rows(content, f"cannot resume {path}")
    if foreign := set() if examples is None else rows.keys() - set(examples):
        raise UserError(
            f"cannot resume {path}: it holds example {min(foreign)}, which the present options "
            "leave out"
        )
    return manifest, content, rows


class MemoryLog:
    """Keeps the rows of a log in memory, ``rows``: lines by example; a program that asked for no
    file gets them.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns, self.rows = columns, dict[int, str]()

    def append(self, row: Row, images: Sequence[np.ndarray] = ()) -> None:
        self.rows[int(row["idx"])] = "\t".join(str(row[column]) for column in self.columns)

    def amend(self, run: dict[str, Any]) -> None:
        """Nothing records the run."""

    def close(self) -> None:
        """Nothing is open."""


class LogWriter(MemoryLog):
    """Writes a TSV log with one row per example.

    ``settings`` are the facts that decide the rows' numbers: they go into the manifest, and a log
    is resumed only under equal ones. ``run`` describes the process that writes, for the reader
    alone: the manifest lists each run that added rows, from which row on. ``existing`` says what to
    do with a log that is already there: "refuse", "resume" or "overwrite". ``examples`` are those
    that the log may have (None: any). ``image_shape`` is the shape of the images that are saved for
    each row (None: no images).
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
        super().__init__(columns)
        self.path, self.image_shape = path, image_shape
        self._manifest: dict[str, Any] = {"settings": settings, "runs": []}
        self._unrecorded_run: dict[str, Any] | None = run
        self._images: IO[bytes] | None = None
        check_path(path, existing)
        make_folder(path.parent)
        self._file = path.open("ab", buffering=0)
        try:
            lock(self._file, path)
            if existing == "resume" and path.stat().st_size:  # another process may have started it
                self._continue(settings, examples)
            else:
                forget_images(path)  # before its rows: no image may stay beside the row of another
                self._file.truncate(0)
                self._record_run()
            if not path.stat().st_size:
                append_whole(self._file, ("\t".join(columns) + "\n").encode(), path)
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
                self._images = open_images(self.path, self.image_shape, self.rows)
            record = np.array((int(row["idx"]), *images), _record_type(images[0].shape))
            append_whole(self._images, record.tobytes(), spool_path(self.path))
        super().append(row)
        append_whole(self._file, f"{self.rows[int(row['idx'])]}\n".encode(), self.path)

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
        """Find the rows that the log has, and drop a torn last row; UserError as
        ``read_existing``.
        """
        path, present = self.path, self._unrecorded_run or {}
        self._manifest, content, self.rows = read_existing(path, self.columns, settings, examples)
        if self.image_shape is not None and self.rows and self.rows.keys() != set(examples or ()):
            self._images = open_images(path, self.image_shape, self.rows)
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
            self._manifest["runs"].append({"first_row": len(self.rows), **self._unrecorded_run})
            self._unrecorded_run = None
            write_json(manifest_path(self.path), self._manifest)


def forget_images(log: Path) -> None:
    """Remove the spool and the archive of a log, if its manifest says that it has one."""
    if recorded_settings(log).get(IMAGES):
        examples_path(log).unlink(missing_ok=True)
        spool_path(log).unlink(missing_ok=True)


def open_images(log: Path, shape: Sequence[int], done: Collection[int]) -> IO[bytes]:
    """The spool of a log, open for further records; it has a record for each of the examples
    ``done``.
    """
    spool = spool_path(log)
    if not done:
        examples_path(log).unlink(missing_ok=True)
        spool.unlink(missing_ok=True)
    elif not spool.exists() or (
        # Records of some order or of other examples.
        {*_spooled_records(log, shape)["idx"][: len(done)].tolist()} != {*done}
    ):
        write_images(log, saved_images(log, shape, done))
    else:
        # What follows is an image whose row was never written, or torn.
        os.truncate(spool, len(done) * _record_type(shape).itemsize)
    return spool.open("ab", buffering=0)


def saved_images(log: Path, shape: Sequence[int], examples: Iterable[int]) -> dict[int, Any]:
    """The records of these examples, from the spool or the archive of a log; UserError where one
    has none.
    """
    archive, examples = examples_path(log), list(examples)
    records = np.empty(0, _record_type(shape))
    if spool_path(log).exists():
        records = _spooled_records(log, shape)
    elif archive.exists():
        arrays = read_examples(archive)
        if arrays["image"].shape[1:] != tuple(shape):
            raise UserError(
                f"{archive} holds images of another shape: remove it and use --overwrite"
            )
        records = np.empty(len(arrays["idx"]), _record_type(shape))
        for name in records.dtype.names or ():
            records[name] = arrays[name]
    found = dict(zip(records["idx"][::-1].tolist(), records[::-1]))  # the first of two counts
    if missing := [index for index in examples if index not in found]:
        raise UserError(
            f"{log} has {counted(len(examples), 'row')}, of which {len(missing)} have no "
            f"adversarial example: {archive} is missing or incomplete; --overwrite starts anew"
        )
    return {index: found[index] for index in examples}


def write_images(log: Path, records: dict[int, Any]) -> None:
    """Write the spool of a log, with one image in memory at a time."""
    lines = (record.tobytes() for record in records.values())
    write_atomically(spool_path(log), lambda file: file.writelines(lines))


def finish_images(log: Path, shape: Sequence[int]) -> None:
    """Make the archive of a whole log from its spool, which is removed; UserError where there is
    neither.
    """
    spool, archive = spool_path(log), examples_path(log)
    if not spool.exists():
        if not archive.exists():
            raise UserError(f"{archive}, the images of {log}, is missing; --overwrite starts anew")
        return
    header, rows = read_rows(log.read_bytes(), f"{log} is damaged")
    table = WrittenLog(log, header.split("\t"), rows).table
    order = table.idx.tolist()
    if (records := _spooled_records(log, shape))["idx"].tolist() != order:
        write_images(log, saved_images(log, shape, order))
        records = _spooled_records(log, shape)
    arrays = {name: table[name].to_numpy() for name in _COPIED if name in table}
    arrays |= {name: records[name] for name in ("image", "adversarial")}
    write_atomically(archive, lambda file: np.savez_compressed(file, **arrays))
    spool.unlink()


def _record_type(shape: Sequence[int]) -> np.dtype:
    image = ("<f4", tuple(shape))
    return np.dtype([("idx", "<i8"), ("image", *image), ("adversarial", *image)])


def _spooled_records(log: Path, shape: Sequence[int]) -> np.ndarray:
    """The complete records of a spool, mapped into memory."""
    spool, kind = spool_path(log), _record_type(shape)
    count = spool.stat().st_size // kind.itemsize
    # NumPy maps no empty file.
    return np.memmap(spool, kind, "r", shape=(count,)) if count else np.empty(0, kind)
