"""Logs of every procedure are analysed as what they are: radii on a grid are called so, images
given up are counted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from smoothadv.analysis.reading import read_logs
from smoothadv.statistics import PROCEDURES, Procedure, Voting
from smoothadv.statistics.bounds import certified_radius
from support import refusals
from support.procedure_logs import (
    ADAPTED,
    ALLOWED,
    ALPHA,
    COLUMNS,
    EXACT,
    GRID,
    SIGMA,
    N,
    put,
    put_one_of_each,
    row,
)


@pytest.fixture(autouse=True)
def place(workplace: Path) -> None:
    """A working folder with a log of each kind in a folder of its own."""
    put_one_of_each()


def notes_of(path: str) -> str:
    (log,) = read_logs([path]).certification
    return " ".join(log.notes)


def refusal(path: Path | str) -> str:
    return refusals.refusal(read_logs, [str(path)], names=path)


@dataclass(frozen=True)
class OnGrid(Procedure):
    """A procedure on a grid with columns of its own."""

    on_grid: ClassVar[bool] = True
    largest_radius: ClassVar[float] = 1.0

    def run(self, label: int) -> Voting:
        raise NotImplementedError


@dataclass(frozen=True)
class Cautious(OnGrid):
    """Radii that are smaller than those of the counts."""

    on_grid: ClassVar[bool] = False


def test_radii_are_judged_by_the_procedure_that_the_manifest_names(monkeypatch):
    monkeypatch.setitem(PROCEDURES, "on-grid", OnGrid)
    monkeypatch.setitem(PROCEDURES, "cautious", Cautious)
    rows = [{**entry, "radius": entry["radius"] / 2} for entry in EXACT]
    assert "its radii were decided on a grid" in notes_of(str(put("mine.tsv", rows, "on-grid")))
    assert "on a grid" not in notes_of(str(put("mine.tsv", rows, "cautious")))
    assert "on a grid" not in notes_of(str(put("mine.tsv", rows, "a plug-in that is not there")))
    assert "counts do not certify" in refusal(put("mine.tsv", rows, "exact"))


def stopped(successes: int, misses: int = ALLOWED + 1, idx: int = 9, label: int = 3) -> dict:
    """A row that abstains after so many misses: as soon as there is one more than n allows."""
    return row(idx, -1, 0.0, successes, successes + misses, label)


# Rows, and the beginning of the only note on them.
ABSTENTIONS = {
    "one of each": (EXACT, ""),
    **{
        f"no certificate after {successes}": ([*EXACT[:3], stopped(successes)], "")
        for successes in (0, 1, N - ALLOWED - 2)
    },
    "all": (
        [stopped(10 * idx, idx=idx, label=idx % 10) for idx in range(30)],
        "it abstains on every",
    ),
}
# Rows, and the words of the refusal.
UNDECIDED = {
    **{
        f"one may follow {successes}": (
            [*EXACT[:3], stopped(successes, ALLOWED)],
            f"different n: {successes + ALLOWED} trials at idx 9 where others have 1000",
        )
        for successes in (0, 1, 300, N - ALLOWED - 1)
    },
    "a certificate": (
        [*EXACT[:3], stopped(N, 0)],
        "abstains although its counts certify: 1000 trials at idx 9",
    ),
}


@pytest.mark.parametrize("case", ABSTENTIONS)
def test_counts_may_stop_where_they_rule_out_a_certificate(case):
    rows, words = ABSTENTIONS[case]
    notes = notes_of(str(put("log.tsv", rows)))
    assert notes.startswith(words) and bool(notes) == bool(words)


@pytest.mark.parametrize("case", UNDECIDED)
def test_abstentions_that_their_counts_do_not_show_are_refused(case):
    rows, words = UNDECIDED[case]
    assert words in refusal(put("log.tsv", rows))


def test_counts_of_a_grid_must_certify_its_radii():
    """They are those of the look that did, which needs more votes than if it were the only one."""
    assert len(read_logs(["grid/log.tsv"]).certification) == 1
    fewest = next(k for k in range(401) if ADAPTED.certified_by(k, 400 - k, 400) >= 0.5)
    alone = certified_radius(fewest - 1, 400, SIGMA, ALPHA)
    assert alone > 0.5, "one look would show it, and this one does not"
    for changes, said in [
        ({"successes": 200}, "counts do not certify"),
        ({"looks": 6}, "counts of no look, first at idx 0"),
        ({"samples": 501}, "counts of no look, first at idx 0"),
        ({"trials": 399, "successes": 399}, "counts do not certify"),
        ({"radius": 0.51}, "counts do not certify"),
        ({"successes": fewest - 1}, "counts do not certify"),
    ]:
        assert said in refusal(put("log.tsv", [GRID[0] | changes, *GRID[1:]], "adaptive")), changes
    without = [{name: entry[name] for name in COLUMNS} for entry in GRID]
    assert "or of a number that decides nothing" in refusal(put("log.tsv", without)), (
        "an exact log could not be like that"
    )


FOLDERS, GLOBS = (
    [".", "deep", "d*", "**/deep"],
    ["*/*", "deep/*", "deep/more.tsv.shards", "**/*.tsv"],
)


@pytest.mark.parametrize("argument", [*FOLDERS, *GLOBS])
def test_shards_are_passed_over_in_folders_and_globs(argument):
    """The shell expands `logs/*` to the names in it, of which the folder of shards is one."""
    put("deep/log.tsv", EXACT)
    put("deep/more.tsv.shards/0-of-2.tsv", EXACT[:2])
    put("deep/more.tsv.shards/inner/1-of-2.tsv", EXACT[2:])
    found = [str(log.path) for log in read_logs(["deep/log.tsv", argument]).certification]
    assert "deep/log.tsv" in found and not any(".shards" in path for path in found)
    if argument in FOLDERS:
        assert "deep/log.tsv" in [str(log.path) for log in read_logs([argument]).certification]


def test_log_without_manifest_in_which_all_abstain_is_no_mixture():
    """Its n is in its counts, here 1000; nothing says that it is the published one."""
    path = put("sigma_0.50", [row(idx, -1, 0.0, 400, N) for idx in range(3)], manifest=False)
    assert len(read_logs([str(path)]).certification) == 1
