"""ExampleLog: a log that is killed at any byte is resumed to what it would have been; anything odd
is refused.
"""

import json
import shutil
import subprocess
import sys
from contextlib import closing

import pytest

from smoothadv.base.errors import UserError
from smoothadv.records.logs import ExampleLog, manifest_path
from support import refusals
from support.commands import snapshot

COLUMNS = ("idx", "label", "radius")
ROWS = [
    {"idx": 0, "label": 3, "radius": "0.123456789"},
    {"idx": 20, "label": 10, "radius": "0.0"},
    {"idx": 40, "label": 7, "radius": "1.5"},
]
WHOLE = b"idx\tlabel\tradius\n0\t3\t0.123456789\n20\t10\t0.0\n40\t7\t1.5\n"
SETTINGS = {"sigma": 0.25, "n": 1000, "digest": "abc"}


def open_log(
    path, existing: str = "refuse", settings: dict | None = None, **details
) -> closing[ExampleLog]:
    return closing(
        ExampleLog(path, COLUMNS, SETTINGS if settings is None else settings, details, existing)
    )


def write_log(path, rows=ROWS, existing: str = "refuse"):
    with open_log(path, existing) as log:
        for row in rows:
            log.append(row)
    return path


def append_rest(log: ExampleLog) -> None:
    for row in ROWS:
        if row["idx"] not in log.done:
            log.append(row)


def refusal(path, **options) -> str:
    return refusals.refusal(open_log, path, names=path, **options)


def test_new_log_is_a_header_and_tab_separated_rows_of_its_columns(tmp_path):
    path = write_log(tmp_path / "new" / "folder" / "log")
    assert path.read_bytes() == WHOLE
    with open_log(path, "resume") as log:
        log.append({"radius": 1.5, "extra": "x", "idx": 4, "label": 2})
    assert path.read_bytes() == WHOLE + b"4\t2\t1.5\n"


def test_each_row_is_in_the_file_before_the_next_example(tmp_path):
    with open_log(tmp_path / "log") as log:
        for number, row in enumerate(ROWS, start=1):
            log.append(row)
            assert (tmp_path / "log").read_bytes() == b"".join(
                WHOLE.splitlines(keepends=True)[: number + 1]
            )
            assert log.done == {done["idx"] for done in ROWS[:number]}


def test_existing_log_is_refused_untouched_with_the_two_ways_on(tmp_path):
    write_log(tmp_path / "log")
    manifest = manifest_path(tmp_path / "log").read_bytes()
    message = refusal(tmp_path / "log", settings={"sigma": 1})
    assert "--resume" in message and "--overwrite" in message
    assert (tmp_path / "log").read_bytes() == WHOLE
    assert manifest_path(tmp_path / "log").read_bytes() == manifest


def test_overwriting_starts_anew_under_the_new_settings(tmp_path):
    write_log(tmp_path / "log")
    with open_log(tmp_path / "log", "overwrite", {"sigma": 1.0}) as log:
        assert log.done == set()
        log.append(ROWS[2])
    assert (tmp_path / "log").read_bytes() == b"idx\tlabel\tradius\n40\t7\t1.5\n"
    assert json.loads(manifest_path(tmp_path / "log").read_text())["settings"] == {"sigma": 1.0}


@pytest.mark.parametrize("existing", ["resume", "overwrite"])
def test_resuming_or_overwriting_nothing_starts_anew(tmp_path, existing):
    assert write_log(tmp_path / "log", existing=existing).read_bytes() == WHOLE


def test_resumed_log_knows_its_examples_and_lists_each_run_that_added_rows(tmp_path):
    write_log(tmp_path / "log", ROWS[:2])
    with open_log(tmp_path / "log", "resume", device="idle"):
        pass
    with open_log(tmp_path / "log", "resume", device="another") as log:
        assert log.done == {0, 20}
        log.append(ROWS[2])
        assert log.done == {0, 20, 40}
    assert (tmp_path / "log").read_bytes() == WHOLE
    runs = json.loads(manifest_path(tmp_path / "log").read_text())["runs"]
    assert runs == [{"first_row": 0}, {"first_row": 2, "device": "another"}]


@pytest.mark.parametrize("length", range(len(WHOLE) + 1))
def test_log_cut_at_any_byte_is_resumed_to_the_whole_log(tmp_path, length):
    path = write_log(tmp_path / "log")
    path.write_bytes(WHOLE[:length])
    with open_log(path, "resume") as log:
        complete = WHOLE[:length].count(b"\n") - 1
        assert log.done == {row["idx"] for row in ROWS[: max(complete, 0)]}
        append_rest(log)
    assert path.read_bytes() == WHOLE


