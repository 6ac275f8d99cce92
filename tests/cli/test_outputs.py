"""What a command writes replaces nothing but files of its own kind."""

from pathlib import Path

import pytest

from support.commands import call, refused

LOG = (
    "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
    "0\t3\t3\t0.25\t1\t0:00:15\n"
    "20\t7\t7\t0.125\t1\t0:00:15\n"
)
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

    return lambda analysis, *output: call(
        *(capsys, "analyze", analysis[0], "sigma_0.25", "--sigma", 0.25, *analysis[1:]),
        *(word for name in output for word in ("-o", name)),
    )


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
    Path("t.csv").write_bytes(b"PK\x03\x04")
    Path("table.txt").unlink()
    assert refused(analyze(["table"], "table.txt", "t.csv"), "t.csv", "name another file")
    assert not Path("table.txt").exists(), "all files are checked before the first is written"


def test_file_behind_a_link_is_replaced_and_the_link_kept(analyze):
    Path("shared").mkdir()
    Path("latest.md").symlink_to("shared/table.md")
    for _ in range(2):
        assert analyze(["table"], "latest.md").code == 0
    assert Path("latest.md").is_symlink() and Path("shared/table.md").read_text().startswith(
        "| l2 radius"
    )
