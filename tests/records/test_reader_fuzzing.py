"""Whatever a file holds, reading it gives rows that are literally in it or one line that names it:
nothing else.

What a file holds is decided by a slow and obvious parser of this test's own.
"""

import random
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoothadv.base.errors import UserError
from smoothadv.records.readers import read_certification_log, read_prediction_log, read_training_log

# Fields of a table that a lenient parser would take for numbers, and others that it would not
# expect.
ODD_FIELDS = (
    [
        "",
        " ",
        "-1",
        "-2",
        "+3",
        " 3 ",
        "03",
        "3.0",
        "3.5",
        "1e1",
        "1e400",
        "1e-400",
        "nan",
        "inf",
        "-inf",
        "True",
    ]
    + [
        "False",
        "None",
        "NA",
        "null",
        "0x1A",
        "1_0",
        "0.2_5",
        "٣",
        "０.５",
        "½",
        "0,5",
        "1 000",
        "'1'",
        '"1',
        "\\t",
    ]
    + [
        "9" * 18,
        str(2**63 - 1),
        str(2**63),
        str(2**64 + 3),
        "9" * 5000,
        "0.99999999999999999999",
        "9007199254740993.",
    ]
    + ["\ufeff3", "\xa03", "3\u2028", "3\x0b", "3\x0c", "3\x1c", "3\x85", "3\x1b[2J", "x" * 100_000]
    + ["idx", "radius", "correct", "#", "2", "99"]
)
_LINE_ENDS, _ODD_ENDS = (
    ["\n", "\n", "\n", "\r\n", "\r"],
    ["\n\n", "\r\r\n", "", " \n", "\t\n", "\x0b", "\u2028"],
)


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """The content after a few accidents: bytes changed, cut off, moved, repeated, or replaced by
    others.
    """
    result = content
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at, length = rng.randrange(len(result) + 1), rng.choice([1, 2, 8, 64, 1000])
        begin = rng.randrange(len(content) + 1)
        head, lost, tail = result[:at], result[at : at + length], result[at + length :]
        odd = bytes([rng.choice([0, 1, 10, 27, 127, 128, 255])])
        moved = content[begin : begin + length]
        others = [
            head,
            head + tail,
            head + lost * 2,
            head + moved + lost + tail,
            head + moved + tail,
        ]
        result = rng.choice([*[head + odd + result[at + 1 :]] * 4, *others])
    return result


def doctored_table(content: bytes, rng: random.Random) -> bytes:
    """A tab-separated table with a few odd fields and names, lines or columns added, removed or
    moved, and odd ends.
    """
    lines = [line.split("\t") for line in content.decode().splitlines()]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        line = rng.choice(lines)
        accident = rng.randrange(9)
        if accident < 3:
            line[rng.randrange(len(line))] = rng.choice(ODD_FIELDS)
        elif accident == 3:
            lines.insert(rng.randrange(len(lines) + 1), list(line))
        elif accident == 4 and len(lines) > 1:
            lines.remove(line)
        elif accident == 5:
            lines[0][rng.randrange(len(lines[0]))] = rng.choice(
                ["", "Idx", "correct", "time", "radius", "x"]
            )
        elif accident == 6:
            order = rng.sample(range(len(lines[0])), len(lines[0]))
            lines = [[each[column] for column in order if column < len(each)] for each in lines]
        elif accident == 7:
            column, repeated = rng.randrange(len(line) + 1), rng.choice([["7"], ["x"], ["idx"], []])
            lines = [[*each[:column], *(repeated or each[:1]), *each[column:]] for each in lines]
        elif len(line) > 1:
            column = rng.randrange(len(line))
            lines = [[*each[:column], *each[column + rng.randrange(2) :]] for each in lines]
    ends = (
        [rng.choice(_LINE_ENDS)]
        if rng.random() < 0.8
        else rng.choices([*_LINE_ENDS, *_ODD_ENDS], k=5)
    )
    text = "".join("\t".join(line) + ends[number % len(ends)] for number, line in enumerate(lines))
    return (rng.choice([*[""] * 9, "\ufeff", "\ufeff\ufeff", "\n", "#\n"]) + text).encode(
        "utf-8", "surrogatepass"
    )


