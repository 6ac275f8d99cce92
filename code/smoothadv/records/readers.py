"""Reads logs: ours, the released ones of Salman et al. and Cohen et al., and their descendants';
examples beside them.

No torch. A reader of logs returns a pandas DataFrame or raises one UserError that names the file
and the first fault; ``frame.attrs["notes"]`` is a list of sentences on the faults that were
tolerated. A field is read as the number that is printed there, or not at all: a general parser of
tables would guess at what is damaged. Blanks, quotes and capitals are harmless, tabs may be commas,
and an abstention may have no radius or a negative one.
"""

import csv
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from smoothadv.base.errors import UserError, counted, escape, first_line
from smoothadv.base.settings import refuse_any
from smoothadv.records import logs as records
from smoothadv.records.rows import prediction_checks, row_checks
from smoothadv.statistics import COUNT_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

DataFrame: TypeAlias = "pd.DataFrame"
"""For annotations: pandas takes half a second to load, and only functions that use it import it."""
_HEADER_BYTES = 4096
_LINE_END = re.compile("\r\n|\n|\r")
_WHOLE = re.compile("[-+]?[0-9]{1,18}")
# A prediction and a radius, as others write an abstention, which has no radius.
_ABSTENTION = re.compile(
    r"(?:-1|nan|none|)\t(?:nan|none|[-+]?0*\.?0*|-(?:[0-9]+\.?[0-9]*(?:e[-+]?[0-9]{1,4})?|inf))",
    re.IGNORECASE,
)
_RADII = re.compile("(?!.*attack)(.*radi|(.*_)?r$)", re.IGNORECASE)
# No part can match what its neighbour can: else a field of 100,000 digits would take minutes to
# refuse.
_REAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?|nan|[-+]?inf")
_CERTIFICATION = (*records.EXAMPLE_COLUMNS, "radius")
_OF_FALSIFICATION = records.FALSIFICATION_COLUMNS[len(records.ATTACK_COLUMNS) :]
# Nothing is computed from these released columns, and a time may be of any form.
UNREAD = {"time", "basePredict"}
_NUMERIC = {
    *records.CERTIFICATION_COLUMNS,
    *records.FALSIFICATION_COLUMNS,
    records.TARGET_COLUMN,
} - UNREAD
# A field as a message may repeat it: not all of it, and a digit that only looks like one is told
# from one.
_brief = partial(escape, most=40, plain=True)
_NOT_OF_LOGS = {".png", ".pdf", ".svg", ".html", ".tex", ".md", ".csv", ".json"}
_TRAINING = ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
_PERCENT = {"trainacc": "train_accuracy", "testacc": "test_accuracy"}
# Others spell these in several ways.
_NAMES = _PERCENT | {
    name.lower().replace("_", ""): name for name in (*_NUMERIC, *UNREAD, *_TRAINING)
}


def kind_of_log(path: str | Path) -> str | None:
    """The kind of a log, by the file's first line, as ``kind_of``; None if it is no log."""
    try:
        return kind_of({*map(_name, _header(Path(path)))})
    except OSError:
        return None


def kind_of(columns: Collection[str]) -> str | None:
    """ "certification", "prediction", "falsification", "scores" or "training", by the columns of a
    log; None if none has these.
    """
    columns = {*columns}
    if columns.issuperset((*records.EXAMPLE_COLUMNS, *_OF_FALSIFICATION)):
        return "falsification"
    if columns.issuperset((*records.EXAMPLE_COLUMNS, f"{records.SCORE}0")):
        return "scores"
    if columns.issuperset(records.EXAMPLE_COLUMNS):
        # Radii of another name must not pass as predictions: the reader says what to call them.
        return "certification" if any(map(_RADII.match, columns)) else "prediction"
    return "training" if columns.issuperset(_TRAINING) else None


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
    return named or records.manifest_path(path).exists() or start.lower().startswith("idx")


