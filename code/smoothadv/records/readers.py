"""Reads logs: ours, the released ones of Salman et al. and Cohen et al., and their descendants';
examples beside them.

No torch. A reader of logs returns a pandas DataFrame or raises one UserError that names the file
and the first fault; ``frame.attrs["notes"]`` is a list of sentences on the faults that were
tolerated. A field is read as the number that is printed there, or not at all: a general parser of
tables would guess at what is damaged.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy

from smoothadv.base.errors import UserError, escape, first_line
from smoothadv.records import logs as records
from smoothadv.records.manifests import (
    METHODS,
    columns_of,
    images_of,
    log_fault,
    prediction_checks,
    row_checks,
)

if TYPE_CHECKING:
    import pandas as pd

DataFrame: TypeAlias = "pd.DataFrame"
"""For annotations: pandas takes half a second to load, and only functions that use it import it."""
_HEADER_BYTES = 4096
_LINE_END = re.compile("\r\n|\n|\r")
_WHOLE = re.compile("[-+]?[0-9]{1,18}")
# No part can match what its neighbour can: else a field of 100,000 digits would take minutes to
# refuse.
_REAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?|nan|[-+]?inf")
_CERTIFICATION = (*records.EXAMPLE_COLUMNS, "radius")
_OF_FALSIFICATION = records.FALSIFICATION_COLUMNS[len(records.ATTACK_COLUMNS) :]
# Nothing is computed from these released columns, and a time may be of any form.
_UNREAD = {"time", "basePredict"}
_NUMERIC = {
    *records.CERTIFICATION_COLUMNS,
    *records.FALSIFICATION_COLUMNS,
    records.TARGET_COLUMN,
} - _UNREAD
_LARGE = ("image.npy", "adversarial.npy")
_NOT_OF_LOGS = {".png", ".pdf", ".svg", ".html", ".tex", ".md", ".csv", ".json"}
_TRAINING = ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
# The released training logs spell these in several ways and orders; a suffix says what the released
# unit is.
_TRAINING_NAMES = {name.replace("_", ""): name for name in _TRAINING}
_TRAINING_NAMES |= {"trainacc": "train_accuracy%", "testacc": "test_accuracy%"}


def kind_of_log(path: Path) -> str | None:
    """ "certification", "prediction", "falsification" or "training", by the file's first line; None
    if it is no log.
    """
    try:
        columns = set(_header(path))
    except OSError:
        return None
    if columns.issuperset((*records.EXAMPLE_COLUMNS, *_OF_FALSIFICATION)):
        return "falsification"
    if columns.issuperset(records.EXAMPLE_COLUMNS):
        return "certification" if "radius" in columns else "prediction"
    return (
        "training"
        if {_training_name(column).rstrip("%") for column in columns}.issuperset(_TRAINING)
        else None
    )


def resembles_log(path: Path) -> bool:
    """Whether a file's name, start or manifest suggests a log, or it is unreadable: a search must
    report its faults.
    """
    try:
        start = _header(path)[0]
    except OSError:
        return True
    named = path.name == "predictions" or (
        path.name.startswith("sigma_") and path.suffix not in _NOT_OF_LOGS
    )
    return named or records.manifest_path(path).exists() or start.startswith("idx")


def read_certification_log(path: Path) -> DataFrame:
    """A certification log: columns idx, label, predict, correct (int64) and radius (float64),
    sorted by idx.

    All further numeric columns of the log follow under their names, such as successes, trials and
    those of its procedure: int64 where all fields are whole numbers, else float64. A column without
    any number is left out, and so are time and basePredict. UserError unless there are rows and
    every one is consistent: finite radii >= 0, one row per idx, ``correct`` equal to (predict ==
    label), abstentions (predict -1) with radius 0. A running total of hits in place of ``correct``,
    and True and False for 1 and 0, are understood and noted.
    """
    columns, notes = _read_examples(path, "certification log", _CERTIFICATION)
    idx, predict, radius = columns["idx"], columns["predict"], columns["radius"]
    _refuse(
        path, idx, "a radius that is negative or not finite", ~((radius >= 0) & (radius < np.inf))
    )
    _refuse(path, idx, "an abstention with a radius", (predict == -1) & (radius > 0))
    if columns.keys() >= set(records.COUNT_COLUMNS):
        successes, trials = (columns[name] for name in records.COUNT_COLUMNS)
        impossible = (successes < 0) | (successes > trials) | ((trials < 1) & (predict >= 0))
        _refuse(
            path,
            idx,
            "successes that are not between 0 and trials, or a certificate of no trials",
            impossible,
        )
    return _frame(columns, notes)


def read_prediction_log(path: Path) -> DataFrame:
    """A prediction log: columns idx, label, predict and correct (int64), sorted by idx; UserError
    as above.

    All further numeric columns follow as above, such as attack_norm and epsilon (float64), target
    (int64) and, of attacks against certificates, certified (int64), radius (float64) and flipped
    (int64).
    """
    return _frame(*_read_examples(path, "prediction log", records.EXAMPLE_COLUMNS))


def read_training_log(path: Path) -> DataFrame:
    """A training log: columns epoch (int64, from 0), train_loss, train_accuracy, test_loss,
    test_accuracy (float64).

    Accuracies are fractions; those of released logs, in percent, are converted. UserError unless
    there are rows, epochs ascend, all numbers are finite and accuracies lie in [0, 1]; where a
    column test_images holds 0, there was no test and its numbers may be nan.
    """
    table = _parse(path, "training log", lambda name: _training_name(name).rstrip("%"), _TRAINING)
    spellings = {_training_name(name).rstrip("%"): _training_name(name) for name in table.names}
    columns = {"epoch": table.whole("epoch")}
    for name in _TRAINING[1:]:
        columns[name] = table.real(name) / (100 if spellings[name].endswith("%") else 1)
    tested = (
        table.whole("test_images") > 0
        if "test_images" in table.names
        else np.ones(len(columns["epoch"]), bool)
    )
    losses = np.concatenate([columns["train_loss"], columns["test_loss"][tested]])
    accuracies = np.concatenate([columns["train_accuracy"], columns["test_accuracy"][tested]])
    if not np.isfinite(losses).all() or not ((accuracies >= 0) & (accuracies <= 1)).all():
        raise UserError(f"{path} holds a loss that is not finite or an accuracy outside 0 to 1")
    if columns["epoch"][0] < 0 or (np.diff(columns["epoch"]) <= 0).any():
        raise UserError(
            f"{path} holds epochs that do not ascend from 0 or more: two runs in one file?"
        )
    return _frame(columns, table.notes, "epoch")


def read_fields(path: Path) -> dict[int, dict[str, str]]:
    """The fields of a certification log as printed, by the index of the image and by column;
    UserError as above.
    """
    table = _parse(path, "certification log", str, _CERTIFICATION)
    rows = [dict(zip(table.columns, fields)) for fields in zip(*table.columns.values())]
    return {int(row["idx"]): row for row in rows}


READERS: dict[str, Callable[[Path], DataFrame]] = {
    "certification": read_certification_log,
    "prediction": read_prediction_log,
    "training": read_training_log,
}
"""By the kind of a log."""


def _read_examples(
    path: Path, kind: str, required: Collection[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The numeric columns of a log with a row per example, and notes; checks what logs of both
    kinds must satisfy.
    """
    import pandas as pd

    table, manifest = _parse(path, kind, str, required), records.manifest_beside(path)
    columns = {name: table.number(name) for name in required if name != "correct"}
    columns |= table.further_numbers({*required, *_UNREAD}, is_ours=manifest is not None)
    idx, label, predict = columns["idx"], columns["label"], columns["predict"]
    columns["correct"] = (predict == label).astype(np.int64)
    _check_correct(path, idx, table.columns["correct"], columns["correct"], table.notes)
    _refuse(path, idx, "an example that is there twice", pd.Series(idx).duplicated().to_numpy())
    negative = (idx < 0) | (label < 0) | (predict < -1)
    _refuse(path, idx, "an index or a label below 0, or a prediction below -1", negative)
    if manifest is not None:
        for fault, holds in _checks(path, table, manifest).items():
            _refuse(path, idx, f"a row that cannot be: {fault}", ~np.broadcast_to(holds, len(idx)))
    return columns, table.notes