OURS = """idx label predict radius correct time successes trials
0 3 3 1.1449999776066905 1 0:00:15.123456 99000 100000
20 7 -1 0.0 0 0:00:14.000001 40000 100000
40 1 2 0.12047239611684024 0 0:00:14.000001 60000 100000
60 12 12 0.0013899173192983725 1 0:00:14.000001 50600 100000"""
RELEASED = """idx label predict radius correct time
0 3 3 0.953 1 0:00:13.899821
20 7 -1 0.0000 0 0:00:13
40 1 2 9.76e-05 0 15.4
60 12 12 0.0512 1 1:02:13.899821"""
PREDICTION = """idx label predict basePredict correct time
0 3 3 2 1 0:00:03.101524
20 7 -1 7 0 0:00:03.101524
40 1 2 1 0 0:00:03"""
TRAINING = """epoch time lr epsilon train_loss train_accuracy test_loss test_accuracy
0 12.5 0.1 0.0 2.25 0.125 2.0 0.25
1 11.25 0.1 0.025 1.5 0.5 1.75 0.4375"""
COHEN_TRAINING = """epoch time lr train~loss train~acc testloss test~acc
0 3.53e+02 0.1 1.99 26.5 1.83 32.7
1 0:0 0.1 1.73 36.2 1.7 37.9"""
LOGS = {
    "ours": (read_certification_log, OURS),
    "released": (read_certification_log, RELEASED),
    "prediction": (read_prediction_log, PREDICTION),
    "training": (read_training_log, TRAINING),
    "Cohen et al.'s training": (read_training_log, COHEN_TRAINING),
}
SHORT_NAMES = {"trainacc": "trainaccuracy", "testacc": "testaccuracy"}
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def cells(log: str) -> list[list[str]]:
    """A log given with spaces for tabs, and ~ for spaces: its fields, line by line."""
    return [[field.replace("~", " ") for field in line.split(" ")] for line in log.splitlines()]


def written(lines: list[list[str]], ends: str = "\n") -> bytes:
    return "".join("\t".join(line) + ends for line in lines).encode()


def lines_of(content: bytes) -> list[list[str]]:
    """The fields of every line that is not blank."""
    text = content.decode("utf-8-sig")
    return [line.split("\t") for line in re.split("\r\n|\r|\n", text) if line.strip(" ")]


def says(field: str, value: float | int) -> bool:
    """Whether the field is a plain decimal number, and this one."""
    text = field.strip()
    if not NUMBER.fullmatch(text):
        return False
    return Decimal(text) == value if isinstance(value, int) else float(text) == value


def is_called(heading: str, column: str) -> bool:
    """Whether a column of the file has this name; training logs write names in several ways."""
    if heading == column:
        return True
    heading, column = (name.lower().replace(" ", "").replace("_", "") for name in (heading, column))
    return column[:4] in ("epoc", "trai", "test") and SHORT_NAMES.get(heading, heading) == column


def field_says(field: str, name: str, column: str, value: Any, row: dict[str, Any]) -> bool:
    if column in ("predict", "radius") and row["predict"] == -1 and row.get("radius") == 0:
        # An abstention: it may lack both, or have a negative radius.
        is_none = re.fullmatch("(nan|none)?|-[0-9.]+|-inf", field.strip().lower())
        return bool(is_none) or says(field, value)
    if column == "correct":  # a running total may stand there: label and predict decide
        return value == int(row["predict"] == row["label"])
    if column.endswith("accuracy") and "accuracy" not in name.lower():
        return says(field, pytest.approx(100 * value, rel=1e-14))
    return says(field, value)


def disagreement(table: Any, content: bytes) -> str | None:
    """The first row that is not literally a row of the content, or that is missing; None if all is
    well.
    """
    header, *rows = lines_of(content)
    if any("cut off" in note for note in table.attrs["notes"]) and not content.endswith(
        (b"\n", b"\r")
    ):
        rows = rows[:-1]
    found = [
        dict(zip(table.columns, values))
        for values in zip(*(table[name].tolist() for name in table.columns))
    ]
    if len(found) != len(rows):
        return f"{len(found)} rows of {len(rows)}"
    if "idx" in table:  # such tables are sorted
        position = header.index("idx")
        rows = sorted(rows, key=lambda fields: int(float(fields[position])))
    for row, fields in zip(found, rows):
        if len(fields) > len(header):
            return f"more fields than the header: {fields}"
        for column, value in row.items():
            places = [index for index, name in enumerate(header) if is_called(name, column)]
            if not places or not all(
                index < len(fields) and field_says(fields[index], header[index], column, value, row)
                for index in places
            ):
                return f"{column} {value!r} of {fields}"
    return None


def refusal(path: Path, error: UserError) -> str | None:
    """What is wrong with an error message; None if it is one line of readable length that names the
    file.
    """
    message = error.args[0]  # as it was written: as text, every message has one line
    well_made = str(path) in message and len(message.splitlines()) == 1 and len(message) < 1000
    return None if well_made else message[:2000]


