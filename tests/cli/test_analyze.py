"""analyze from end to end on small logs written by hand: values, formats, figures, and how logs are
found; it replaces nothing but files of its own kind.

Logs that cannot be pooled, unfinished ones and logs of different images, are said to be what they
are. Usage errors and logs that do not suit; every analysis on any log; what all of them print.
"""

import os
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from smoothadv.analysis import ANALYSES, report
from smoothadv.analysis.figures import EmpiricalPlot
from smoothadv.analysis.reading import read_logs
from smoothadv.base.errors import UserError
from smoothadv.records.logs import manifest_path
from support.analyzed_folder import (
    COHEN,
    FIVE,
    SELECTION,
    certification,
    fill_folder,
    log,
    records,
    refusal,
)
from support.commands import ENVIRONMENT, call, script, snapshot
from support.golden_folder import golden_folder as golden_folder
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


@pytest.mark.parametrize("output", ["plots/curves.pdf", "plots/curves"])
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


def test_svg_is_written_as_named(analyze, logs):
    assert analyze("plot", "results", "-o", "plots/curves.svg").out == "wrote plots/curves.svg\n"
    (written,) = (logs / "plots").iterdir()
    assert ElementTree.fromstring(written.read_text()).tag.endswith("}svg")


def test_reader_that_stops_early_is_no_error(logs):
    """As in `analyze ... | head`: the pipe is closed before anything is written."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = script("analyze", "summary", "results/ours.tsv")
    process = subprocess.Popen(command, cwd=logs, env=ENVIRONMENT, **pipes)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=HANG_SECONDS) == 0


# The words after the log, and what is written.
KINDS = {
    "table": (["table", "-o", "out"], "out"),
    "table in CSV": (["table", "--format", "csv", "-o", "out"], "out"),
    "picture and document": (["plot", "-o", "out"], "out.png out.pdf"),
    "drawing": (["plot", "-o", "out.svg"], "out.svg"),
    "page": (["report", "-o", "out.html"], "out.html"),
    "page in a new folder": (["report", "-o", "new"], "new/report.html"),
    "page in this folder": (["report"], "report.html"),
}


ONE = "results/ours.tsv"


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_analysis_wrote_is_replaced_by_it(analyze, logs, monkeypatch, kind):
    """Pages have no sections here, which take long."""
    monkeypatch.setattr(report.Report, "_sections", lambda page, logs: iter(()))
    (analysis, *options), names = KINDS[kind]
    paths = [Path(name) for name in names.split()]
    for _ in range(2):
        assert analyze(analysis, ONE, *options).code == 0
    first = [path.read_bytes() for path in paths]
    for path in paths:
        path.write_bytes(b"")
    assert analyze(analysis, ONE, *options).code == 0
    assert [path.read_bytes() for path in paths] == first, "an empty file is nothing to keep"


def test_tables_of_all_formats_replace_each_other(analyze, logs):
    Path("table.txt").write_text("[]\n")  # of no rows
    for format in ("csv", "json", "latex", "markdown", "csv"):
        assert analyze("table", ONE, "--format", format, "-o", "table.txt").code == 0
    assert analyze("table", ONE, "-o", "T.TEX").code == 0
    assert Path("T.TEX").read_text().startswith("\\begin{tabular}")


def test_file_behind_a_link_is_replaced_and_the_link_kept(analyze, logs):
    Path("shared").mkdir()
    Path("latest.md").symlink_to("shared/table.md")
    for _ in range(2):
        assert analyze("table", ONE, "-o", "latest.md").code == 0
    table = Path("shared/table.md").read_text()
    assert Path("latest.md").is_symlink() and table.startswith("| l2 radius")


PROGRESS = "3 of 10, unfinished"


def test_page_of_unfinished_logs_says_so(workplace, analyze, monkeypatch):
    monkeypatch.setattr("smoothadv.analysis.report.as_element", lambda *_: "<svg></svg>")
    log("logs/whole.tsv", [0.25] * 5 + [0.0] * 5)
    log("logs/begun.tsv", [0.5] * 3)
    assert analyze("report", "logs", "-o", "a.html").code == 0
    warnings, _, sections = Path("a.html").read_text().partition("</ul>")
    assert PROGRESS in warnings and "Best log by radius<" in sections.replace(
        ", digits, 10 images", ""
    )
    assert sections.replace("\u00a0", " ").count(f"begun ({PROGRESS})") >= 3, (
        "all logs, provenance, hyper-parameters"
    )


@pytest.mark.parametrize(
    "run",
    [
        {},
        {"skip": 2, "max": None},
        {"images": 20, "skip": 2},
        {"images": 20, "max": None},
        {**SELECTION, "max": 3},
        {"images": 6, "skip": 2, "max": 9},
        {**SELECTION, "skip": 0},
        {**SELECTION, "images": "20"},
        {**SELECTION, "images": True},
        {**SELECTION, "max": -1},
        {"images": 10**30, "skip": 10**30, "max": None},
    ],
    ids=str,
)
def test_log_is_unfinished_only_where_its_manifest_says_so(workplace, analyze, run):
    log("begun.tsv", [0.5] * 3, run=run)
    outcome = analyze("summary", "begun.tsv", "--format", "csv")
    assert "unfinished" not in outcome.err and "selected" not in outcome.out


def test_manifest_follows_what_certify_selects_but_not_what_it_refuses(
    workplace, analyze, checkpoint, capsys
):
    def certify(*selection: object) -> int:
        options = ["a.tsv", "--N", 50, "--device", "cpu", "--skip", *selection]
        return call(capsys, "certify", "digits", checkpoint, 0.25, *options).code

    assert (certify(100, "--max", 3), certify(70)) == (0, 1)
    assert "unfinished" not in analyze("summary", "a.tsv").err
    Path("a.tsv").write_text("".join(Path("a.tsv").read_text().splitlines(keepends=True)[:3]))
    assert "a.tsv: 2 of 3, unfinished" in analyze("summary", "a.tsv").err
    assert certify(100, "--max", 2) == 0 and "unfinished" not in analyze("summary", "a.tsv").err


def test_attacks_are_drawn_beside_certificates_of_their_images_alone(workplace, analyze):
    """Five images certified beside an attack on ten: attacked below certified accuracy."""
    log("certified/ten.tsv", [0.5] * 7 + [0.0] * 3)
    log("certified/five.tsv", [0.5] * 5, run=FIVE)
    log("attacked/ten.tsv", [0.5] * 8 + [0.0] * 2, attack=0.25)
    arguments = ["certified", "attacked"]
    log("attacked/five.tsv", [0.5] * 2 + [0.0] * 3, run=FIVE, attack=0.25)
    with pytest.raises(
        UserError,
        match="beside certified accuracy needs logs of one set of images, not of digits, 5 im",
    ):
        EmpiricalPlot()(read_logs(arguments, EmpiricalPlot.kinds))
    sections = list(report.Report()._sections(read_logs(arguments, report.Report.kinds)))
    parts = [part for section in sections for part in section.parts if part["kind"] == "figure"]
    seen = [part["figure"] for part in parts if "under" in part["caption"]]
    drawn = [[line.get_ydata()[0] for line in figure.axes[0].lines] for figure in seen]
    assert drawn == [[100, 40], [70, 80]], "each attack with the certificates of its images"


@pytest.mark.usefixtures("workplace")
def test_two_sided_log_that_lost_its_manifest_is_known_by_its_column():
    expected = {"one-sided": "", "two-sided": "\trival", "top-2": "\trival_1\trival_2"}
    for name, columns in expected.items():
        lost = log(f"logs/{name}.tsv", [0.5] * 9 + [0.0])
        manifest_path(lost).unlink()
        header, *lines = lost.read_text().splitlines()
        cells = "\t7" * columns.count("\t")
        lost.write_text("\n".join([header + columns, *(line + cells for line in lines)]) + "\n")
    logs = [f"logs/{name}.tsv" for name in expected]
    assert [each.procedure for each in read_logs(logs).certification] == [*expected]


EVERY_TENTH, EVERY_THIRD = range(0, 60, 10), range(0, 60, 3)
IN_BOTH = len({*EVERY_TENTH} & {*EVERY_THIRD})


def certified(path: str, idx: range, count: int, model: str, **settings) -> None:
    """A finished log in which the first ``count`` images are certified at 0.4."""
    log(
        path,
        [0.4 if number < count else 0.0 for number in range(len(idx))],
        idx,
        {"images": 60, "skip": 1, "max": len(idx)},
        checkpoint_sha256=model,
        **settings,
    )


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"another sigma": {"sigma": 0.75}, "and another": {"sigma": 1.0}},
        {"of top 3": {"method": "top-k", "top_k": 3, "idx": range(60)}},
        {"of other data": {"dataset": "corrupted", "dataset_fingerprint": "cd", "idx": range(60)}},
    ],
    ids=str,
)
def test_held_out_is_of_the_images_procedure_and_data_of_the_choice(analyze, further):
    """Further logs of the two best of three models change nothing, though there are more of them,
    or of more images.
    """
    for number, model in enumerate("abc"):
        certified(f"logs/{model}/all.tsv", EVERY_TENTH, 4 - number, model)
    for model in "ab":
        certified(
            f"logs/{model}/more.tsv",
            EVERY_THIRD,
            20,
            model,
            dataset_fingerprint=None if model == "a" else "ab",
        )
        for name, settings in further.items():
            certified(
                f"logs/{model}/{name}.tsv",
                **{"idx": EVERY_THIRD, "count": 60, "model": model, **settings},
            )
    (row,) = records(analyze("held_out", "A=logs", "--radii", 0.25, "--format", "json"))
    assert (row["model"], row["models"], row["chosen"]) == ("a/all", 3, 4 / 6), row
    assert (row["held_out"], row["held_out_examples"]) == (1, len(EVERY_THIRD) - IN_BOTH), row
    lowered = ["held_out", "A=logs", "--radii", 0.25, "--high-probability", 0.5, "--format", "json"]
    (row,) = records(analyze(*lowered))
    assert 0 < row["held_out"] < 1 and row["difference"] is row["low"] is None, (
        "deductions differ with the images"
    )


@pytest.fixture
def filled(analyze):
    """The command, in a folder with logs of every kind."""
    fill_folder()
    return analyze


USAGE = [
    (["nonsense", "cohen"], "nonsense"),
    (["summary"], "LOG"),
    (["summary", "cohen", "--radii", "0.25", "x"], "'x' is no radius"),
    (["summary", "cohen", "--radii", "-1"], "'-1' is no radius"),
    (["summary", "cohen", "--radii"], "--radii"),
    (["summary", "cohen", "--norm", "l1"], "'l1' is not known; known: l2, linf"),
    (["summary", "cohen", "--format", "html"], "--format: unknown format 'html'"),
    (["summary", "cohen", "--decimals", "-1"], "'-1' is not a whole number"),
    (["summary", "cohen", "--where", "sigma"], "'sigma' is not FIELD=VALUE"),
    (["summary", "cohen", "--where", "colour=red"], "'colour=red' is not FIELD=VALUE"),
    (["summary", "cohen", "--dimension", "0"], "'0' is not a whole number from 1 to 4,000,000,000"),
    (["summary", "cohen", "--sigma", "0"], "'0' would smooth nothing"),
    (["summary", "cohen", "--alpha", "1"], "'1' is not a probability"),
    (["summary", "cohen", "--high-probability", "exact0.1"], "'exact0.1' is not a probability"),
    (["summary", "cohen", "--group-by", "sigma"], "--group-by"),
    (["table", "cohen", "--confidence", "95"], "'95' is not a probability"),
    (["table", "cohen", "--bands", "dkw"], "--bands dkw needs --confidence LEVEL"),
    (
        ["table", "cohen", "--confidence", "0.9", "--bands", "wide"],
        "'wide' is not known; known: exact, bootstrap, dkw",
    ),
    (
        ["table", "cohen", "--confidence", "0.9", "--bands", "clopper-pearson"],
        "--bands clopper-pearson needs --radii",
    ),
    (
        ["table", "cohen", "-o", "t.md", "-o", "t.xlsx"],
        "-o t.xlsx: found no ending of .md, .txt, .tex, .csv, .json: --format",
    ),
    (["plot", "cohen", "-o", "x", "--of", "p_A", "--norm", "linf"], "--of p_A draws no radii"),
    (
        ["heat_map", "cohen", "-o", "x", "--rows", "epsilon"],
        "--rows and --columns are both epsilon",
    ),
    (
        ["heat_map", "cohen", "-o", "x", "--measure", "clean_accuracy", "--norm", "linf"],
        "--norm is for radii",
    ),
    (
        [
            *("heat_map", "cohen", "-o", "x", "--measure", "average_certified_radius"),
            *("--high-probability", "0.1"),
        ],
        "--high-probability is for accuracies",
    ),
    (
        [
            *("heat_map", "cohen", "-o", "x", "--measure", "average_certified_radius"),
            *("--radii", "1"),
        ],
        "--radii is for --measure",
    ),
    (["envelope", "cohen", "--group-by", "colour"], "'colour' is not known; known: dataset"),
    (["envelope", "cohen", "--show", "radius"], "'radius' is not known; known: certified_accuracy"),
    (["examples", "cohen", "--worst", "0"], "'0' is not a whole number from 1 to 4,000,000,000"),
    (["examples", "cohen", "--worst", "1", "--best", "1"], "--best"),
    (["plot", "cohen"], "plot needs -o FILE"),
    (["plot", "cohen", "-o", "x", "--format", "csv"], "--format is for tables"),
    (["plot", "cohen", "-o", "x", "--decimals", "1"], "--decimals is for tables"),
    (["plot", "cohen", "-o", "x", "--radii", "1"], "--radii"),
    (["plot_envelope", "cohen", "-o", "x", "--split-baseline"], "--baseline"),
    (["heat_map", "cohen"], "heat_map needs -o FILE"),
    (["heat_map", "cohen", "-o", "x", "--rows", "colour"], "'colour' is not known; known: dataset"),
    (
        ["heat_map", "cohen", "-o", "x", "--measure", "radius"],
        "'radius' is not known; known: certified_accuracy",
    ),
    (
        ["heat_map", "cohen", "-o", "x", "--measure", "clean_accuracy", "--radii", "1"],
        "--radii is for --measure",
    ),
    (["report", "cohen", "-o", "x", "--format", "csv"], "--format is for tables"),
    (
        ["report", "cohen", "-o", "r.pdf"],
        "write . for this one, or it without the ending of a file",
    ),
]


FAILURES = [
    (["summary", "nowhere"], "nowhere is no file, no folder and matches nothing"),
    (
        ["summary", "trained"],
        "trained: holds no certification log, but others: training; for training plot_training",
    ),
    (
        ["summary", "attacked"],
        "holds no certification log, but others: prediction; for predictions there are",
    ),
    (
        ["summary", "attacked/N100/PGD_0.250/num_1/predictions"],
        "is a prediction log; what is needed here is a cert",
    ),
    (
        ["empirical", COHEN.format("0.25")],
        "is a certification log; what is needed here is a prediction log",
    ),
    (
        ["compare", "cohen", "ours"],
        "compare takes two certification logs or two prediction logs, got 4 and 0",
    ),
    (["compare", "cohen", "--high-probability", "0.01"], "compare takes no --high-probability"),
    (["compare", "attacked/N100/PGD_0.250", "--radii", "0.5"], "compare reads no --radii"),
    (
        ["plot_envelope", "cohen", "-o", "x", "--baseline", "X"],
        "no group is called 'X'; there are cohen",
    ),
    (["plot_envelope", "cohen", "-o", "x", "--baseline", "cohen"], "nothing but the baseline"),
    (
        ["heat_map", "cohen", "-o", "x", "--rows", "target", "--columns", "restarts"],
        "no log states its target or its",
    ),
    (["heat_map", "cohen", "-o", "x", "--title", r"$\nonsense$"], "title"),
    (["plot_empirical", "cohen", "-o", "x"], "needs prediction logs"),
    (["plot_training", "trained", "-o", "x", "--where", "sigma=0.5"], "sigma=0.5"),
    (["plot", "cohen", "-o", "x", "--title", r"$\nonsense$"], "title"),
    (["summary", "cohen", "-o", "ours"], "ours is a folder: name the file to write"),
]


REFUSED = [*((2, *case) for case in USAGE), *((1, *case) for case in FAILURES)]


@pytest.mark.parametrize(
    ("code", "arguments", "text"), REFUSED, ids=[" ".join(case[1]) for case in REFUSED]
)
def test_what_cannot_be_done_is_answered_in_one_line_and_writes_nothing(
    filled, workplace, code, arguments, text
):
    """Usage errors and unsuitable logs."""
    before = snapshot(workplace)
    assert text in refusal(filled(*arguments), code)
    assert snapshot(workplace) == before


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("rows", [[("A", 0.0)], [("W", 0.3), ("A", 0.0)], [("R", 0.0)]], ids=str)
def test_analysis_takes_logs_in_which_nothing_is_certified(analyze, analysis, rows):
    for name in "ab":
        certification(f"poor/{name}/sigma_0.50", rows)
    makes = ANALYSES[analysis].makes
    to_file = {"table": [], "figure": ["-o", "result.svg"], "page": ["-o", "result"]}[makes]
    outcome = analyze(analysis, "poor", *to_file)
    assert outcome.code == 0 or refusal(outcome, 1)
    assert (outcome.code == 0) == (
        "certification" in ANALYSES[analysis].kinds
        and analysis not in ("plot_empirical", "gap", "held_out")
    ), "those need attacks, or other images, as well"


_MOST_POINTS = 12


def describe(figure: Figure) -> str:
    """Lines of text: first those of the figure, then those of each of its axes."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    names = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    lines = [
        figure.get_suptitle(),
        figure.get_supxlabel(),
        *[f"legend: {' | '.join(some)}" for some in names],
        *[line for axes in figure.axes for line in _of_axes(axes)],
    ]
    return "".join(line.replace("\n", "\\n") + "\n" for line in lines if line)