def _checks(path: Path, table: _Rows, manifest: dict[str, Any]) -> dict[str, Any]:
    """What must hold of the rows of a log of ours, by what is wrong else; UserError where its
    columns cannot be.

    Nothing can be said of a log with the columns of a released one, and of the procedure of a
    plug-in.
    """
    settings, is_prediction = manifest["settings"], "basePredict" in table.names
    if {*table.names} <= {*records.CERTIFICATION_COLUMNS[:6]} or settings.get(
        "method", "exact"
    ) not in METHODS:
        return {}
    if is_prediction:
        kinds = records.PREDICTION_COLUMNS, records.ATTACK_COLUMNS, records.FALSIFICATION_COLUMNS
        target = [name for name in table.names if name == records.TARGET_COLUMN]
        further = *target, *records.numbered(table.names, records.CLASS)
        expected = [*kinds[bool(settings.get("attack")) + ("against" in settings)], *further]
    elif fault := log_fault(manifest):
        raise UserError(f"{path} is left in doubt: its manifest {fault}")
    else:
        expected = columns_of(settings)
    if sorted(expected) != sorted(table.names):
        raise UserError(
            f"{path} has not the columns that its manifest tells of, "
            f"{escape(' '.join(expected), 200)}"
        )
    row = {name: table.number(name) for name in expected if name != "time"}
    if is_prediction:
        return prediction_checks(row, settings)
    return row_checks(row, settings, images_of(settings, manifest["runs"][-1]))


