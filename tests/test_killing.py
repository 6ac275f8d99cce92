"""No certification is lost: killed twenty times at random moments, or on a full disk, it ends like
any other.
"""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from support.commands import (
    call,
    on_a_small_disk,
    rows,
    script,
    snapshot,
    start_process,
    succeed,
    timeless,
    wait_until,
)

KILLED = -signal.SIGKILL
METHODS = {
    "exact": ["--N", 300],
    "adaptive": ["--method", "adaptive", "--N", 800, "--radii", 0, 0.25, 0.5],
}


def certification(checkpoint: Path, log: Path, *options: object) -> list[object]:
    return ["digits", checkpoint, 0.25, log, "--device", "cpu", *options]


def whole_lines(log: Path) -> bytes:
    """The log up to the end of its last whole line."""
    content = log.read_bytes() if log.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def whole_rows(log: Path) -> int:
    return max(0, whole_lines(log).count(b"\n") - 1)


def tear(log: Path, moments: random.Random) -> None:
    """Leave half a row behind, as a power failure may."""
    with log.open("ab") as file:
        file.write(b"358\t8\t8\t0.2529"[: moments.randrange(1, 14)])


def kill_at_random(process, log: Path, startup: float, moments: random.Random) -> None:
    """Kill a process a moment after it has added up to seven rows; one in five within the seconds
    of its start.
    """
    before = whole_rows(log)
    try:
        if moments.random() < 0.2:
            end = time.monotonic() + moments.uniform(0, startup)
            # Where starting takes less than that, few rows are to be written.
            wait_until(lambda: time.monotonic() > end or whole_rows(log) > before + 5, process)
        else:
            row = before + moments.randrange(1, 8)
            wait_until(lambda: whole_rows(log) >= row, process)
            time.sleep(moments.uniform(0, 0.03))
    finally:
        process.kill()
    process.communicate()
    assert process.returncode == KILLED, "it must not have finished before"


@pytest.mark.parametrize(
    ("start", "startup"),
    [("warm", 0.3), pytest.param("cold", 4.0, marks=pytest.mark.slow)],
    ids=["warm", "cold"],
)
@pytest.mark.parametrize(
    ("method", "seed"), [("exact", 1), pytest.param("adaptive", 2, marks=pytest.mark.slow)]
)
def test_certification_killed_ten_times_is_finished_by_the_same_command(
    checkpoint, warm, tmp_path, method, seed, start, startup
):
    """Twenty kills, in all phases of the work. The slow ones, of processes that load torch first,
    take 45 seconds.
    """
    whole, log, moments = tmp_path / "whole.tsv", tmp_path / "killed.tsv", random.Random(seed)
    command = script("certify", *certification(checkpoint, log, *METHODS[method]))
    starts, left = [], []
    for _ in range(10):
        starts.append(whole_rows(log))
        process = (warm.start if start == "warm" else start_process)(command, tmp_path)
        kill_at_random(process, log, startup, moments)
        left.append(whole_lines(log))
        if moments.random() < 0.5 and left[-1]:
            tear(log, moments)
    starts.append(whole_rows(log))
    # The last image is set only when the kills are over: of all 359 many are left, however late a
    # kill comes.
    for path in (log, whole):
        succeed(
            "certify", *certification(checkpoint, path, *METHODS[method], "--max", starts[-1] + 10)
        )
    assert timeless(log) == timeless(whole) and len(rows(log)) == starts[-1] + 10
    assert all(log.read_bytes().startswith(lines) for lines in left), (
        "no row is lost, nor computed again"
    )
    check_runs(log, starts)


def check_runs(log: Path, starts: list[int]) -> None:
    """The manifest lists the runs that added rows, each with the row from which on; ``starts`` are
    those of all.
    """
    listed = [
        run["first_row"]
        for run in json.loads(log.with_name(f"{log.name}.manifest.json").read_text())["runs"]
    ]
    added = [first for first, then in zip(starts, [*starts[1:], len(rows(log))]) if then > first]
    assert listed == sorted(listed) and set(added) <= set(listed) <= set(starts) and len(added) >= 5


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """A finished log of three examples by each method."""
    folder = tmp_path_factory.mktemp("finished")
    for method, options in METHODS.items():
        succeed("certify", *certification(checkpoint, folder / method, "--max", 3, *options))
    return {method: folder / method for method in METHODS}


OTHER_SETTINGS = [
    ("exact", ["--seed", 1], "seed was 0, now 1"),
    ("exact", ["--N", 301], "N was 300, now 301"),
    ("exact", ["--N0", 10], "N0 was 100, now 10"),
    ("exact", ["--alpha", 0.01], "alpha was 0.001, now 0.01"),
    ("exact", ["--batch", 50], "batch was 200, now 50"),
    ("exact", ["--precision", "bf16"], "precision was 'fp32', now 'bf16'"),
    ("exact", ["--compile"], "compiled was False, now True"),
    ("exact", ["--split", "train"], "split was 'test', now 'train'"),
    ("exact", ["--method", "adaptive"], "method was 'exact', now 'adaptive'"),
    ("adaptive", ["--method", "exact"], "method was 'adaptive', now 'exact'"),
    ("adaptive", ["--radii", 0.25], "radii was [0.0, 0.25, 0.5], now [0.0, 0.25]"),
    ("adaptive", ["--ladder"], "ladder was False, now True"),
    ("adaptive", ["--label-aware"], "label_aware was False, now True"),
]


@pytest.mark.parametrize(
    ("method", "change", "field"),
    OTHER_SETTINGS,
    ids=[f"{case[0]} {case[2]}" for case in OTHER_SETTINGS],
)
def test_the_same_log_under_other_settings_is_refused_naming_them(
    checkpoint, finished, method, change, field, capsys, monkeypatch
):
    """Without --resume too; a later option replaces an earlier one."""
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: function
    )  # which takes ten seconds
    options = [] if change[0] == "--method" else METHODS[method]
    before = snapshot(finished[method].parent)
    outcome = call(
        capsys,
        "certify",
        *certification(checkpoint, finished[method], "--max", 5, *options, *change),
    )
    last = outcome.err.splitlines()[-1]
    assert (
        outcome.code == 1
        and last.startswith("error: ")
        and field in last
        and str(finished[method]) in last
    )
    assert snapshot(finished[method].parent) == before


def test_full_disk_ends_in_one_line_and_a_log_of_whole_rows(checkpoint, warm, tmp_path):
    """Room again, the same command finishes the log."""
    whole, log = tmp_path / "whole.tsv", tmp_path / "log.tsv"
    options = ["--N", 100, "--max", 100]
    succeed("certify", *certification(checkpoint, whole, *options))
    space = len(whole.read_bytes()) - 300
    assert space > whole.with_name("whole.tsv.manifest.json").stat().st_size, (
        "the manifest must fit"
    )
    command = script("certify", *certification(checkpoint, log, *options))
    done = warm.run(on_a_small_disk(space, command), tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr.startswith("error: ")
        and str(log) in done.stderr
        and done.stderr.count("\n") == 1
    )
    assert log.read_bytes() == whole_lines(log) and 30 < whole_rows(log) < 100
    assert timeless(log) == timeless(whole)[: whole_rows(log)]
    succeed("certify", *certification(checkpoint, log, *options))
    assert timeless(log) == timeless(whole)
