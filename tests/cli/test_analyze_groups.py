"""analyze from end to end: groups, their names, conditions, norms, usage and refusals; every
analysis on any log.
"""

import csv
import io

import pytest

from smoothadv.analysis import ANALYSES
from support.analyzed_folder import (
    COHEN,
    ORACLE,
    OURS,
    certification,
    fill_folder,
    records,
    refusal,
)
from support.commands import Outcome, call, snapshot


@pytest.fixture
def analyze(workplace, capsys):
    """The command, in a folder with logs of every kind."""
    fill_folder()
    return lambda *arguments: call(capsys, "analyze", *arguments)


def columns(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.err
    return next(csv.reader(io.StringIO(outcome.out)))


GROUPS = ["Cohen=cohen", "Ours=ours"]


@pytest.mark.parametrize(
    ("dataset", "largest", "ends"),
    [
        ("cifar10", 3.8, [0.25, 3.75]),
        ("imagenet", 3.8, [0.5, 3.5]),
        ("imagenet", 0.9, [0.25, 0.75]),
        ("cifar10", 30.0, [2.5, 30.0]),
    ],
)
def test_radii_that_nobody_names_have_the_steps_of_the_paper_for_the_dataset(
    analyze, dataset, largest, ends
):
    log = f"steps/{dataset}/noise_1.00/test/sigma_{largest / 3:.2f}"
    certification(log, [("R", largest), ("R", 0.1)])
    for analysis in ("summary", "table"):
        found = [
            float(name)
            for name in columns(analyze(analysis, log, "--format", "csv"))
            if name[0].isdigit()
        ]
        found = [radius for radius in found if radius]
        assert [found[0], found[-1]] == ends and found == [
            found[0] * (k + 1) for k in range(len(found))
        ]


def test_envelope_has_the_columns_of_the_contract_and_the_best_of_each_group(analyze):
    outcome = analyze("envelope", *GROUPS, "--radii", 0.25, 1, "--format", "csv")
    header = "group,radius,certified_accuracy,abstention_rate,clean_accuracy,model,models,examples"
    assert columns(outcome) == header.split(",")
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    facts = [(row["group"], *(float(row[name]) for name in header.split(",")[1:5])) for row in rows]
    assert facts == [
        ("Cohen", 0.25, 0.6, 0.0, 0.6),  # a tie of 0.6 with equal clean accuracy: the first
        ("Cohen", 1.0, 0.2, 0.2, 0.6),
        ("Ours", 0.25, 0.8, 0.2, 0.8),
        ("Ours", 1.0, 0.4, 0.4, 0.6),
    ]
    assert {(row["models"], row["examples"]) for row in rows} == {("2", "5")}
    assert "eps_64" in rows[2]["model"] and "eps_255" in rows[3]["model"]


@pytest.mark.parametrize(
    ("show", "cells"),
    [
        ("certified_accuracy", ["**(80.0) 80.0**", "**(60.0) 40.0**"]),
        ("abstention_rate", ["20.0", "40.0"]),
        ("clean_accuracy", ["80.0", "60.0"]),
    ],
)
def test_show_chooses_what_people_see(analyze, show, cells):
    outcome = analyze("envelope", *GROUPS, "--radii", 0.25, 1, "--show", show)
    title, _, _, ours = outcome.out.splitlines()
    assert [cell.strip() for cell in ours.strip("|").split("|")] == ["Ours", "2", *cells]
    assert show == "certified_accuracy" or show.replace("_", " ") in title, "the title says it"
    csv_ = [
        analyze("envelope", *GROUPS, "--show", name, "--format", "csv").out
        for name in (show, "model")
    ]
    assert csv_[0] == csv_[1], "programs get everything"


def test_show_model_names_the_selected_log(analyze):
    text = analyze("envelope", *GROUPS, "--radii", 0.25, 1, "--show", "model").out
    assert 0 < text.index("Ours") < text.index("eps_64") < text.index("eps_255"), (
        "in the order of the radii"
    )


def test_hyper_parameters_split_the_groups(analyze):
    found = records(
        analyze("envelope", *GROUPS, "--group-by", "sigma", "--radii", 0.25, "--format", "json")
    )
    groups = [
        f"{name}, sigma = {sigma}" for name in ("Cohen", "Ours") for sigma in ("0.25", "0.50")
    ]
    rows = [(row["group"], row["models"], row["certified_accuracy"]) for row in found]
    assert rows == [*zip(groups, [1] * 4, [0.6, 0.6, 0.8, 0.6])]
    by_epsilon = records(
        analyze("envelope", "ours", "--group-by", "epsilon", "--radii", 1, "--format", "json")
    )
    assert [row["group"] for row in by_epsilon] == ["epsilon = 0.25", "epsilon = 1"]


def test_released_epsilons_have_the_names_of_the_paper_unless_another_one_has(analyze):
    for epsilon in ("127", "0.5", "255"):
        certification(f"three/PGD_2steps/eps_{epsilon}/noise_0.50/test/sigma_0.50", ORACLE)
    found = records(
        analyze("envelope", "three", "--group-by", "epsilon", "--radii", 1, "--format", "json")
    )
    assert [row["group"] for row in found] == ["epsilon = 0.4961", "epsilon = 0.5", "epsilon = 1"]


@pytest.mark.parametrize("analysis", ["table", "summary"])
def test_names_of_groups_are_in_tables_of_logs(analyze, analysis):
    named = analyze(analysis, *GROUPS, "--radii", 0.25)
    groups = ["Cohen", "Cohen", "Ours", "Ours"]
    assert [line.split("|")[1].strip() for line in named.out.splitlines()] == [
        "group",
        "-" * 7,
        *groups,
    ]
    found = records(analyze(analysis, *GROUPS, "--radii", 0.25, "--format", "json"))
    assert [row["group"] for row in found] == groups
    assert "group" not in columns(analyze(analysis, "cohen", "ours", "--format", "csv")), (
        "only names of the user"
    )


def test_rows_are_labelled_and_ordered_by_hyper_parameters(analyze):
    certification(OURS.format("0.50", 127), ORACLE)
    arguments = [
        "table",
        "Ours=ours",
        "Cohen=cohen",
        "--radii",
        0.25,
        "--label-by",
        "epsilon",
        "sigma",
    ]
    assert [line.split(" | ")[1].strip() for line in analyze(*arguments).out.splitlines()[2:]] == [
        r"epsilon = 0.25 \| sigma = 0.25",
        r"epsilon = 0.5 \| sigma = 0.50",
        r"epsilon = 1 \| sigma = 0.50",
        "sigma = 0.25",
        "sigma = 0.50",
    ]
    assert (
        r"epsilon = 0.5 \textbar{} sigma = 0.50 &" in analyze(*arguments, "--format", "latex").out
    )
    found = records(analyze(*arguments, "--format", "json"))
    assert [(row["epsilon"], row["sigma"]) for row in found[1:4]] == [
        (127 / 256, 0.5),
        (255 / 256, 0.5),
        (None, 0.25),
    ]
    assert "eps_127" in found[1]["log"] and found[1]["0.25"] == 0.6, "the row of this log"
    assert (
        analyze("table", "cohen", "--label-by", "split").out.count("| split = test: noise_0.") == 2
    ), "also names"


def test_linf_radii_are_l2_radii_over_the_root_of_the_pixels(analyze):
    """2/255 in CIFAR-10 is l2 0.434711: of the radii 0.5, 0.25, 1 two suffice."""
    options = ["summary", COHEN.format("0.50"), "--norm", "linf", "--radii", "2/255", "--format"]
    (record,) = records(analyze(*options, "json"))
    assert record["0.00784314"] == 0.4
    assert "| 2/255 |" in analyze(*options, "markdown").out.splitlines()[0]
    assert columns(analyze("summary", "cohen", "--norm", "linf", "--format", "csv"))[5:] == [
        f"{k / 255:g}" for k in (1, 2, 4, 8)
    ]


def test_dimension_is_stated_where_no_path_tells(analyze):
    certification("plain.tsv", ORACLE)
    options = ["summary", "plain.tsv", "--norm", "linf", "--radii", 0.05, "--format", "json"]
    assert "plain.tsv does not say how many coordinates" in refusal(analyze(*options), 1)
    assert records(analyze(*options, "--dimension", 100))[0]["0.05"] == 0.4, "l2 0.5"
    assert records(analyze(*options, "--dimension", 400))[0]["0.05"] == 0.2, "l2 1"


def test_high_probability_lowers_the_accuracies_by_the_deduction(analyze):
    certification("many/sigma_0.50", [("R", 1.0)] * 500)
    options = ["--high-probability", 0.001, "--radii", 0.5, "--format", "json"]
    (table,) = records(analyze("table", "many", *options))
    assert 1 - table["0.5"] == pytest.approx(0.010859, abs=5e-7)
    certification("many/other/sigma_0.50", [("R", 1.0)] * 500)
    best = records(analyze("envelope", "many", *options))[0]
    assert (best["models"], 1 - best["certified_accuracy"]) == (
        2,
        pytest.approx(0.011578, abs=5e-7),
    ), "rho is halved"


@pytest.mark.parametrize(
    ("rho", "text"), [("1e-8", "0.99999999"), ("exact:0.05", "0.95 (exact binomial)")]
)
def test_heading_says_the_probability(analyze, rho, text):
    title = analyze("table", "cohen", "--high-probability", rho).out.splitlines()[0]
    assert f"with probability {text} |" in title, "and never claims certainty"


def test_confidence_adds_intervals(analyze):
    options = ["table", COHEN.format("0.50"), "--radii", 0, 0.5, "--confidence", 0.95]
    names = ["log", "0", "0_low", "0_high", "0.5", "0.5_low", "0.5_high"]
    assert columns(analyze(*options, "--format", "csv")) == names
    (record,) = records(analyze(*options, "--format", "json"))
    assert (record["0_low"], record["0"], record["0_high"]) == (0.2, 0.6, 1.0), (
        "quantiles of Binomial(5, 0.6) / 5"
    )
    assert "60.0 (20.0–100.0)" in analyze(*options).out
    assert "60.0 (20.0--100.0)" in analyze(*options, "--format", "latex").out


def test_decimals_are_for_people(analyze):
    options = ["table", "cohen", "--radii", 0, "--decimals"]
    for decimals, text in [(0, " 60 "), (3, " 60.000 ")]:
        lines = analyze(*options, decimals).out.replace("*", " ").splitlines()
        assert all(text in line for line in lines[2:])
    assert (
        analyze(*options, 0, "--format", "csv").out == analyze(*options, 5, "--format", "csv").out
    )


def test_parameters_say_where_each_is_from(analyze):
    found = records(analyze("parameters", ".", "--format", "json"))
    ours = next(row for row in found if "eps_255" in row["log"])
    assert (ours["sigma"], ours["epsilon"], ours["N"], ours["dataset"]) == (
        0.5,
        255 / 256,
        100_000,
        "cifar10",
    )
    assert "epsilon (eps_255)" in ours["sources"] and "assumed: " in ours["sources"]
    assert [row["num_noise_vec"] for row in found if "num_8" in row["log"]] == [8]
    assert "| 100,000 |" in analyze("parameters", "ours").out


def test_conditions_add_up_however_they_are_given(analyze):
    once = analyze(
        "parameters", "cohen", "ours", "--where", "sigma=0.5", "split=test", "--format", "csv"
    )
    twice = analyze(
        "parameters",
        "cohen",
        "ours",
        "--where",
        "sigma=0.5",
        "--where",
        "split=test",
        "--format",
        "csv",
    )
    assert once == twice
    assert (
        analyze("parameters", "cohen", "ours", "--where", "sigma=0.5", "--where", "sigma=0.25").code
        == 1
    )


USAGE = [
    (["nonsense", "cohen"], "nonsense"),
    (["summary"], "LOG"),
    (["summary", "cohen", "--radii", "0.25", "x"], "'x' is no radius"),
    (["summary", "cohen", "--radii", "-1"], "'-1' is no radius"),
    (["summary", "cohen", "--radii"], "--radii"),
    (["summary", "cohen", "--norm", "l1"], "'l1' is not known; known: l2, linf"),
    (["summary", "cohen", "--format", "html"], "known: markdown, latex, csv, json"),
    (["summary", "cohen", "--decimals", "-1"], "'-1' is not a whole number"),
    (["summary", "cohen", "--where", "sigma"], "'sigma' is not FIELD=VALUE"),
    (["summary", "cohen", "--where", "colour=red"], "'colour=red' is not FIELD=VALUE"),
    (["summary", "cohen", "--dimension", "0"], "'0' is not a whole number from 1 to 4,000,000,000"),
    (["summary", "cohen", "--sigma", "0"], "'0' would smooth nothing"),
    (["summary", "cohen", "--alpha", "1"], "'1' is not a probability"),
    (["summary", "cohen", "--high-probability", "exact0.1"], "'exact0.1' is not a probability"),
    (["summary", "cohen", "--group-by", "sigma"], "--group-by"),
    (["table", "cohen", "--confidence", "95"], "'95' is not a probability"),
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
]


FAILURES = [
    (["summary", "nowhere"], "nowhere is no file, no folder and matches nothing"),
    (
        ["summary", "trained"],
        "trained: holds no certification log, but others: 1 training; for training plot_training",
    ),
    (
        ["summary", "attacked"],
        "holds no certification log, but others: 3 prediction; for predictions there are",
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
    (["summary", "cohen", "-o", "ours"], "ours: Is a directory"),
]


REFUSED = [*((2, *case) for case in USAGE), *((1, *case) for case in FAILURES)]


@pytest.mark.parametrize(
    ("code", "arguments", "text"), REFUSED, ids=[" ".join(case[1]) for case in REFUSED]
)
def test_what_cannot_be_done_is_answered_in_one_line_and_writes_nothing(
    analyze, workplace, code, arguments, text
):
    """Usage errors and unsuitable logs."""
    before = snapshot(workplace)
    assert text in refusal(analyze(*arguments), code)
    assert snapshot(workplace) == before


def to_file(analysis: str, file: str) -> list[str]:
    """Where an analysis writes to, unless it prints a table."""
    return [] if ANALYSES[analysis].makes == "table" else ["-o", file]


def ends_well_or_in_one_line(outcome: Outcome) -> bool:
    """Whether the analysis succeeded; a refusal must be one line."""
    if outcome.code == 0:
        return True
    assert refusal(outcome, 1)
    return False


@pytest.mark.parametrize("analysis", ANALYSES)
def test_analysis_takes_a_folder_with_all_kinds_of_logs(analyze, workplace, analysis):
    logs_of = {
        "compare": [COHEN.format("0.25"), COHEN.format("0.50")],
        "gap": [COHEN.format("0.25"), "attacked", "trained"],
    }
    logs = logs_of.get(analysis, ["."])
    outcome = analyze(analysis, *logs, *to_file(analysis, "new/result"))
    ends_well = ends_well_or_in_one_line(outcome)
    assert ends_well or analysis == "held_out", (
        outcome.err
    )  # nothing is held out: tests/sweep/test_best_models.py
    files = {"page": ["report.html"], "figure": ["result.pdf", "result.png"]}.get(
        ANALYSES[analysis].makes
    )
    if files is None and ends_well:
        assert len(outcome.out.splitlines()) >= 3
    elif ends_well:
        assert (
            sorted(path.name for path in (workplace / "new").rglob("*") if path.is_file()) == files
        )


@pytest.mark.parametrize("analysis", ANALYSES)
def test_analysis_takes_one_log_of_its_kind(analyze, analysis):
    kinds = ANALYSES[analysis].kinds
    for kind, log in [
        ("certification", COHEN.format("0.25")),
        ("training", "trained/log.txt"),
        ("prediction", "attacked/N100/PGD_0.250/num_1/predictions"),
    ]:
        outcome = analyze(analysis, log, *to_file(analysis, "result"))
        needed = {"compare": (), "gap": (), "held_out": (), "plot_empirical": ("prediction",)}.get(
            analysis, kinds
        )
        assert ends_well_or_in_one_line(outcome) == (kind in needed), (kind, outcome)


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("rows", [[("A", 0.0)], [("W", 0.3), ("A", 0.0)], [("R", 0.0)]], ids=str)
def test_analysis_takes_logs_in_which_nothing_is_certified(analyze, analysis, rows):
    for name in "ab":
        certification(f"poor/{name}/sigma_0.50", rows)
    outcome = analyze(analysis, "poor", *to_file(analysis, "result"))
    kinds = ANALYSES[analysis].kinds
    assert ends_well_or_in_one_line(outcome) == (
        "certification" in kinds and analysis not in ("plot_empirical", "gap", "held_out")
    ), "those need attacks, or other images, as well"