def read_certification_log(path: str | Path) -> DataFrame:
    """A certification log: columns idx, label, predict, correct (int64) and radius (float64),
    sorted by idx.

    All further numeric columns of the log follow under their names, such as successes, trials and
    those of its procedure: int64 where all fields are whole numbers, else float64. A column without
    any number is left out, and so are time and basePredict. UserError unless there are rows and
    every one is consistent: finite radii >= 0, one row per idx, ``correct`` equal to (predict ==
    label), abstentions (predict -1) with radius 0. A running total of hits in place of ``correct``,
    and True and False for 1 and 0, are understood and noted.
    """
    path = Path(path)
    columns, notes = _read_examples(path, "certification log", _CERTIFICATION)
    idx, predict, radius = columns["idx"], columns["predict"], columns["radius"]
    faults = {
        "a radius that is negative or not finite, of a prediction that is no abstention (-1)": ~(
            (radius >= 0) & (radius < np.inf)
        ),
        "an abstention with a radius": (predict == -1) & (radius > 0),
    }
    if columns.keys() >= set(COUNT_COLUMNS):
        successes, trials = (columns[name] for name in COUNT_COLUMNS)
        faults["successes that are not between 0 and trials, or a certificate of no trials"] = (
            (successes < 0) | (successes > trials) | ((trials < 1) & (predict >= 0))
        )
    _refuse(path, idx, faults)
    return _frame(columns, notes)


def read_prediction_log(path: str | Path) -> DataFrame:
    """A prediction log: columns idx, label, predict and correct (int64), sorted by idx; UserError
    as above.

    All further numeric columns follow as above, such as attack_norm and epsilon (float64), target
    (int64) and, of attacks against certificates, certified (int64), radius (float64) and flipped
    (int64).
    """
    return _frame(*_read_examples(Path(path), "prediction log", records.EXAMPLE_COLUMNS))


def read_training_log(path: str | Path) -> DataFrame:
    """A training log: columns epoch (int64, from 0), train_loss, train_accuracy, test_loss,
    test_accuracy (float64).

    Accuracies are fractions; those of released logs, in percent, are converted. UserError unless
    there are rows, epochs ascend, all numbers are finite and accuracies lie in [0, 1]; where a
    column test_images holds 0, there was no test and its numbers may be nan.
    """
    path = Path(path)
    texts, notes = _parse(path, "training log", _TRAINING)
    columns = {name: _numbers(path, name, texts, is_real=name != "epoch") for name in _TRAINING}
    spellings = {*map(_squeezed, _header(path))}
    for spelling, name in _PERCENT.items():
        columns[name] /= 100 if spelling in spellings else 1
    is_tested = (
        _numbers(path, "test_images", texts) > 0
        if "test_images" in texts
        else np.ones(len(columns["epoch"]), bool)
    )
    losses = np.concatenate([columns["train_loss"], columns["test_loss"][is_tested]])
    accuracies = np.concatenate([columns["train_accuracy"], columns["test_accuracy"][is_tested]])
    are_possible = np.isfinite(losses).all() and ((accuracies >= 0) & (accuracies <= 1)).all()
    refuse_any(
        {
            f"{path} holds a loss that is not finite or an accuracy outside 0 to 1": (
                not are_possible
            ),
            f"{path} holds epochs that do not ascend from 0 or more: two runs in one file?": (
                bool(columns["epoch"][0] < 0 or (np.diff(columns["epoch"]) <= 0).any())
            ),
        }
    )
    return _frame(columns, notes, "epoch")


