"""analyze from end to end: groups, their names, conditions, norms, usage and refusals; every
analysis on any log.
"""

import pytest

from smoothadv.analysis import ANALYSES
from support.analyzed_folder import (
    COHEN,
    certification,
    fill_folder,
    refusal,
)
from support.commands import snapshot


@pytest.fixture
def analyze(analyze):
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
    analyze, workplace, code, arguments, text
):
    """Usage errors and unsuitable logs."""
    before = snapshot(workplace)
    assert text in refusal(analyze(*arguments), code)
    assert snapshot(workplace) == before


@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.parametrize("rows", [[("A", 0.0)], [("W", 0.3), ("A", 0.0)], [("R", 0.0)]], ids=str)
def test_analysis_takes_logs_in_which_nothing_is_certified(analyze, analysis, rows):
    for name in "ab":
        certification(f"poor/{name}/sigma_0.50", rows)
    to_file = [] if ANALYSES[analysis].makes == "table" else ["-o", "result"]
    outcome = analyze(analysis, "poor", *to_file)
    assert outcome.code == 0 or refusal(outcome, 1)
    assert (outcome.code == 0) == (
        "certification" in ANALYSES[analysis].kinds
        and analysis not in ("plot_empirical", "gap", "held_out")
    ), "those need attacks, or other images, as well"