def _of_axes(axes: Axes) -> list[str]:
    names = axes.get_title(), axes.get_xlabel(), axes.get_ylabel()
    lines = [f"axes: {' | '.join(names)}: {_numbers(axes.get_xlim())}; {_numbers(axes.get_ylim())}"]
    for line in axes.get_lines():
        label = line.get_label().removeprefix("_child0")
        style = [to_hex(line.get_color()), line.get_linestyle(), line.get_marker()]
        points = "; ".join(map(_numbers, line.get_data()))
        lines.append(f"{line.get_drawstyle()} {label} {' '.join(style)}: {points}")
    for shape in [] if axes.get_label() == "<colorbar>" else axes.collections:
        if (values := shape.get_array()) is not None:
            scale = _numbers(shape.get_clim())
            lines.append(f"cells: {'; '.join(map(_numbers, values.filled(-1)))} of {scale}")
            continue
        colour = to_hex([*shape.get_facecolor(), *shape.get_edgecolor()][0])
        corners = np.concatenate([path.vertices for path in shape.get_paths()]).T
        lines.append(f"band {shape.get_label()} {colour}: {'; '.join(map(_numbers, corners))}")
    if axes.texts or axes.patches:
        ticks = [
            [text.get_text() for text in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)
        ]
        lines += [f"ticks: {' '.join(names)}" for names in ticks]
    for text in axes.texts:
        lines.append(f"{text.get_text()} at {_numbers(text.get_position())} {text.get_color()}")
    lines += [f"{patch.get_hatch()} at {_numbers(patch.get_xy())}" for patch in axes.patches]
    return lines


