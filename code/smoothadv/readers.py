"""Reads logs: ours, the released ones of Salman et al. and Cohen et al., and their descendants'. No torch.

Each reader returns a pandas DataFrame or raises one UserError that names the file and the first fault in it;
what was tolerated is told in ``frame.attrs["notes"]``, a list of sentences. A number is read as it is
printed or not at all.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.errors import UserError
from smoothadv.records import manifest_path

_HEADER_BYTES = 4096
_TWO_LINES = 65_536
_CERTIFICATION = ("idx", "label", "predict", "radius", "correct")
_PREDICTION = ("idx", "label", "predict", "correct")
# The released training logs spell these in several ways and orders; a suffix says what the released unit is.
_TRAINING_NAMES = {
    "epoch": "epoch",
    "time": "time",
    "lr": "lr",
    "epsilon": "epsilon",
    "trainloss": "train_loss",
    "trainaccuracy": "train_accuracy",
    "trainacc": "train_accuracy%",
    "testloss": "test_loss",
    "testaccuracy": "test_accuracy",
    "testacc": "test_accuracy%",
}
_TRAINING = {"epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy"}


def kind_of_log(path: Path) -> str | None:
    """ "certification", "prediction" or "training" by the file's first line; None for anything else."""
    try:
        columns = _columns(_first_line(path))
    except OSError:
        return None
    if columns.issuperset(_PREDICTION):
        return "certification" if "radius" in columns else "prediction"
    return "training" if {_training_name(column).rstrip("%") for column in columns} >= _TRAINING else None


def resembles_log(path: Path) -> bool:
    """Whether a file's name, start or manifest suggests a log of examples: a search must not pass it over silently."""
    try:
        start = _text(_first_line(path)[:8])
    except OSError:
        return False
    named = path.name.startswith("sigma_") or path.name == "predictions" or manifest_path(path).exists()
    return named or start.startswith("idx")


def read_certification_log(path: Path) -> Any:
    """A certification log: columns idx, label, predict, correct (int64) and radius (float64), sorted by idx.

    Columns successes and trials (int64) follow where the log has both. UserError unless there are rows and
    every one is consistent: finite radii >= 0, one row per idx, ``correct`` equal to (predict == label),
    abstentions (predict -1) with radius 0. A running total of hits in place of ``correct``, and True and
    False for 1 and 0, are noted and understood.
    """
    columns, notes = _read_examples(path, "certification log", _CERTIFICATION, ("successes", "trials"))
    idx, predict, radius = columns["idx"], columns["predict"], columns["radius"]
    _refuse(path, idx, "a radius that is negative or not finite", ~((radius >= 0) & (radius < np.inf)))
    _refuse(path, idx, "an abstention with a radius", (predict == -1) & (radius > 0))
    if "trials" in columns:
        impossible = (columns["successes"] < 0) | (columns["successes"] > columns["trials"]) | (columns["trials"] < 1)
        _refuse(path, idx, "successes that are not between 0 and trials, or no trials", impossible)
    return _frame(columns, notes)


def read_prediction_log(path: Path) -> Any:
    """A prediction log: columns idx, label, predict and correct (int64), sorted by idx; UserError as above."""
    return _frame(*_read_examples(path, "prediction log", _PREDICTION))


def read_training_log(path: Path) -> Any:
    """A training log: columns epoch (int64, from 0), train_loss, train_accuracy, test_loss, test_accuracy (float64).

    Accuracies are fractions; the released logs, in percent, are converted. UserError unless there are rows,
    epochs ascend and all is finite, accuracies in [0, 1].
    """
    table, notes = _parse(path, "training log", {})
    names = {column: _training_name(column) for column in table.columns}
    missing = _TRAINING - {name.rstrip("%") for name in names.values()}
    if missing:
        raise UserError(f"{path} is no training log: it lacks the column {', '.join(sorted(missing))}")
    table = table.rename(columns=names)
    try:
        result = table[["epoch"]].astype("int64")
        for name in sorted(_TRAINING - {"epoch"}):
            percent = f"{name}%" in table
            result[name] = table[f"{name}%" if percent else name].astype("float64") / (100 if percent else 1)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path} holds a field that is not a number: {_one_line(error)}") from error
    accuracies = result[["train_accuracy", "test_accuracy"]]
    finite = result[["train_loss", "test_loss"]].abs().lt(float("inf")).all(axis=None)
    if not finite or not accuracies.ge(0).all(axis=None) or not accuracies.le(1).all(axis=None):
        raise UserError(f"{path} holds a loss that is not finite or an accuracy that is no share")
    if not result.epoch.is_monotonic_increasing or result.epoch.duplicated().any():
        raise UserError(f"{path} holds epochs that do not ascend: two runs in one file?")
    result.attrs["notes"] = notes
    return result