def read_fields(path: str | Path) -> dict[int, dict[str, str]]:
    """The fields of a certification log as printed, by the index of the image and by column;
    UserError as above.
    """
    texts, _ = _parse(Path(path), "certification log", _CERTIFICATION)
    rows = [dict(zip(texts, fields)) for fields in zip(*texts.values())]
    return {int(float(row["idx"])): row for row in rows}


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

    Columns of ``records`` must hold numbers. Another one in which only some fields are numbers is
    noted and left out.
    """
    import pandas as pd

    texts, notes = _parse(path, kind, required)
    for name in texts.keys() & _NUMERIC - records.REAL_COLUMNS:
        # pandas writes 8.0 in a column that lacks a value somewhere.
        texts[name] = [re.sub(r"(?<=[0-9])\.0*$", "", text) for text in texts[name]]
    texts["predict"] = ["-1" if text.lower() == "abstain" else text for text in texts["predict"]]
    pairs = enumerate(zip(texts["predict"], texts.get("radius", [])))
    for row in [row for row, pair in pairs if _ABSTENTION.fullmatch("\t".join(pair))]:
        texts["predict"][row], texts["radius"][row] = "-1", "0"
    columns = {name: _numbers(path, name, texts) for name in required if name != "correct"}
    for name in [name for name in texts if name not in {*required, *UNREAD, ""}]:
        are_numbers = [bool(_REAL.fullmatch(text)) for text in texts[name]]
        if name in _NUMERIC:
            columns[name] = _numbers(path, name, texts)
        elif all(are_numbers):
            is_real = not all(_WHOLE.fullmatch(text) for text in texts[name])
            columns[name] = _numbers(path, name, texts, is_real)
        elif any(are_numbers):
            notes.append(
                f"its column {_brief(name)} is left out: some of its fields are numbers, others "
                "are not"
            )
    idx, label, predict = columns["idx"], columns["label"], columns["predict"]
    hits = columns["correct"] = (predict == label).astype(np.int64)
    correct = [{"true": "1", "false": "0"}.get(text.lower(), text) for text in texts["correct"]]
    wrong, total = np.array([*map(str, hits)]) != correct, hits.cumsum()
    # Only a number above 1 distinguishes a running total from 0s and 1s that are wrong.
    if is_total := wrong.any() and total[-1] > 1 and correct == [*map(str, total)]:
        notes.append("its 'correct' is a running total; label and predict were compared instead")
    faults = {
        "a 'correct' that disagrees with label and predict": wrong & (not is_total),
        "an example that is there twice": pd.Series(idx).duplicated().to_numpy(),
        "an index or a label below 0, or a prediction below -1": (
            (idx < 0) | (label < 0) | (predict < -1)
        ),
    }
    _refuse(path, idx, faults)
    if (manifest := records.manifest_beside(path)) is not None:
        _refuse(
            path,
            idx,
            {
                f"a row that cannot be: {fault}": ~np.broadcast_to(holds, len(idx))
                for fault, holds in _checks(path, texts, manifest).items()
            },
        )
    return columns, notes


def _checks(path: Path, texts: dict[str, list[str]], manifest: dict[str, Any]) -> dict[str, Any]:
    """The rules for the rows of a log of this package, as in ``row_checks``; UserError where its
    columns do not fit its manifest.

    There are none for a log with the columns of a released one, or for the procedure of a plug-in.
    """
    settings, is_prediction = manifest["settings"], "basePredict" in texts
    is_released = texts.keys() <= {*records.CERTIFICATION_COLUMNS[:6]}
    if is_released or settings.get("method", "exact") not in records.METHODS:
        return {}
    if is_prediction:
        kinds = records.PREDICTION_COLUMNS, records.ATTACK_COLUMNS, records.FALSIFICATION_COLUMNS
        target = [records.TARGET_COLUMN] * (records.TARGET_COLUMN in texts)
        kind = kinds[bool(settings.get("attack")) + ("against" in settings)]
        expected = [*kind, *target, *records.numbered(texts, records.CLASS)]
    elif fault := records.log_fault(manifest):
        raise UserError(f"{path} is left in doubt: its manifest {fault}")
    else:
        expected = records.certification_columns(settings)
    if sorted(expected) != sorted(texts):
        raise UserError(
            f"{path} has not the columns that its manifest tells of, "
            f"{escape(' '.join(expected), 200)}"
        )
    row = {name: _numbers(path, name, texts) for name in expected if name != "time"}
    if is_prediction:
        return prediction_checks(row, settings)
    images = records.images_of(settings, manifest["runs"][-1])
    # A range may be too long for an array.
    chosen = images if isinstance(images, range) else {*images}
    is_chosen = np.array([index in chosen for index in row["idx"].tolist()])
    return row_checks(row, settings, is_chosen)


def _frame(columns: dict[str, np.ndarray], notes: list[str], by: str = "idx") -> DataFrame:
    import pandas as pd

    frame = pd.DataFrame(columns).sort_values(by, kind="stable", ignore_index=True)
    frame.attrs["notes"] = notes
    return frame


def _numbers(
    path: Path, name: str, texts: dict[str, list[str]], is_real: bool | None = None
) -> np.ndarray:
    """A column as float64, next to the decimals written, if it ``is_real`` (None: if it is one of
    REAL_COLUMNS), else as int64.
    """
    is_real = name in records.REAL_COLUMNS if is_real is None else is_real
    pattern = _REAL if is_real else _WHOLE
    for number, text in enumerate(texts[name], start=1):
        if not pattern.fullmatch(text):
            raise UserError(
                f"{path} holds a field that is not a number: {_brief(name)} is '{_brief(text)}' in "
                f"row {number}" + ", where an abstention is -1" * (name == "predict")
            )
    return np.array([*map(float if is_real else int, texts[name])], float if is_real else np.int64)


def _parse(
    path: Path, kind: str, required: Collection[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """The fields of a log by column, each row of as many as the header, and notes. A torn last line
    is dropped and noted.

    No two columns may have names that stand for the same, and one must for each of ``required``.
    """
    try:
        lines = _LINE_END.split(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read as a {kind}: it is no text") from error
    header = [*map(_name, _fields(lines[0], lines[0]))]
    if missing := [name for name in required if name not in header]:
        like = [f"; rename {_brief(one)} if it holds these" for one in header if _RADII.match(one)]
        raise UserError(
            f"{path} is no {kind}: its first line lacks the column {', '.join(missing)}"
            + f" (l2 radii of images in [0, 1]{''.join(like[:1])})" * ("radius" in missing)
            + f"; it must name the columns, and is '{escape(lines[0], 100, plain=True)}'"
        )
    notes: list[str] = []
    rows = [_fields(line, lines[0]) for line in lines[1:-1] if line.strip(" ")]
    if len(lines) > 1 and (last := _fields(lines[-1], lines[0])) != [""]:
        # A last field that was cut looks like a whole one: harmless only for a time, from which
        # nothing is computed.
        if header[-1] == "time" and len(last) == len(header) and last[-1]:
            rows.append(last)
        else:
            notes.append("its last line has no end: it may have been cut off and is left out")
    if not rows:
        raise UserError(f"{path} holds no rows yet: the {kind} has only a header")
    if twice := [name for name in header if header.count(name) > 1]:
        raise UserError(
            f"{path} has two columns that are its {_brief(twice[0])}: which one counts?"
        )
    if torn := [row for row in rows if len(row) != len(header)]:
        raise UserError(
            f"{path} holds a row of {counted(len(torn[0]), 'field')} below a header of "
            f"{len(header)}, first at {_brief(header[0])} {_brief(torn[0][0])}"
        )
    return dict(zip(header, map(list, zip(*rows)))), notes


def _header(path: Path) -> list[str]:
    """The names in the first line, as far as a sensible header reaches."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    line = _LINE_END.split(start.decode("utf-8-sig", errors="replace"))[0]
    return _fields(line, line)


