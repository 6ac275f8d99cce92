"""Training logs: ours, those of Cohen et al.'s train.py and of Salman et al.'s train_pgd.py give
the same table.
"""

import pytest

from smoothadv.records.logs import TRAINING_COLUMNS
from smoothadv.records.readers import kind_of_log, read_training_log
from support import refusals

OURS = """epoch time lr epsilon train_loss train_accuracy test_loss test_accuracy
0 12.5 0.1 0.0 2.2512345678901234 0.125 2.0 0.25
1 11.25 0.1 0.025 1.5 0.5012345678901234 1.75 0.4375
2 11.25 0.01 0.05 0.75 1.0 1.25 0.0"""
RELEASED = {
    # Written by "{:.3}", separated by tabs; the names have spaces, here written as ~.
    "Cohen et al.'s": """epoch time lr train~loss train~acc testloss test~acc
0 3.53e+02 0.1 1.99 26.5 1.83 32.7
1 0:0 0.1 1.73 36.2 1.7 37.9
2 3.5e+02 0.01 0.75 1e+02 1.25 0.0""",
    # The other order: both losses, then both accuracies. The times have two decimals.
    "Salman et al.'s": """epoch time lr trainloss testloss trainacc testacc
0 353.21 0.1 1.99 1.83 26.5 32.7
1 352.90 0.1 1.73 1.7 36.2 37.9
2 352.90 0.01 0.75 1.25 1e+02 0.0""",
    # The last column, testaccNor, is on unattacked noisy images: it does not stand in for testacc.
    "Salman et al.'s with four": """epoch time lr trainloss testloss trainacc testacc testaccNor
0 353.21 0.1 1.99 1.83 26.5 32.7 41.1
1 352.90 0.1 1.73 1.7 36.2 37.9 46.6
2 352.90 0.01 0.75 1.25 1e+02 0.0 1e+02""",
}
DIALECTS = {"ours": OURS, **RELEASED}
RELEASED_COLUMNS = {
    "epoch": [0, 1, 2],
    "train_loss": [1.99, 1.73, 0.75],
    "train_accuracy": [0.265, 0.362, 1.0],
    "test_loss": [1.83, 1.7, 1.25],
    "test_accuracy": [0.327, 0.379, 0.0],
}


def write(path, text: str, ends: str = "\n"):
    """Write a log given with spaces for tabs, and ~ for spaces."""
    path.write_bytes(
        (text.replace(" ", "\t").replace("~", " ").replace("\n", ends) + ends).encode()
    )
    return path


def refusal(path) -> str:
    return refusals.refusal(read_training_log, path, names=path)


def whole_log(tested: str = "2.0 0.25 0.5 nan 100", untested: str = "nan nan nan nan 0") -> str:
    """A log with all columns that we write, of one epoch that was tested and one that was not."""
    rows = [f"0 11 0.1 0 2.25 0.125 nan {tested} 900.5", f"1 11 0.1 0 1.5 0.5 nan {untested} 900.5"]
    return "\n".join([" ".join(TRAINING_COLUMNS), *rows])


def test_epochs_without_a_test_have_none(tmp_path):
    table = read_training_log(write(tmp_path / "log.txt", whole_log()))
    assert table.train_loss.tolist() == [2.25, 1.5] and table.test_accuracy.isna().tolist() == [
        False,
        True,
    ]
    assert (table.test_loss[0], table.test_accuracy[0]) == (2.0, 0.25)


def test_test_that_took_place_must_have_given_numbers(tmp_path):
    assert "not finite" in refusal(
        write(tmp_path / "log.txt", whole_log(untested="nan 0.5 0.5 nan 100"))
    )
    assert "outside 0 to 1" in refusal(
        write(tmp_path / "log.txt", whole_log(tested="2.0 nan 0.5 nan 100"))
    )


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("text", RELEASED.values(), ids=RELEASED)
def test_released_log_is_read_by_name_and_its_percents_become_fractions(tmp_path, text, ends):
    table = read_training_log(write(tmp_path / "log.txt", text, ends))
    types = {name: "int64" if name == "epoch" else "float64" for name in RELEASED_COLUMNS}
    assert {name: str(kind) for name, kind in table.dtypes.items()} == types
    for name, values in RELEASED_COLUMNS.items():
        assert table[name].tolist() == pytest.approx(values, rel=1e-15), name


@pytest.mark.parametrize("text", DIALECTS.values(), ids=DIALECTS)
def test_training_log_is_told_by_its_header(tmp_path, text):
    header, first, *_ = text.splitlines()
    texts = (text, header, first, header.replace("epoch", "step"))
    kinds = [kind_of_log(write(tmp_path / "log", each)) for each in texts]
    assert kinds == ["training", "training", None, None]


@pytest.mark.parametrize("text", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize(
    "column", ["epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy"]
)
def test_missing_column_is_named(tmp_path, text, column):
    words = {
        "train_accuracy": ("train_accuracy", "train~acc", "trainacc"),
        "test_loss": ("test_loss", "testloss"),
        "test_accuracy": ("test_accuracy", "test~acc", "testacc"),
        "epoch": ("epoch",),
    }
    words["train_loss"] = ("train_loss", "train~loss", "trainloss")
    header, *rows = text.splitlines()
    names = ["other" if name in words[column] else name for name in header.split(" ")]
    message = refusal(write(tmp_path / "log.txt", "\n".join([" ".join(names), *rows])))
    assert f"lacks the column {column}" in message


def test_epochs_may_start_late_and_leave_gaps_but_neither_fall_nor_begin_before_the_first(tmp_path):
    """A resumed run may have logged its start elsewhere."""
    header, *rows = OURS.splitlines()
    late = [header, rows[1], rows[2].replace("2 ", "9 ", 1)]
    table = read_training_log(write(tmp_path / "log.txt", "\n".join(late)))
    assert table.epoch.tolist() == [1, 9]
    for epochs in ([*rows, *rows], [*rows, rows[-1]], ["-1" + rows[0][1:], *rows]):
        assert "two runs" in refusal(write(tmp_path / "log.txt", "\n".join([header, *epochs])))


@pytest.mark.parametrize("name", ["epoch", "train_loss", "train_accuracy", "test_loss"])
def test_column_that_is_there_twice_is_refused(tmp_path, name):
    """Under the same name, or under another name of the same column: it is unclear which one
    counts.
    """
    header, *rows = OURS.splitlines()
    for again in {name, name.upper(), name.replace("_", "").replace("accuracy", "acc")} - {"epoch"}:
        text = "\n".join([f"{header} {again}", *(f"{row} 0.75" for row in rows)])
        refusal(write(tmp_path / "log.txt", text))
    refusal(
        write(tmp_path / "log.txt", "\n".join([f"{header} epoch", *(f"{row} 7" for row in rows)]))
    )


@pytest.mark.parametrize("text", DIALECTS.values(), ids=DIALECTS)
def test_torn_last_row_is_left_out_and_told(tmp_path, text):
    path = write(tmp_path / "log.txt", text)
    path.write_bytes(path.read_bytes()[:-2])
    table = read_training_log(path)
    assert table.epoch.tolist() == [0, 1] and "cut off" in table.attrs["notes"][0]
