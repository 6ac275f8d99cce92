"""analyze from end to end on small logs written by hand: values, formats, figures, and how logs are
found.
"""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from support.commands import call, script, start_process
from support.patience import HANG_SECONDS

# Ours: full precision. 3 of 6 correct, 1 of 6 abstains.
OURS = """idx\tlabel\tpredict\tradius\tcorrect\ttime
0\t3\t3\t0.25\t1\t0:00:00.080910
1\t8\t-1\t0.0\t0\t0:00:00.078819
2\t0\t0\t0.61581565369520011\t1\t0:00:00.073724
3\t2\t7\t0.75\t0\t0:00:00.090568
4\t1\t1\t0.12499999999999999\t1\t0:00:00.099749
5\t7\t9\t0.1\t0\t0:00:00.099749
"""
# Released: six columns, few digits, gaps in idx. 3 of 4 correct, nobody abstains.
RELEASED = """idx\tlabel\tpredict\tradius\tcorrect\ttime
0\t3\t3\t1.91\t1\t0:00:15
20\t7\t7\t0.5000\t1\t0:00:15.123456
40\t4\t2\t0.0513\t0\t0:00:15.123456
60\t5\t5\t9.76e-05\t1\t0:00:15.123456
"""
MANIFEST = (
    '{"settings": {"sigma": 0.25, "N": 100000, "alpha": 0.001, "method": "exact"}, "runs": []}'
)


@pytest.fixture
def logs(workplace: Path) -> Path:
    """The working folder, with two logs below results/."""
    (workplace / "results/nested").mkdir(parents=True)
    (workplace / "results/ours.tsv").write_text(OURS)
    (workplace / "results/ours.tsv.manifest.json").write_text(MANIFEST)
    (workplace / "results/nested/sigma_0.50").write_text(RELEASED)
    return workplace


def test_output_files_decide_their_formats(analyze, logs):
    formats = {"md": "markdown", "tex": "latex", "csv": "csv", "json": "json", "txt": "markdown"}
    outcome = analyze(
        "summary", "results", *(word for ending in formats for word in ("-o", f"new/t.{ending}"))
    )
    assert (outcome.code, outcome.out) == (0, "")
    for ending, format in formats.items():
        assert (logs / f"new/t.{ending}").read_text() == analyze(
            "summary", "results", "--format", format
        ).out


@pytest.mark.parametrize("output", ["plots/curves.png", "plots/curves.pdf", "plots/curves"])
def test_plot_writes_png_and_pdf(analyze, logs, output):
    outcome = analyze("plot", "results", "-o", output)
    assert outcome.code == 0 and "curves.png" in outcome.out and "curves.pdf" in outcome.out
    assert "both FILE.png and FILE.pdf are written" in " ".join(
        analyze("plot", "--help").out.split()
    ), "said before"
    assert sorted(path.name for path in (logs / "plots").iterdir()) == ["curves.pdf", "curves.png"]
    with Image.open(logs / "plots/curves.png") as picture:
        assert picture.width >= 1000 and picture.height >= 600
    document = (logs / "plots/curves.pdf").read_bytes()
    assert (
        document.startswith(b"%PDF-")
        and document.rstrip().endswith(b"%%EOF")
        and len(document) > 5000
    )


def test_svg_is_written_as_named_and_replaces_no_other_file(analyze, logs):
    drawings = []
    for _ in range(2):
        assert (
            analyze("plot", "results", "-o", "plots/curves.svg").out == "wrote plots/curves.svg\n"
        )
        assert [path.name for path in (logs / "plots").iterdir()] == ["curves.svg"]
        drawings.append((logs / "plots/curves.svg").read_text())
    assert drawings[0] == drawings[1] and ElementTree.fromstring(drawings[0]).tag.endswith("}svg")
    (logs / "plots/curves.svg").write_text("mine")
    assert analyze("plot", "results", "-o", "plots/curves.svg").code == 1
    assert (logs / "plots/curves.svg").read_text() == "mine"


def test_summary_agrees_with_certify(analyze, logs, checkpoint, capsys):
    """The line that certify prints at its end agrees with what analyze reads from the log."""
    options = ["out.tsv", "--N", 50, "--max", 10, "--device", "cpu"]
    printed = call(capsys, "certify", "digits", checkpoint, 0.25, *options).out
    (record,) = json.loads(analyze("summary", "out.tsv", "--format", "json").out)
    assert math.isfinite(record["average_certified_radius"])
    assert f"average certified radius {record['average_certified_radius']:.3f}" in printed


def test_reader_that_stops_early_is_no_error(logs):
    """As in `analyze ... | head`: the pipe is closed before anything is written."""
    process = start_process(script("analyze", "summary", "results/ours.tsv"), logs)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=HANG_SECONDS) == 0
