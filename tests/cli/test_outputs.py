"""What a command writes replaces nothing but files of its own kind."""

import os
import stat
from pathlib import Path

import pytest

from smoothadv.base.errors import UserError
from smoothadv.records.logs import ARGUMENTS
from smoothadv.records.writer import LogWriter
from support.commands import call, snapshot

LOG = (
    "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
    "0\t3\t3\t0.25\t1\t0:00:15\n"
    "20\t7\t7\t0.125\t1\t0:00:15\n"
)
OTHERS = {
    "checkpoint": (b"PK\x03\x04\0\0archive/data.pkl" + bytes(654_000), "other data"),
    "manifest": (
        b'{\n  "settings": {"sigma": 0.25},\n  "runs": []\n}\n',
        "text that begins with '{'",
    ),
    "log": (LOG.encode(), r"text that begins with 'idx\tlabel"),
    "training log": (b"epoch\ttime\tlr\n0\t1\t0.1\n", r"text that begins with 'epoch\ttime"),
    "grid": (
        b'command = "train"\n[train]\ndataset = "digits"\n',
        "text that begins with 'command = \"train\"'",
    ),
    "program": (b"import csv, sys\n", "text that begins with 'import csv, sys'"),
    "labels of somebody": (b"id,label\n0,1\n", "text that begins with 'id,label'"),
    "records of somebody": (b'[\n  {\n    "id": 1\n  }\n]\n', "text that begins with '['"),
}
KINDS = {
    "table": (["table"], "out", "out"),
    "table in CSV": (["table", "--format", "csv"], "out", "out"),
    "picture": (["plot"], "out", "out.png"),
    "document": (["plot"], "out", "out.pdf"),
    "page": (["report"], "out.html", "out.html"),
    "page in a folder": (["report"], ".", "report.html"),
}


@pytest.fixture
def analyze(workplace: Path, capsys):
    """Runs an analysis of one log, LOG, in the working folder, and writes to the file."""
    (workplace / "sigma_0.25").write_text(LOG)

    def run(analysis: list[str], *output: str):
        files = [word for name in output for word in ("-o", name)]
        return call(
            capsys, "analyze", analysis[0], "sigma_0.25", "--sigma", 0.25, *analysis[1:], *files
        )

    return run


def assert_refused(outcome, *words: str) -> None:
    assert outcome.code == 1 and outcome.out == ""
    (line,) = [line for line in outcome.err.splitlines() if not line.startswith("warning: ")]
    for word in ("error: ", "name another file", *words):
        assert word in line


@pytest.mark.parametrize(
    ("kind", "other"),
    [("table", other) for other in OTHERS]
    + [(kind, "checkpoint") for kind in KINDS]
    + [("page", "log")],
)
def test_files_of_another_kind_are_not_replaced(analyze, workplace, kind, other):
    analysis, output, path = KINDS[kind]
    content, found = OTHERS[other]
    Path(path).write_bytes(content)
    before = snapshot(workplace)
    assert_refused(analyze(analysis, output), path, f" but {found}")
    assert snapshot(workplace) == before, "neither this file nor, of a figure, the other one"


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_analysis_wrote_is_replaced_by_it(analyze, kind):
    analysis, output, path = KINDS[kind]
    for _ in range(2):
        assert analyze(analysis, output).code == 0
    first = Path(path).read_bytes()
    Path(path).write_bytes(b"")
    assert analyze(analysis, output).code == 0 and Path(path).read_bytes() == first, (
        "an empty file is nothing to keep"
    )


def test_tables_of_all_formats_replace_each_other(analyze):
    for format in ("csv", "json", "latex", "markdown", "csv"):
        assert analyze(["table", "--format", format], "table.txt").code == 0
    Path("t.csv").write_bytes(OTHERS["checkpoint"][0])
    Path("table.txt").unlink()
    assert_refused(analyze(["table"], "table.txt", "t.csv"), "t.csv")
    assert not Path("table.txt").exists(), "all files are looked at before the first is written"


@pytest.mark.parametrize("kind", ["table", "page"])
def test_pipes_and_devices_are_not_replaced(analyze, kind):
    analysis, output, path = KINDS[kind]
    os.mkfifo(path)
    assert_refused(analyze(analysis, output), f"{path} is no regular file")
    assert stat.S_ISFIFO(os.stat(path).st_mode)
    device = Path("/dev/full")
    if device.is_char_device():
        Path(path).unlink()
        Path(path).symlink_to(device)
        assert_refused(analyze(analysis, output), f"{path} is no regular file")
        assert device.is_char_device() and Path(path).is_symlink()


def test_file_behind_a_link_is_replaced_and_the_link_kept(analyze):
    Path("shared").mkdir()
    Path("latest.md").symlink_to("shared/table.md")
    for _ in range(2):
        assert analyze(["table"], "latest.md").code == 0
    assert Path("latest.md").is_symlink() and Path("shared/table.md").read_text().startswith(
        "| l2 radius"
    )


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_pipes_are_no_logs(workplace, flag):
    os.mkfifo("pipe")
    with pytest.raises(UserError, match="pipe is no regular file"):
        LogWriter(Path("pipe"), ("idx", "label"), {}, {}, flag[2:])


@pytest.mark.parametrize("name", ["log.txt", ARGUMENTS])
def test_training_does_not_replace_notes_of_the_user(workplace, capsys, name):
    Path(name).write_text("2 March: rerun with sigma 0.5\n")
    outcome = call(
        capsys,
        "train",
        "digits",
        "digits_resnet8",
        ".",
        "--noise",
        0.25,
        "--epochs",
        1,
        "--device",
        "cpu",
    )
    assert_refused(outcome, name, "2 March")
    assert snapshot(workplace) == {name: b"2 March: rerun with sigma 0.5\n"}