def _fields(line: str, header: str) -> list[str]:
    """The fields of a line without the blanks and the quotes around them; what separates them,
    outside of quotes, is what separates the names in the ``header``.
    """
    separator = next((one for one in "\t,;" if one in header), None)
    fields = line.split(separator)
    # Quotes come in pairs, and no field beyond the limit of csv is one of a log.
    is_quoted = '"' in line and line.count('"') % 2 == 0
    if separator and is_quoted and len(line) < csv.field_size_limit():
        fields = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
    return [re.sub('^"(.*)"$', r"\1", field.strip(" ")) for field in fields] or [""]


def _squeezed(column: str) -> str:
    return column.lower().replace(" ", "").replace("_", "")


def _name(column: str) -> str:
    return _NAMES.get(_squeezed(column), column)


def _refuse(path: Path, idx: np.ndarray, faults: dict[str, np.ndarray]) -> None:
    for fault, rows in faults.items():
        if rows.any():
            raise UserError(f"{path} holds {fault}, first at idx {idx[rows][0]}")


def read_examples(path: str | Path, rows: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an archive of adversarial examples, of images only those in these ``rows``,
    ascending (None: all).

    Rows that it lacks are left out. UserError where it is missing, damaged or something else.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged file can raise nearly anything
        raise UserError(
            f"{path} cannot be read as adversarial examples: {first_line(error)}"
        ) from error
    idx, image, adversarial = (
        arrays.get(name, np.empty(())) for name in ("idx", "image", "adversarial")
    )
    is_whole = idx.ndim == 1 and idx.dtype.kind == "i" and image.ndim == 4
    are_alike = image.shape == adversarial.shape and image.dtype == adversarial.dtype == np.float32
    if not is_whole or not are_alike or {len(each) for each in arrays.values()} != {len(idx)}:
        raise UserError(
            f"{path} holds no adversarial examples: idx [N], image and adversarial [N, C, H, W] "
            "are missing"
        )
    chosen = [row for row in range(len(idx)) if rows is None or row in rows]
    return arrays | {"image": image[chosen], "adversarial": adversarial[chosen]}
