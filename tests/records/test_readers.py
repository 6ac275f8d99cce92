"""Certification and prediction logs, ours and the released ones, are read exactly; all logs are
refused by fault.
"""

import inspect
import re

import numpy as np
import pytest

from smoothadv.records.readers import (
    _checks,
    kind_of_log,
    read_certification_log,
    read_prediction_log,
    read_training_log,
)
from support.refusals import refusal

RELEASED_HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime"
PREDICTION_HEADER = "idx\tlabel\tpredict\tbasePredict\tcorrect\ttime"
TRAINING_HEADER = "epoch time lr epsilon train_loss train_accuracy test_loss test_accuracy"
EPOCH = "0 12.5 0.1 0.0 2.25 0.125 2.0 0.25"

CERTIFICATION_LOGS = {
    "ours": """idx label predict radius correct time successes trials
        0 3 3 0.95289123456789012 1 0:00:15.123456 99000 100000
        20 7 -1 0.0 0 0:00:14.000001 40000 100000
        40 1 2 0.12345678901234567 0 0:00:14.000001 60000 100000""",
    "three significant digits": """idx label predict radius correct time
        0 3 3 1.91 1 0:00:15.062345
        20 7 -1 0.0 0 0:00:15.062345
        40 1 2 9.76e-05 0 0:00:15.062345""",
    "four decimals, whole seconds": """idx label predict radius correct time
        0 3 3 1.9057 1 0:00:15
        20 7 -1 0.0000 0 1:02:03
        40 1 2 0.0001 0 0:00:15""",
    "times that are bare numbers": """idx label predict radius correct time
        0 3 3 0.5 1 15.4
        20 7 -1 0.0 0 15
        40 1 2 0.25 0 15.4""",
}
RADII = {
    "ours": [0.95289123456789012, 0.0, 0.12345678901234567],
    "three significant digits": [1.91, 0.0, 9.76e-05],
    "four decimals, whole seconds": [1.9057, 0.0, 0.0001],
    "times that are bare numbers": [0.5, 0.0, 0.25],
}


def write(path, text: str):
    """Write a log given with spaces for tabs."""
    lines = [line.strip().replace(" ", "\t") for line in text.splitlines()]
    path.write_text("\n".join(lines) + "\n")
    return path


def columns_of(table) -> dict[str, list]:
    return {column: table[column].tolist() for column in table.columns}


@pytest.mark.parametrize("dialect", CERTIFICATION_LOGS)
def test_certification_log_is_read_exactly(tmp_path, dialect):
    table = read_certification_log(write(tmp_path / "sigma_0.25", CERTIFICATION_LOGS[dialect]))
    counts = (
        {"successes": [99000, 40000, 60000], "trials": [100000] * 3} if dialect == "ours" else {}
    )
    assert columns_of(table) == {
        **counts,
        "idx": [0, 20, 40],
        "label": [3, 7, 1],
        "predict": [3, -1, 2],
        "radius": RADII[dialect],
        "correct": [1, 0, 0],
    }
    types = {column: str(dtype) for column, dtype in table.dtypes.items()}
    assert types == {**dict.fromkeys(table.columns, "int64"), "radius": "float64"}