def _numbers(values: Iterable[float]) -> str:
    """Four digits of at most so many of the values, from the first to the last."""
    values = np.asarray([*values], dtype=float)
    places = np.unique(np.linspace(0, len(values) - 1, _MOST_POINTS).astype(int))
    return " ".join(f"{value:.4g}" for value in values[places] + 0.0)


GOLDEN = Path(__file__).parents[1] / "data/analyses.txt"
SECTIONS = dict(part.split("\n", 1) for part in GOLDEN.read_text().split("\n$ ")[1:])


@pytest.mark.parametrize("command", SECTIONS)
def test_analyze_prints_what_is_stored(command, analyze, golden_folder, monkeypatch):
    """Byte for byte, what tests/data/analyses.txt has.

    There, a line ``$ ARGUMENTS`` is followed by the output of ``analyze ARGUMENTS`` in the folder
    that support.golden_folder fills, by its warnings or its error after ``! ``, and by its exit
    status after ``= `` unless it is 0. Of a figure it has what ``describe`` says of it.
    ``SMOOTHADV_WRITE_GOLDEN=1`` writes the outputs anew.
    """
    monkeypatch.chdir(golden_folder)
    words, drawn = shlex.split(command), []
    is_figure = ANALYSES[words[0]].makes == "figure"
    monkeypatch.setattr("smoothadv.cli.analyze.save", lambda made, *_, **__: drawn.append(made))
    outcome = analyze(*words, *(["-o", "figure.svg"] if is_figure else []))
    printed = "".join(map(describe, drawn)) if is_figure else outcome.out
    printed += "".join(f"! {line}\n" for line in outcome.err.splitlines())
    printed += f"= {outcome.code}\n" if outcome.code else ""
    if "SMOOTHADV_WRITE_GOLDEN" in os.environ:
        start = f"\n$ {command}\n"
        GOLDEN.write_text(
            GOLDEN.read_text().replace(start + SECTIONS[command].rstrip(), start + printed.rstrip())
        )
    assert printed.rstrip() == SECTIONS[command].rstrip()


def test_every_table_and_figure_is_stored():
    assert {*ANALYSES} - {"report"} <= {command.split()[0] for command in SECTIONS}