ODD_LINES = {
    "a field less": b"20\t10",
    "a field more": b"20\t10\t0.0\t1",
    "nothing": b"",
    "an idx that is no number": b"x\t10\t0.0",
    "a negative idx": b"-1\t10\t0.0",
    "an idx with a fraction": b"20.5\t10\t0.0",
    "an idx that only looks like a digit": "²\t10\t0.0".encode(),
    "bytes that are no text": b"\xff\xfe\x00",
    "two rows that ran together": b"20\t10\t0.40\t7\t1.5",
    "an example that was there already": b"0\t10\t0.0",
}


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES)
def test_malformed_row_in_the_middle_is_refused_by_line_number_and_kept(tmp_path, line):
    path = write_log(tmp_path / "log")
    damaged = WHOLE.replace(b"20\t10\t0.0", line)
    path.write_bytes(damaged)
    assert "line 3" in refusal(path, existing="resume")
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    "header", [b"idx\tlabel\n", b"idx\tradius\tlabel\n", b"0\t3\t0.5\n", b"something else\n"]
)
def test_log_with_other_columns_is_refused(tmp_path, header):
    path = write_log(tmp_path / "log")
    path.write_bytes(header)
    message = refusal(path, existing="resume")
    assert "its columns are" in message and all(column in message for column in COLUMNS)
    assert path.read_bytes() == header


@pytest.mark.parametrize(
    "change, words",
    [
        ({"sigma": 0.5}, "sigma was 0.25, now 0.5"),
        ({"digest": "abd"}, "digest was 'abc', now 'abd'"),
        ({"alpha": 0.01}, "alpha was None, now 0.01"),
        ({"n": None}, "n was 1000, now None"),
    ],
)
def test_other_settings_are_refused_with_both_values_and_only_those(tmp_path, change, words):
    write_log(tmp_path / "log", ROWS[:1])
    settings = {name: value for name, value in {**SETTINGS, **change}.items() if value is not None}
    message = refusal(tmp_path / "log", existing="resume", settings=settings)
    assert words in message
    assert not any(f"{field} was" in message for field in SETTINGS.keys() - change.keys())
    assert (tmp_path / "log").read_bytes() == WHOLE[: WHOLE.index(b"20\t")]
    with open_log(tmp_path / "log", "resume") as log:
        assert log.done == {0}, "it is released for the next attempt"


def test_settings_compare_as_the_manifest_stores_them(tmp_path):
    for existing in ("refuse", "resume"):
        with open_log(tmp_path / "log", existing, {"classes": (1, 2), "sigma": 0.1 + 0.2}):
            pass


@pytest.mark.parametrize("content", [None, b"", b'{"settings": {"sig', b"[]", b"{}", b"\xff\xfe"])
def test_log_without_a_readable_manifest_cannot_be_resumed(tmp_path, content):
    path = write_log(tmp_path / "log")
    if content is None:
        manifest_path(path).unlink()
    else:
        manifest_path(path).write_bytes(content)
    message = refusal(path, existing="resume")
    assert str(manifest_path(path)) in message and "--overwrite" in message
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("existing", ["refuse", "resume", "overwrite"])
def test_folder_is_refused(tmp_path, existing):
    assert "is a folder" in refusal(tmp_path, existing=existing)


@pytest.mark.parametrize("existing", ["resume", "overwrite"])
def test_second_writer_is_refused_while_the_first_one_writes(tmp_path, existing):
    with open_log(tmp_path / "log") as log:
        log.append(ROWS[0])
        manifest = manifest_path(tmp_path / "log").read_bytes()
        assert "another process" in refusal(tmp_path / "log", existing=existing)
        assert manifest_path(tmp_path / "log").read_bytes() == manifest
        log.append(ROWS[1])
        log.append(ROWS[2])
    assert (tmp_path / "log").read_bytes() == WHOLE
    with open_log(tmp_path / "log", existing):
        pass


WRITER = """
import pathlib, sys
from smoothadv.records.logs import ExampleLog
settings = {"sigma": 0.25, "n": 1000, "digest": "abc"}
log = ExampleLog(pathlib.Path(sys.argv[1]), ("idx", "label", "radius"), settings, {})
log.append({"idx": 0, "label": 3, "radius": "0.123456789"})
print("wrote", flush=True)
sys.stdin.read()
"""


def test_log_of_a_killed_process_is_locked_until_its_end_and_whole_after_it(
    tmp_path, repository, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(repository / "code"))
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout.readline() == "wrote\n"
        assert "another process" in refusal(tmp_path / "log", existing="resume")
    finally:
        writer.kill()
        writer.communicate()
    with open_log(tmp_path / "log", "resume") as log:
        append_rest(log)
    assert (tmp_path / "log").read_bytes() == WHOLE


def replace(path):
    path.unlink()
    path.write_bytes(b"idx\tlabel\tradius\n")


@pytest.mark.parametrize(
    "happens",
    [lambda path: path.unlink(), replace, lambda path: shutil.rmtree(path.parent)],
    ids=range(3),
)
@pytest.mark.parametrize("amended", [False, True])
def test_log_that_is_gone_is_noticed_at_the_next_row(tmp_path, happens, amended):
    path = tmp_path / "folder" / "log"
    with open_log(path) as log:
        log.append(ROWS[0])
        happens(path)
        before = snapshot(tmp_path)
        with pytest.raises(
            UserError, match="was deleted, moved or replaced while it was written"
        ) as error:
            log.amend({"batch": 1}) if amended else log.append(ROWS[1])
        assert str(path) in str(error.value) and snapshot(tmp_path) == before