PLAIN = inspect.cleandoc(CERTIFICATION_LOGS["three significant digits"])
OTHER_FORMS = {
    "blanks around tabs": PLAIN.replace(" ", " \t "),
    "commas": PLAIN.replace(" ", ","),
    "semicolons": PLAIN.replace(" ", ";"),
    "blanks": PLAIN.replace(" ", "  "),
    "quotes": PLAIN.replace(" ", '","').replace("\n", '"\n"').join('""'),
    "quotes around a comma": PLAIN.replace(" ", ",").replace("0:00:15", '"1 day, 0:00:15"'),
    "a mark of UTF-8": "\ufeff" + PLAIN.replace(" ", "\t"),
    "carriage returns": PLAIN.replace(" ", "\t").replace("\n", "\r\n"),
    "columns in another order": "\n".join(
        "\t".join([*line.split()[::-1], "more"]) for line in PLAIN.splitlines()
    ),
    "capitals": PLAIN.replace("radius", "Radius").replace("idx", "IDX"),
    "numbers of pandas": PLAIN.replace("0 3 3 1.91 1", "0.0 3.0 3.0 1.91 1.0"),
    "an abstention as a word": PLAIN.replace("7 -1 0.0", "7 ABSTAIN 0.0"),
    "an abstention without numbers": PLAIN.replace("7 -1 0.0", "7 nan nan"),
    "an abstention with a negative radius": PLAIN.replace("7 -1 0.0", "7 -1 -0.00194"),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_log_of_another_form_is_read_as_the_plain_one(tmp_path, form):
    plain = read_certification_log(write(tmp_path / "plain", PLAIN))
    (tmp_path / "log").write_text(OTHER_FORMS[form] + "\n")
    assert kind_of_log(tmp_path / "log") == "certification"
    assert read_certification_log(tmp_path / "log").equals(plain)


@pytest.mark.parametrize(
    ("header", "counts", "words"),
    [
        (
            RELEASED_HEADER.replace("radius", "linf_radius"),
            "",
            "lacks the column radius .l2.*linf",
        ),
        (RELEASED_HEADER.replace("radius", "cert_r"), "", "; rename cert_r if it holds these"),
        (RELEASED_HEADER.replace("radius", "R"), "", "; rename R if it holds these"),
        (f"# sigma = 0.25\n{RELEASED_HEADER}", "", "must name the columns, and is '#..sigma"),
        (
            f"{RELEASED_HEADER} successes trials successes",
            " 9 10 8",
            "two columns that are its successes",
        ),
    ],
    ids=["of another norm", "abbreviated", "a letter", "of a comment", "one name twice"],
)
def test_header_that_is_none_is_refused(tmp_path, header, counts, words):
    path = write(tmp_path / "log", f"{header}\n20 7 7 0.5 1 0:00:01{counts}")
    assert kind_of_log(path) != "prediction"
    assert re.search(words, refusal(read_certification_log, path))


OF_ANOTHER_PROCEDURE = f"""{RELEASED_HEADER} draws share comment
    20 7 7 0.5 1 0:00:01 300 0.25 fine
    0 3 3 0.1 1 0:00:02 100 1 odd"""


@pytest.mark.parametrize("read", [read_certification_log, read_prediction_log])
def test_numeric_columns_that_the_package_does_not_know_are_read(tmp_path, read):
    table = read(write(tmp_path / "log", OF_ANOTHER_PROCEDURE))
    assert table.draws.tolist() == [100, 300] and str(table.draws.dtype) == "int64"
    assert table.share.tolist() == [1.0, 0.25] and str(table.share.dtype) == "float64"
    assert not {"comment", "time"} & set(table.columns) and table.attrs["notes"] == []


def test_column_of_numbers_and_texts_is_left_out_with_a_note(tmp_path):
    table = read_certification_log(
        write(tmp_path / "log", OF_ANOTHER_PROCEDURE.replace("300", "many"))
    )
    assert "draws" not in table and "share" in table
    assert table.attrs["notes"] == [
        "its column draws is left out: some of its fields are numbers, others are not"
    ]


GOOD = "20 7 7 0.5 1 0:00:01"
CERTIFICATION_FAULTS = {
    "radius below zero": ("40 1 1 -0.1 1 0:00:01", "radius.*idx 40"),
    "infinite radius": ("40 1 1 inf 1 0:00:01", "radius.*idx 40"),
    "radius that is no number": ("40 1 1 nan 1 0:00:01", "radius.*idx 40"),
    "radius that is text": ("40 1 1 big 1 0:00:01", "not a number.*big"),
    "empty radius": ("40\t1\t1\t\t1\t0:00:01", "not a number"),
    "abstention with a radius": ("40 1 -1 0.3 0 0:00:01", "abstention.*idx 40"),
    "one example twice": ("20 7 7 0.5 1 0:00:01", "twice.*idx 20"),
    "one example twice with different outcomes": ("20 7 3 0.1 0 0:00:01", "twice.*idx 20"),
    "correct without being it": ("40 1 2 0.3 1 0:00:01", "correct.*idx 40"),
    "wrong without being it": ("40 1 1 0.3 0 0:00:01", "correct.*idx 40"),
    "two more than the running total": ("40 1 1 0.3 3 0:00:01", "correct.*idx 40"),
    "abstention counted as correct": ("40 1 -1 0.0 1 0:00:01", "correct.*idx 40"),
    "label that is text": ("40 cat 1 0.3 0 0:00:01", "not a number.*cat"),
    "idx with a fraction": ("40.5 1 1 0.3 1 0:00:01", "not a number.*idx is .40.5. in row 2"),
    "index below 0": ("-40 1 1 0.3 1 0:00:01", "below 0.*idx -40"),
    "label below 0": ("40 -1 1 0.3 0 0:00:01", "below 0.*idx 40"),
    "prediction below -1": ("40 1 -2 0.3 0 0:00:01", "below 0.*idx 40"),
    "torn row before another": ("40 1 1 0.3\n60 1 1 0.3 1 0:00:01", "row of . fields.*idx 40"),
    "too many fields": ("40 1 1 0.3 1 0:00:01 9 9 9", "row of 9 fields.*idx 40"),
    "two, of which the first is named": ("40 1 1 -1 1 0:00:01\n60 1 1 -2 1 0:00:01", "idx 40"),
}


PREDICTION_FAULTS = {
    "correct without being it": ("40 1 2 1 1 0:00:01", "correct.*idx 40"),
    "one example twice": ("20 7 7 7 1 0:00:01", "twice.*idx 20"),
    "prediction that is text": ("40 1 two 1 0 0:00:01", "not a number.*two"),
    "torn row before another": ("40 1\n60 1 1 1 1 0:00:01", "row of . fields.*idx 40"),
}
COUNT_FAULTS = {
    "fewer successes than none": ("40 1 1 0.3 1 0:00:01 -1 10", "between 0 and trials.*idx 40"),
    "more successes than trials": ("40 1 1 0.3 1 0:00:01 11 10", "between 0 and trials.*idx 40"),
    "a certificate of no trials": ("40 1 1 0.3 1 0:00:01 0 0", "between 0 and trials.*idx 40"),
}
TRAINING_FAULTS = {
    "a loss that is no number": ("1 11 0.1 0 nan 0.5 1 0.5", "not finite"),
    "an infinite loss": ("1 11 0.1 0 1 0.5 inf 0.5", "not finite"),
    "a loss that is text": ("1 11 0.1 0 big 0.5 1 0.5", "not a number.*big"),
    "a loss that is empty": ("1 11 0.1 0  0.5 1 0.5", "not a number"),
    "an accuracy above one": ("1 11 0.1 0 1 50 1 0.5", "outside 0 to 1"),
    "an accuracy below zero": ("1 11 0.1 0 1 0.5 1 -0.1", "outside 0 to 1"),
    "an accuracy that is no number": ("1 11 0.1 0 1 nan 1 0.5", "outside 0 to 1"),
    "an epoch twice": ("0 11 0.1 0 1 0.5 1 0.5", "do not ascend"),
    "an epoch with a fraction": ("1.5 11 0.1 0 1 0.5 1 0.5", "not a number.*1.5"),
    "an epoch that is text": ("one 11 0.1 0 1 0.5 1 0.5", "not a number.*one"),
    "an epoch that no integer holds": ("99999999999999999999 11 0.1 0 1 0.5 1 0.5", "not a number"),
    "a row that lacks fields": (
        "1 11 0.1 0 1 0.5\n2 11 0.1 0 1 0.5 1 0.5",
        "a row of 6 fields",
    ),
    "a row with more fields": (
        "1 11 0.1 0 1 0.5 1 0.5 0.5",
        "a row of 9 fields",
    ),
    "a header in the middle": (TRAINING_HEADER, "not a number.*epoch"),
    "an underscore in an accuracy": ("1 11 0.1 0 1 0.5_0 1 0.5", "not a number.*0.5_0"),
    "an underscore in an epoch": ("1_0 11 0.1 0 1 0.5 1 0.5", "not a number.*1_0"),
    "other digits in a loss": ("1 11 0.1 0 ٣ 0.5 1 0.5", "not a number"),
    "other digits in an epoch": ("٣ 11 0.1 0 1 0.5 1 0.5", "not a number"),
}


@pytest.mark.parametrize(
    "read, header, good, row, words",
    [
        pytest.param(*of, *fault, id=name)
        for *of, faults in [
            (read_certification_log, RELEASED_HEADER, GOOD, CERTIFICATION_FAULTS),
            (read_prediction_log, PREDICTION_HEADER, "20 7 7 7 1 0:00:01", PREDICTION_FAULTS),
            (
                read_certification_log,
                f"{RELEASED_HEADER} successes trials",
                f"{GOOD} 10 10",
                COUNT_FAULTS,
            ),
            (read_training_log, TRAINING_HEADER, EPOCH, TRAINING_FAULTS),
        ]
        for name, fault in faults.items()
    ],
)
def test_faulty_log_is_refused_with_its_name_and_fault(tmp_path, read, header, good, row, words):
    assert len(read(write(tmp_path / "good", f"{header}\n{good}"))) == 1
    path = write(tmp_path / "faulty", f"{header}\n{good}\n{row}")
    assert re.search(words, refusal(read, path, names=path))


@pytest.mark.parametrize(
    "read, header, column",
    [
        *(
            (read_certification_log, RELEASED_HEADER, name)
            for name in ("idx", "label", "predict", "radius", "correct")
        ),
        *(
            (read_prediction_log, PREDICTION_HEADER, name)
            for name in ("idx", "label", "predict", "correct")
        ),
    ],
)
def test_missing_column_is_named(tmp_path, read, header, column):
    names = "\t".join("other" if name == column else name for name in header.split("\t"))
    path = write(tmp_path / "log", f"{names}\n20 7 7 7 1 0:00:01")
    assert f"lacks the column {column}" in refusal(read, path, names=path)


@pytest.mark.parametrize(
    "read, header",
    [
        (read_certification_log, RELEASED_HEADER),
        (read_prediction_log, PREDICTION_HEADER),
        (read_training_log, TRAINING_HEADER),
    ],
)
def test_missing_file_folder_and_log_without_rows_are_named(tmp_path, read, header):
    for path in (tmp_path / "nowhere", tmp_path):
        assert kind_of_log(path) is None
        refusal(read, path, names=path)
    for newline in ("\n", ""):
        (tmp_path / "log").write_text(header.replace(" ", "\t") + newline)
        assert "no rows" in refusal(read, tmp_path / "log", names=tmp_path / "log")


PREDICTION_LOGS = {
    "ours and SmoothAdv's": f"{PREDICTION_HEADER}\n40 1 2 1 0 0:00:01.5\n0 3 3 5 1 0:00:02\n20 7 "
    "-1 7 0 0:00:01.5",
    "Cohen et al.'s": "idx label predict correct time\n40 1 2 0 0:00:01.5\n0 3 3 1 0:00:02\n20 7 "
    "-1 0 0:00:01.5",
}


@pytest.mark.parametrize("text", PREDICTION_LOGS.values(), ids=PREDICTION_LOGS)
def test_prediction_log_is_read_exactly_and_sorted(tmp_path, text):
    table = read_prediction_log(write(tmp_path / "log", text))
    assert columns_of(table) == {
        "idx": [0, 20, 40],
        "label": [3, 7, 1],
        "predict": [3, -1, 2],
        "correct": [1, 0, 0],
    }
    assert {str(dtype) for dtype in table.dtypes} == {"int64"}


def test_classes_of_a_set_are_judged_in_their_order(tmp_path):
    """However Python hashes their names: of a set of nine, one order of 362,880 is right."""
    names = [*PREDICTION_HEADER.split()[:-1], *(f"class_{number}" for number in range(1, 10))]
    row = dict(zip(names, "0 9 4 4 0 4 8 1 7 3 0 5 6 2".split()))
    texts = {name: [text] for name, text in {**row, "time": "0"}.items()}
    rules = _checks(tmp_path / "log", texts, {"settings": {"top_k": 9, "num_classes": 10}})
    assert rules and all(holds.all() for holds in map(np.asarray, rules.values()))
    texts["predict"] = ["8"]
    assert not all(np.all(holds) for holds in _checks(tmp_path, texts, {"settings": {}}).values())


@pytest.mark.parametrize(
    "text, expected",
    [
        (CERTIFICATION_LOGS["ours"], "certification"),
        (RELEASED_HEADER, "certification"),
        (PREDICTION_LOGS["ours and SmoothAdv's"], "prediction"),
        (PREDICTION_LOGS["Cohen et al.'s"], "prediction"),
        ("idx label predict correct calibration score_0 score_1 time\n", "scores"),
        ("epoch time lr train_loss", None),
        ("", None),
    ],
)
def test_logs_are_told_apart_by_their_header(tmp_path, text, expected):
    assert kind_of_log(write(tmp_path / "file", text)) == expected
