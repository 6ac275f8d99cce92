"""Every analysis takes whatever it is given: a folder with all kinds of logs, one log, logs that certify nothing."""

import pytest

from smoothadv.analysis import ANALYSES
from support.analyzed_folder import COHEN, certification, fill_folder, refusal
from support.commands import Outcome, call


@pytest.fixture
def analyze(workplace, capsys):
    """The command, in a folder with logs of every kind."""
    fill_folder()
    return lambda *arguments: call(capsys, "analyze", *arguments)


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
    assert ends_well or analysis == "held_out", outcome.err  # nothing is held out: tests/sweeps/test_best_models.py
    files = {"page": ["report.html"], "figure": ["result.pdf", "result.png"]}.get(ANALYSES[analysis].makes)
    if files is None and ends_well:
        assert len(outcome.out.splitlines()) >= 3
    elif ends_well:
        assert sorted(path.name for path in (workplace / "new").rglob("*") if path.is_file()) == files


@pytest.mark.parametrize("analysis", ANALYSES)
def test_analysis_takes_one_log_of_its_kind(analyze, analysis):
    kinds = ANALYSES[analysis].kinds
    for kind, log in [("certification", COHEN.format("0.25")), ("training", "trained/log.txt"),
                      ("prediction", "attacked/N100/PGD_0.250/num_1/predictions")]:  # fmt: skip
        outcome = analyze(analysis, log, *to_file(analysis, "result"))
        needed = {"compare": (), "gap": (), "held_out": (), "plot_empirical": ("prediction",)}.get(analysis, kinds)
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