def check(read: Callable[[Path], Any], folder: Path, content: bytes) -> bool:
    """Insist on the property that this file is about; whether the content was read."""
    path = folder / "log_under_test"
    path.write_bytes(content)
    try:
        table = read(path)
    except UserError as error:
        assert refusal(path, error) is None
        return False
    assert disagreement(table, content) is None
    return True


def damaged(log: str, count: int) -> Iterator[bytes]:
    """The log after a few accidents to its table, and now and then to its bytes."""
    for seed in range(count):
        rng = random.Random(seed)
        content = doctored_table(written(cells(log)), rng)
        yield content if rng.random() < 0.7 else damaged_bytes(content, rng)


@pytest.mark.parametrize("name", LOGS)
def test_damaged_log_is_read_literally_or_refused_by_name(tmp_path, name):
    read, log = LOGS[name]
    readings = [check(read, tmp_path, content) for content in damaged(log, 300)]
    assert 20 < sum(readings) < 280, "there are logs of both kinds"


@pytest.mark.parametrize("read", [read_certification_log, read_prediction_log, read_training_log])
@settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    content=st.binary(max_size=200),
    start=st.sampled_from(["", *(log.splitlines()[0] for _, log in LOGS.values())]),
)
def test_arbitrary_bytes_are_refused_by_name(tmp_path, read, content, start):
    check(read, tmp_path, start.replace(" ", "\t").replace("~", " ").encode() + content)


@pytest.mark.parametrize(("name", "ends"), [*((name, "\n") for name in LOGS), ("ours", "\r\n")])
def test_log_cut_at_any_byte_gives_only_rows_of_the_whole_log(tmp_path, name, ends):
    read, log = LOGS[name]
    whole, path = written(cells(log), ends), tmp_path / "cut"
    path.write_bytes(whole)
    all_rows = read(path).to_dict("records")
    counts = set()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            rows = read(path).to_dict("records")
        except UserError as error:
            assert refusal(path, error) is None
            rows = []
        assert rows == all_rows[: len(rows)]
        counts.add(len(rows))
    assert {0, 1, len(all_rows) - 1} <= counts, "and whole rows before the cut are used"


def test_the_check_notices_a_number_that_is_not_in_the_file(tmp_path):
    content = written(cells(RELEASED))
    (tmp_path / "log").write_bytes(content)
    table = read_certification_log(tmp_path / "log")
    assert disagreement(table, content) is None
    for column, value in [
        ("idx", 61),
        ("label", 13),
        ("predict", 2),
        ("radius", 0.05121),
        ("correct", 0),
    ]:
        wrong = table.copy()
        wrong.loc[3, column] = value
        assert disagreement(wrong, content) is not None
    assert disagreement(table.iloc[:3], content) == "3 rows of 4"
    assert (
        refusal(tmp_path, UserError("no such log"))
        and refusal(tmp_path, UserError(f"{tmp_path}\n"[:-1])) is None
    )
    assert refusal(tmp_path, UserError(f"{tmp_path} is\nno log"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [name for name in LOGS if name != "released"])
def test_odd_field_is_read_as_it_is_printed_or_refused_by_name(tmp_path, name):
    read, log = LOGS[name]
    for column in range(len(cells(log)[0])):
        for odd in ODD_FIELDS:
            lines = cells(log)
            lines[2][column] = odd
            check(read, tmp_path, written(lines))


HEADER = RELEASED.splitlines()[0].replace(" ", "\t")
WRONG_NUMBERS = {
    "a blank line before a row that is longer than the "
    "header": f"{HEADER}\n\n7\t7\t7\t7\t1\t1\t0\n",
    "a header of 70 kB and a longer row": f"{HEADER}\t{'x' * 70_000}\n7\t7\t7\t7\t1\t1\t0\t9\n",
    "an idx beyond the precision of a "
    "float": f"{HEADER}\n9007199254740993\t3\t3\t0.5\t1\t0\n3.0\t3\t3\t0.5\t1\t0\n",
    "two columns of radii": f"{HEADER}\tradius\n7\t3\t3\t0.5\t1\t0\t0.25\n",
    "two columns of idx": f"idx\t{HEADER}\n7\t9\t3\t3\t0.5\t1\t0\n",
}


@pytest.mark.parametrize("text", WRONG_NUMBERS.values(), ids=WRONG_NUMBERS)
def test_no_certification_log_is_read_wrong(tmp_path, text):
    check(read_certification_log, tmp_path, text.encode())
