"""analyze on logs that cannot be pooled: unfinished ones, and logs of different images, each said
to be what it is.
"""

from pathlib import Path

import pytest

from smoothadv.analysis import report
from smoothadv.analysis.figures import EmpiricalPlot
from smoothadv.analysis.reading import read_logs
from smoothadv.base.errors import UserError
from smoothadv.records.logs import manifest_path
from support.analyzed_folder import FIVE, SELECTION, log, records
from support.commands import call

PROGRESS = "3 of 10, unfinished"


def test_page_of_unfinished_logs_says_so(workplace, analyze):
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
