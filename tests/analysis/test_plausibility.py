"""Radii that cannot be certificates for their sigma, n and alpha are refused; published rounding is
understood. Logs of every procedure are analysed as what they are: radii on a grid are called so,
images given up are counted.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoothadv.analysis.facts import Facts
from smoothadv.analysis.logs import Log
from smoothadv.analysis.reading import check_certificates, read_logs, rounding_notes
from smoothadv.base.errors import UserError
from smoothadv.statistics import PROCEDURES, Procedure, Voting
from smoothadv.statistics.bounds import certified_radius, maximum_radius
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

LOG = Path("results/noise_0.50/test/sigma_0.50")
# The largest radius for n = 100,000 and alpha = 0.001, to the four decimals that released logs
# have.
CAPS = {0.12: 0.4574, 0.25: 0.9529, 0.5: 1.9057, 1.0: 3.8115}


def facts_of(sigma: float | None = 0.5, source: str = "assumed", **values) -> Facts:
    """Published n and alpha, from where ``source`` says, and sigma from the path; ``values``
    replace any.
    """
    values = {"sigma": sigma, "N": 100_000, "alpha": 0.001, **values}
    sources = {"sigma": "path sigma_0.50", "N": source, "alpha": source}
    known = {name: value for name, value in values.items() if value is not None}
    return Facts(known, {name: sources[name] for name in known})


TOLD = facts_of(0.5, "manifest", N=1000)


def with_method(**settings_) -> Facts:
    """Those of a log of ours, by this method."""
    return Facts(TOLD.values, TOLD.sources, {"settings": {**TOLD.values, **settings_}, "runs": []})


def table_of(*radii: float, **columns) -> pd.DataFrame:
    """Correct examples 0, 20, 40, ... of these radii."""
    count = len(radii)
    table = {
        "idx": range(0, 20 * count, 20),
        "label": range(count),
        "predict": range(count),
        "radius": radii,
    }
    return pd.DataFrame({**table, **columns, "correct": 1}).astype({"radius": "float64"})


def counted(
    *successes: int, trials: int = 1000, sigma: float = 0.5, alpha: float = 0.001
) -> pd.DataFrame:
    """A log of ours: the radii that the counts certify."""
    radii = [certified_radius(count, trials, sigma, alpha) for count in successes]
    table = table_of(*(radius or 0.0 for radius in radii), successes=list(successes), trials=trials)
    table.loc[[radius is None for radius in radii], ["predict", "correct"]] = [-1, 0]
    return table


# Of two different n.
MIXED = pd.concat([counted(1000, 900), counted(90, trials=100).assign(idx=60)], ignore_index=True)


def check(table: pd.DataFrame, facts: Facts) -> Log:
    return check_certificates(Log("", LOG, "", table, facts))


def refusal(table: pd.DataFrame, facts: Facts) -> str:
    return refusals.refusal(check, table, facts, names=LOG)


def accepted(table: pd.DataFrame, facts: Facts) -> bool:
    try:
        check(table, facts)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("sigma", [*CAPS, 3.0, 5.0, 8.0])
@pytest.mark.parametrize("digits", [".3g", ".4f", ".17g"])
def test_cap_may_be_rounded_up_in_the_last_printed_digit_and_no_more(sigma, digits):
    """At sigma 5 the cap 19.0575 is printed as 19.1."""
    cap = maximum_radius(100_000, sigma, 0.001)
    more = {
        ".3g": 10.0 ** (math.floor(math.log10(cap)) - 2),
        ".4f": 0.0002,
        ".17g": cap * 1e-7,
    }[digits]
    printed = float(f"{cap:{digits}}")
    assert accepted(table_of(printed), facts_of(sigma))
    assert not accepted(table_of(float(f"{printed + more:{digits}}")), facts_of(sigma))


@settings(max_examples=25)
@given(
    st.floats(0.05, 2.5),
    st.integers(10, 1_000_000),
    st.sampled_from([0.01, 0.001, 1e-5]),
    st.sampled_from([".3g", ".4f", ".17g"]),
)
def test_no_true_certificate_is_refused_however_it_was_printed(sigma, n, alpha, digits):
    cap = maximum_radius(n, sigma, alpha)
    facts = facts_of(sigma, "manifest", N=n, alpha=alpha)
    printed = [float(f"{share * cap:{digits}}") for share in (1, 0.9999, 0.5)]
    assert accepted(table_of(*printed), facts)
    assert not accepted(table_of(0.0, cap + 0.006), facts), "a radius above any rounding"


def other_sigma(sigma: float) -> pd.DataFrame:
    rows = [counted(1000, 900), counted(700, 600, sigma=sigma).assign(idx=[60, 80])]
    return pd.concat(rows, ignore_index=True)


def pile(sigma: float, times: int, alpha: float = 0.01) -> pd.DataFrame:
    """Released radii of which the largest is there several times."""
    cap = float(f"{maximum_radius(100_000, sigma, alpha):.3}")
    return table_of(0.1 * sigma, *[cap] * times)


def told(*names: str, source: str) -> Facts:
    """Those of a released log, but for the source of some."""
    sources = {"sigma": "path sigma_0.50", "N": "assumed", "alpha": "assumed"}
    return Facts(facts_of().values, sources | dict.fromkeys(names, source))


CAP = maximum_radius(1000, 0.5, 0.001)
NEAR_CAP = table_of(CAP, 0.1, successes=[1000, 90], trials=[1000, 100])
ACCEPTED = {
    **{
        f"the published cap of sigma {sigma}": (table_of(0.1, cap), facts_of(sigma))
        for sigma, cap in CAPS.items()
    },
    "zero radii at n = 1": (table_of(0.0, 0.0), facts_of(N=1)),
    "our counts, radii that they certify": (counted(1000, 999, 600, 400), TOLD),
    "radii but for rounding": (
        counted(900, 700).assign(radius=lambda table: table.radius * [1, 1 + 1e-9]),
        TOLD,
    ),
    "counts of one sigma": (other_sigma(0.25).iloc[:2], TOLD),
    "the alpha that is told": (
        counted(900, 700, alpha=0.01),
        facts_of(0.5, "manifest", N=1000, alpha=0.01),
    ),
    "the n that is told": (counted(90, trials=100), facts_of(0.5, "manifest", N=100)),
    "the n that is stated": (counted(90, trials=100), facts_of(0.5, "stated", N=100)),
    "one n, of unknown sigma": (MIXED.iloc[:2], facts_of(None)),
    "one n, assumed": (MIXED.iloc[:2], facts_of(0.5)),
    "several n, of a method that adapts n": (MIXED, with_method(method="adaptive")),
    "the largest radius of a method that adapts n": (NEAR_CAP, with_method(method="adaptive")),
    "an abstention of counts that certify nothing": (counted(900, 540), TOLD),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_radii_that_can_be_true_are_accepted(case):
    check(*ACCEPTED[case])


REFUSED = {
    **{
        f"above the published cap of sigma {sigma}": (
            table_of(0.1, cap + 0.0002, 9.0),
            facts_of(sigma),
            f"at idx 20: {cap + 0.0002:g} is above {maximum_radius(100_000, sigma, 0.001):.6g}, "
            f"the largest for sigma {sigma:g}, n = 100,000 and alpha = 0.001",
        )
        for sigma, cap in CAPS.items()
    },
    "above the cap at n = 1": (table_of(0.0, 0.02), facts_of(N=1, source="stated"), "idx 20"),
    "sources": (
        table_of(2.0),
        facts_of(0.5, "stated"),
        "sigma path sigma_0.50, N stated, alpha stated",
    ),
    "larger than its counts certify": (
        counted(900, 700).assign(radius=lambda table: table.radius * [1, 1 + 1e-5]),
        TOLD,
        "counts do not certify at sigma 0.5 and alpha 0.001, first at idx 20",
    ),
    "smaller than its counts certify": (
        counted(900, 700).assign(radius=lambda table: table.radius * [1, 0.99]),
        TOLD,
        "counts do not certify",
    ),
    "several n, by exact": (MIXED, with_method(method="exact"), "different n"),
    "several n, where no method is named": (MIXED, with_method(), "different n"),
    "above the cap of a method that adapts n": (
        NEAR_CAP.assign(radius=[CAP * 1.001, 0.1]),
        with_method(method="adaptive"),
        "cannot be certified",
    ),
    "one radius at the cap of another alpha": (pile(0.5, 1), facts_of(0.5), "cannot be certified"),
    "a radius above a pile": (
        pd.concat([pile(0.5, 3), table_of(1.99).assign(idx=99)], ignore_index=True),
        facts_of(0.5),
        "idx",
    ),
    **{
        f"several n, {number}": (
            MIXED,
            facts,
            "different n: 100 trials at idx 60 where others have 1000",
        )
        for number, facts in enumerate((TOLD, facts_of(None), facts_of(0.5)))
    },
    **{
        f"sigma {sigma} among others": (
            other_sigma(sigma),
            TOLD,
            "counts do not certify at sigma 0.5 and alpha 0.001, first at idx 60",
        )
        for sigma in (0.25, 0.4999, 0.5001, 1.0)
    },
    **{
        f"counts of alpha {alpha}": (counted(900, 700, alpha=alpha), TOLD, "alpha 0.001")
        for alpha in (0.01, 0.0011, 1e-5)
    },
    **{
        f"a class where {successes} of 1000 certify nothing": (
            counted(900, successes).assign(predict=[0, 1], correct=1),
            TOLD,
            "idx 20",
        )
        for successes in (0, 100, 500, 540)
    },
    **{
        f"another n than {source}": (
            counted(90, trials=100),
            facts_of(0.5, source, N=1000),
            f"100 trials per example where n = 1000 ({source})",
        )
        for source in ("manifest", "stated")
    },
    **{
        f"an alpha that {source} {names} tells": (
            pile(0.5, 3),
            told(*names, source=source),
            "cannot be certified",
        )
        for source in ("manifest", "stated")
        for names in (["N"], ["alpha"], ["N", "alpha"])
    },
    **{
        f"a pile at the cap of alpha {alpha}": (
            pile(sigma, 3, alpha),
            facts_of(sigma),
            "cannot be certified",
        )
        for sigma, alpha in [(0.5, 0.02), (0.5, 0.05), (1.0, 0.1)]
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_radii_that_cannot_be_true_are_refused(case):
    table, facts, words = REFUSED[case]
    assert words in refusal(table, facts)


ONE_CLASS = table_of(*[0.0] * 30).assign(predict=7, label=[0, 7] * 15)
NOTED = {
    "unknown sigma": (table_of(50.0), facts_of(None), "its sigma is unknown"),
    "nothing": (table_of(0.5), facts_of(0.5), ""),
    "one class": (ONE_CLASS, facts_of(0.5), "it predicts class 7 for every example"),
    "abstentions": (ONE_CLASS.assign(predict=-1), facts_of(0.5), "it abstains on every example"),
    "few examples of one class": (ONE_CLASS.iloc[:10], facts_of(0.5), ""),
    "examples of one label": (ONE_CLASS.assign(label=7), facts_of(0.5), ""),
    "two classes": (ONE_CLASS.assign(predict=[7] * 29 + [3]), facts_of(0.5), ""),
    "one alpha": (pile(0.5, 3, 0.001), facts_of(0.5), ""),
    # 3.91 sigma, at n = 100,000, is the cap of alpha = 0.01.
    **{
        f"another alpha at sigma {sigma}": (
            pile(sigma, 3),
            facts_of(sigma),
            f"its largest radius, {3.9105 * sigma:.3g}, is impossible",
        )
        for sigma in CAPS
    },
}


@pytest.mark.parametrize("case", NOTED)
def test_readers_are_told_of_what_is_odd(case):
    table, facts, words = NOTED[case]
    found = check(table, facts)
    assert [note[: len(words)] for note in found.notes] == ([words] if words else [])
    is_other = case.startswith("another alpha")
    assert (found.facts.alpha, found.facts.n) == (0.01 if is_other else 0.001, 100_000)
    assert ("inferred" in found.facts.sources["alpha"]) == is_other


def test_notes_of_the_reader_are_kept():
    log = Log("", LOG, "", table_of(0.5), facts_of(0.5), ("its last line was cut off",))
    assert check_certificates(log).notes == log.notes


def test_trials_win_over_an_n_that_was_only_assumed():
    """A log of ours that lost its manifest still says its n."""
    facts = check(counted(90, 80, trials=100), facts_of(0.5)).facts
    assert facts.get("N") == 100 and facts.sources["N"] != "assumed"


@pytest.mark.parametrize(
    "radii, unit",
    [
        ([1.91, 0.0512, 9.76e-05, 0.0], "0.005"),
        ([0.953, 0.0512], "0.0005"),
        ([1.9057, 0.0513], "5e-05"),
        ([0.4574, 0.05], "5e-05"),
        ([12.3, 1.0], "0.05"),
        ([certified_radius(count, 1000, 0.5, 0.001) for count in (1000, 900, 700)], None),
        ([0.5, 0.12345678901234567], None),
        ([0.0, 0.0], None),
    ],
)
def test_note_on_rounded_radii_says_by_how_much_they_may_be_too_large(radii, unit):
    """Full precision is not called so, nor are zeros."""
    notes = rounding_notes(Log("", LOG, "", table_of(*radii)))
    assert [note.partition("by at most ")[2] for note in notes] == ([unit] if unit else [])


# Logs of every procedure


@pytest.fixture
def place(workplace: Path) -> None:
    """A working folder with a log of each kind in a folder of its own."""
    put_one_of_each()


def notes_of(path: str) -> str:
    (log,) = read_logs([path]).certification
    return " ".join(log.notes)


def refusal_of(path: Path | str) -> str:
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


@pytest.mark.usefixtures("place")
def test_radii_are_judged_by_the_procedure_that_the_manifest_names(monkeypatch):
    monkeypatch.setitem(PROCEDURES, "on-grid", OnGrid)
    monkeypatch.setitem(PROCEDURES, "cautious", Cautious)
    rows = [{**entry, "radius": entry["radius"] / 2} for entry in EXACT]
    assert "its radii were decided on a grid" in notes_of(str(put("mine.tsv", rows, "on-grid")))
    assert "on a grid" not in notes_of(str(put("mine.tsv", rows, "cautious")))
    assert "on a grid" not in notes_of(str(put("mine.tsv", rows, "a plug-in that is not there")))
    assert "counts do not certify" in refusal_of(put("mine.tsv", rows, "exact"))


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


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("case", ABSTENTIONS)
def test_counts_may_stop_where_they_rule_out_a_certificate(case):
    rows, words = ABSTENTIONS[case]
    notes = notes_of(str(put("log.tsv", rows)))
    assert notes.startswith(words) and bool(notes) == bool(words)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("case", UNDECIDED)
def test_abstentions_that_their_counts_do_not_show_are_refused(case):
    rows, words = UNDECIDED[case]
    assert words in refusal_of(put("log.tsv", rows))


@pytest.mark.usefixtures("place")
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
        assert said in refusal_of(put("log.tsv", [GRID[0] | changes, *GRID[1:]], "adaptive")), (
            changes
        )
    without = [{name: entry[name] for name in COLUMNS} for entry in GRID]
    assert "or of a number that decides nothing" in refusal_of(put("log.tsv", without)), (
        "an exact log could not be like that"
    )


FOLDERS, GLOBS = (
    [".", "deep", "d*", "**/deep"],
    ["*/*", "deep/*", "deep/more.tsv.shards", "**/*.tsv"],
)


@pytest.mark.usefixtures("place")
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


@pytest.mark.usefixtures("place")
def test_log_without_manifest_in_which_all_abstain_is_no_mixture():
    """Its n is in its counts, here 1000; nothing says that it is the published one."""
    path = put("sigma_0.50", [row(idx, -1, 0.0, 400, N) for idx in range(3)], manifest=False)
    assert len(read_logs([str(path)]).certification) == 1
