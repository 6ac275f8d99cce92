"""A certification is continued under the same settings alone, and on a full disk it ends in whole
rows.
"""

from pathlib import Path

import pytest
import torch

from smoothadv.voting.classifier import VotingClassifier
from support.commands import (
    call,
    on_a_small_disk,
    script,
    snapshot,
    succeed,
    timeless,
)

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
    """Without --resume too, and before any pass; a later option replaces an earlier one."""
    monkeypatch.delattr(VotingClassifier, "forward")
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