def _check_correct(
    path: Path, idx: np.ndarray, texts: list[str], hits: np.ndarray, notes: list[str]
) -> None:
    """UserError unless the ``texts`` in the column ``correct`` agree with label and predict, in
    some dialect.
    """
    if texts == list(map(str, hits.tolist())):
        return
    texts = [{"true": "1", "false": "0"}.get(text.lower(), text) for text in texts]
    wrong = np.array([text != str(hit) for text, hit in zip(texts, hits)])
    total = np.cumsum(hits)
    # Only a number above 1 distinguishes a running total from 0s and 1s that are wrong.
    if wrong.any() and total[-1] > 1 and texts == list(map(str, total.tolist())):
        notes.append("its 'correct' is a running total; label and predict were compared instead")
    else:
        _refuse(path, idx, "a 'correct' that disagrees with label and predict", wrong)


def _frame(columns: dict[str, np.ndarray], notes: list[str], by: str = "idx") -> DataFrame:
    import pandas as pd

    frame = pd.DataFrame(columns).sort_values(by, kind="stable", ignore_index=True)
    frame.attrs["notes"] = notes
    return frame


class _Rows:
    """The fields of a file, column by column, as text or as the numbers that they spell."""

    def __init__(
        self,
        path: Path,
        names: list[str],
        rows: list[list[str]],
        known: list[str],
        notes: list[str],
    ) -> None:
        self.path, self.names, self.notes = path, names, notes
        self.columns = dict(zip(known, map(list, zip(*rows))))

    def number(self, name: str) -> np.ndarray:
        """A column of ``records``: float64 if it is one of REAL_COLUMNS, else int64."""
        return self.real(name) if name in records.REAL_COLUMNS else self.whole(name)

    def whole(self, name: str) -> np.ndarray:
        return np.array([int(text) for text in self._checked(name, _WHOLE)], dtype=np.int64)

    def real(self, name: str) -> np.ndarray:
        """float64 next to the decimal written."""
        return np.array([float(text) for text in self._checked(name, _REAL)])

    def further_numbers(self, others: Collection[str], is_ours: bool) -> dict[str, np.ndarray]:
        """The columns of numbers but for those named in ``others``.

        Columns of ``records`` must hold numbers, and in a log that ``is_ours`` also those in which
        any field is one: UserError. In other logs such a mixed column is noted and left out, as are
        unnamed columns and repeated names.
        """
        columns = {}
        for name in dict.fromkeys(self.names):
            is_repeated = self.names.count(name) > 1
            if name in others or not name or (is_repeated and name not in _NUMERIC):
                continue
            if is_repeated:
                raise _ambiguous(self.path, name)
            are_numbers = [bool(_REAL.fullmatch(text)) for text in self.columns[name]]
            if name in _NUMERIC:
                columns[name] = self.number(name)
            elif all(are_numbers) or (any(are_numbers) and is_ours):
                are_whole = all(_WHOLE.fullmatch(text) for text in self.columns[name])
                columns[name] = self.whole(name) if are_whole else self.real(name)
            elif any(are_numbers):
                heading = _brief(name)
                self.notes.append(
                    f"its column {heading} is left out: some of its fields are numbers, others are "
                    "not"
                )
        return columns

    def _checked(self, name: str, pattern: re.Pattern[str]) -> Sequence[str]:
        for number, text in enumerate(self.columns[name], start=1):
            if not pattern.fullmatch(text):
                raise UserError(
                    f"{self.path} holds a field that is not a number: {_brief(name)} is "
                    f"'{_brief(text)}' in row {number}"
                )
        return self.columns[name]