def _read_examples(
    path: Path, kind: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The numeric columns of a log with a row per example and notes; all that both kinds of log promise is checked."""
    try:
        header = _columns(_first_line(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    missing = [column for column in required if column not in header]
    if missing:
        raise UserError(f"{path} is no {kind}: its first line lacks the column {', '.join(missing)}")
    names = [*required, *(optional if header.issuperset(optional) else ())]
    types = {name: "float64" if name == "radius" else "int64" for name in names if name != "correct"}
    table, notes = _parse(path, kind, types)
    # Arrays rather than pandas columns: a folder of thousands of small logs is read several times faster.
    columns = {name: table[name].to_numpy() for name in types}
    idx, label, predict = columns["idx"], columns["label"], columns["predict"]
    columns["correct"] = (predict == label).astype(np.int64)
    _check_correct(path, idx, table["correct"].tolist(), columns["correct"], notes)
    if len(np.unique(idx)) < len(idx):
        _refuse(path, idx, "an example that is there twice", table["idx"].duplicated().to_numpy())
    negative = (idx < 0) | (label < 0) | (predict < -1)
    _refuse(path, idx, "an index or a label below 0, or a prediction below -1", negative)
    return columns, notes


def _check_correct(path: Path, idx: np.ndarray, told: list[str], hits: np.ndarray, notes: list[str]) -> None:
    """UserError unless the texts ``told`` in the column ``correct`` say what label and predict do, in some dialect."""
    if told == list(map(str, hits.tolist())):
        return
    _refuse(path, idx, "a row that lacks fields", np.array([text == "" for text in told]))
    told = [{"True": "1", "False": "0"}.get(text, text) for text in told]
    wrong = np.array([text != str(hit) for text, hit in zip(told, hits)])
    total = np.cumsum(hits)
    # Only a number above 1 tells a running total from 0s and 1s that are wrong.
    if wrong.any() and total[-1] > 1 and told == list(map(str, total.tolist())):
        notes.append("its 'correct' is a running total; label and predict were compared instead")
    else:
        _refuse(path, idx, "a 'correct' that disagrees with label and predict", wrong)


def _frame(columns: dict[str, np.ndarray], notes: list[str]) -> Any:
    """The columns as a DataFrame sorted by idx, with the notes."""
    import pandas as pd

    order = np.argsort(columns["idx"], kind="stable")
    frame = pd.DataFrame({name: column[order] for name, column in columns.items()})
    frame.attrs["notes"] = notes
    return frame


def _parse(path: Path, kind: str, types: dict[str, str]) -> tuple[Any, list[str]]:
    """All rows, columns of ``types`` as such and the others as text, and notes: a torn last line is dropped."""
    import pandas as pd

    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if b"\0" in content:
        raise UserError(f"{path} cannot be read as a {kind}: it is a binary file")
    content, notes = _without_torn_line(content)
    first, second = [*content[:_TWO_LINES].splitlines()[:2], b"", b""][:2]
    if second.count(b"\t") > first.count(b"\t"):  # pandas would take the first field for the row's name
        raise UserError(f"{path} has rows with more fields than its header: no telling which column is which")
    # Text stays text, whatever its name suggests: a log may be called anything, and hold any field.
    options = {"sep": "\t", "quoting": 3, "keep_default_na": False, "na_filter": False, "encoding": "utf-8-sig"}
    try:
        table = pd.read_csv(io.BytesIO(content), dtype=_all_columns(content, types), **options)
        for column in [name for name, type_ in types.items() if type_ == "float64"]:
            table[column] = _exact_floats(table[column])
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read as a {kind}: {_one_line(error)}") from error
    except (ValueError, OverflowError) as error:
        culprit = _first_fault(content, options, types) or _one_line(error)
        raise UserError(f"{path} holds a field that is not a number: {culprit}") from error
    if table.empty:
        raise UserError(f"{path} holds no rows yet: the {kind} has only a header")
    return table, notes


def _all_columns(content: bytes, types: dict[str, str]) -> dict[str, str]:
    names = _text(content[: content.find(b"\n") + 1] or content).rstrip("\r\n").split("\t")
    whole = [name for name, type_ in types.items() if type_ == "int64"]
    return {name: "int64" if name in whole else "str" for name in names}


def _first_fault(content: bytes, options: dict[str, Any], types: dict[str, str]) -> str | None:
    """The first field that is no whole number where one should be, as a person would look for it."""
    import pandas as pd

    table = pd.read_csv(io.BytesIO(content), dtype="str", **options)
    for column in [name for name, type_ in types.items() if type_ == "int64"]:
        faults = ~table[column].str.fullmatch("[-+]?[0-9]{1,18}")
        if faults.any():
            return f"{column} is '{table[column][faults].iloc[0]}' in row {faults.argmax() + 1}"
    return None


def _exact_floats(texts: Any) -> np.ndarray:
    """float64 next to the decimal written, which pandas' own parser of numbers does not promise in all versions."""
    values = texts.tolist()
    odd = [text for text in values if "_" in text]
    if odd:  # Python alone takes 1_0 for a number
        raise ValueError(f"could not convert string to float: '{odd[0]}'")
    return np.array([float(text) for text in values])


def _without_torn_line(content: bytes) -> tuple[bytes, list[str]]:
    """The content without a last line that was cut; a last line that merely lacks its end is left in place.

    Only a last field that is a time may have been cut without a trace: nothing is computed from it.
    """
    end = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
    header, last = content.split(b"\n", 1)[0].rstrip(b"\r").split(b"\t"), content[end:]
    if not last or end == 0:
        return content, []
    if header[-1] == b"time" and last.count(b"\t") + 1 == len(header) and not last.endswith(b"\t"):
        return content, []
    return content[:end], ["its last line was cut off and is left out"]


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline(_HEADER_BYTES)


def _columns(line: bytes) -> set[str]:
    return set(_text(line).rstrip("\r\n").split("\t"))


def _text(line: bytes) -> str:
    return line.decode("utf-8-sig", errors="replace")


def _training_name(column: str) -> str:
    return _TRAINING_NAMES.get(column.lower().replace(" ", "").replace("_", ""), column)


def _refuse(path: Path, idx: np.ndarray, fault: str, rows: np.ndarray) -> None:
    if rows.any():
        raise UserError(f"{path} holds {fault}, first at idx {idx[rows][0]}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