def _parse(
    path: Path, kind: str, meaning: Callable[[str], str], required: Collection[str]
) -> _Rows:
    """The rows below the header, each of as many fields as the header. A torn last line is dropped
    and noted.

    ``meaning(name)`` is what a column's name stands for: exactly one must stand for each of
    ``required``.
    """
    try:
        missing = [name for name in required if name not in map(meaning, _header(path))]
        if missing:
            raise UserError(
                f"{path} is no {kind}: its first line lacks the column {', '.join(missing)}"
            )
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if b"\0" in content:
        raise UserError(f"{path} cannot be read as a {kind}: it is a binary file")
    try:
        lines = _LINE_END.split(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} cannot be read as a {kind}: it is no text ({error.reason})"
        ) from error
    header = lines[0].split("\t")
    notes: list[str] = []
    rows = [line.split("\t") for line in lines[1:-1] if line]
    if len(lines) > 1 and (last := lines[-1].split("\t")) != [""]:
        # A last field that was cut looks like a whole one: harmless only for a time, from which
        # nothing is computed.
        if header[-1] == "time" and len(last) == len(header) and last[-1]:
            rows.append(last)
        else:
            notes.append("its last line has no end: it may have been cut off and is left out")
    if not rows:
        raise UserError(f"{path} holds no rows yet: the {kind} has only a header")
    known = [meaning(name) for name in header]
    for name in required:
        if known.count(name) > 1:
            raise _ambiguous(path, name)
    for row in rows:
        if len(row) != len(header):
            fault = (
                "a row that lacks fields"
                if len(row) < len(header)
                else "a row with more fields than its header"
            )
            raise UserError(f"{path} holds {fault}, first at {header[0]} {_brief(row[0])}")
    return _Rows(path, header, rows, known, notes)


def _ambiguous(path: Path, name: str) -> UserError:
    return UserError(f"{path} has two columns that are its {name}: it is unknown which one counts")


def _header(path: Path) -> list[str]:
    """The names in the first line, as far as a sensible header reaches."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    return _LINE_END.split(start.decode("utf-8-sig", errors="replace"))[0].split("\t")


def _training_name(column: str) -> str:
    return _TRAINING_NAMES.get(column.lower().replace(" ", "").replace("_", ""), column)


def _brief(text: str) -> str:
    """A field as a message may repeat it: not all of it, and a digit that only looks like one is
    told from one.
    """
    return escape(text, 40, plain=True)


def _refuse(path: Path, idx: np.ndarray, fault: str, rows: np.ndarray) -> None:
    if rows.any():
        raise UserError(f"{path} holds {fault}, first at idx {idx[rows][0]}")


def read_examples(path: Path, rows: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an archive of adversarial examples, of images only those in these ``rows``,
    ascending (None: all).

    Rows that it lacks are left out. UserError where it is missing, damaged or something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            read = {
                name: _read_array(archive, name, rows if name in _LARGE else None)
                for name in archive.namelist()
            }
    except Exception as error:  # a damaged file can raise nearly anything
        raise UserError(
            f"{path} cannot be read as adversarial examples: {first_line(error)}"
        ) from error
    arrays = {name.removesuffix(".npy"): array for name, (array, _) in read.items()}
    idx, image, adversarial = (
        arrays.get(name, np.empty(())) for name in ("idx", "image", "adversarial")
    )
    is_whole = (
        idx.ndim == 1
        and idx.dtype.kind == "i"
        and image.ndim == 4
        and image.shape == adversarial.shape
    )
    are_floats = image.dtype == adversarial.dtype == np.float32
    if not is_whole or not are_floats or {count for _, count in read.values()} != {len(idx)}:
        raise UserError(
            f"{path} holds no adversarial examples: idx [N], image and adversarial [N, C, H, W] "
            "are missing"
        )
    return arrays


def _read_array(
    archive: zipfile.ZipFile, name: str, rows: Sequence[int] | None
) -> tuple[np.ndarray, int]:
    """The array in a member, or these ``rows`` of it; and how many rows the member has."""
    with archive.open(name) as member:
        npy.read_magic(member)
        shape, is_fortran, dtype = npy.read_array_header_1_0(member)
        if is_fortran or not shape:
            raise ValueError("an array of another kind")
        size, start, parts = dtype.itemsize * math.prod(shape[1:]), member.tell(), []
        for row in range(shape[0]) if rows is None else (row for row in rows if row < shape[0]):
            member.seek(start + row * size)
            parts.append(member.read(size))
    return np.frombuffer(b"".join(parts), dtype).reshape(len(parts), *shape[1:]), shape[0]
