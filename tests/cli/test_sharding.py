"""--shard and merge give the log that one process would have written, or a message with the next
step.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from smoothadv.base.files import lock
from support.commands import call, refused, rows, snapshot, succeed, timeless
from support.sharding import EXAMPLES, METHODS, assert_same, manifest_of


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """The log that one process writes, of twenty examples by each method."""
    folder = tmp_path_factory.mktemp("whole")
    for method, (command, *options) in METHODS.items():
        positional = ["digits", checkpoint, 0.25, folder / method]
        succeed(command, *positional, "--device", "cpu", *EXAMPLES, *options)
    return {method: folder / method for method in METHODS}


@pytest.fixture
def start(checkpoint, workplace, capsys) -> Callable:
    """Run a method on the shared classifier into log.tsv; options given later win."""

    def run(method: str, *options: object):
        command, *usual = METHODS[method]
        positional = ["digits", checkpoint, 0.25, "log.tsv"]
        return call(capsys, command, *positional, "--device", "cpu", *EXAMPLES, *usual, *options)

    return run


@pytest.fixture
def merge(workplace, capsys) -> Callable:
    return lambda *options, command="certify": call(capsys, command, "merge", "log.tsv", *options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", [(0,), (2, 0, 1)], ids=str)
def test_shards_in_any_order_merge_into_the_log_of_one_process(
    start, merge, workplace, whole, method, order
):
    command = METHODS[method][0]
    for index in order:
        outcome = start(method, "--shard", f"{index}/{len(order)}")
        assert outcome.code == 0 and outcome.err == ""
        assert f"python code/{command}.py merge log.tsv" in outcome.out, "what to do next"
    outcome = merge(command=command)
    assert (
        outcome.code == 0
        and f"20 examples from {len(order)} shards" in outcome.out
        and outcome.err == ""
    )
    assert_same(workplace / "log.tsv", whole[method])
    runs = manifest_of(workplace / "log.tsv")["runs"]
    assert [run["shard"] for run in runs] == sorted(order) and all(
        "--shard" in run["command"] for run in runs
    )


def test_merged_log_is_continued_by_the_plain_command(start, merge, workplace, whole):
    """After the shards are removed, as the message of merging suggests, it is a log like any
    other.
    """
    start("exact", "--max", 15, "--shard", "0/1")
    assert "can be removed" in merge().out
    for path in (workplace / "log.tsv.shards").iterdir():
        path.unlink()
    (workplace / "log.tsv.shards").rmdir()
    before = (workplace / "log.tsv").read_bytes()
    assert start("exact").code == 0
    assert (workplace / "log.tsv").read_bytes().startswith(before)
    assert_same(workplace / "log.tsv", whole["exact"])


@pytest.mark.parametrize(("method", "keep"), [("exact", 0), ("predict", 2)])
def test_interrupted_shard_is_continued_by_the_same_command(
    start, merge, workplace, whole, method, keep
):
    for index in (0, 1, 2):
        start(method, "--shard", f"{index}/3")
    part = workplace / "log.tsv.shards" / "1-of-3.tsv"
    finished = part.read_bytes()
    left = b"".join(finished.splitlines(keepends=True)[: 1 + keep])
    part.write_bytes(left + b"16\t4\t")
    assert refused(merge(command=METHODS[method][0]), "torn", "--shard 1/3")
    part.write_bytes(left)
    assert refused(merge(command=METHODS[method][0]), f"{keep} rows of 7", "--shard 1/3")
    assert start(method, "--shard", "1/3").code == 0
    assert part.read_bytes().startswith(left)
    assert merge(command=METHODS[method][0]).code == 0
    assert_same(workplace / "log.tsv", whole[method])


def test_finished_shard_is_left_alone_by_the_same_command(start, workplace):
    start("exact", "--shard", "1/3")
    before = snapshot(workplace)
    outcome = start("exact", "--shard", "1/3")
    assert outcome.code == 0 and "shard 1/3 is done" in outcome.out
    assert snapshot(workplace) == before


def test_more_shards_than_examples_do(start, merge, workplace, whole):
    for index in range(3):
        assert start("exact", "--max", 2, "--shard", f"{index}/3").code == 0
    assert rows(workplace / "log.tsv.shards/2-of-3.tsv") == []
    assert merge().code == 0
    assert timeless(workplace / "log.tsv") == timeless(whole["exact"])[:2]


def test_one_process_and_shards_do_not_mix(start, merge, workplace):
    start("exact", "--shard", "0/2")
    before = snapshot(workplace)
    assert refused(start("exact"), "log.tsv.shards", "1 shards", "merge", "remove that folder")
    assert refused(start("exact", "--overwrite"), "log.tsv.shards")
    assert refused(merge(), "of 2 shards 1 are missing, 1;", "--shard 1/2")
    assert snapshot(workplace) == before


def test_shards_are_refused_where_the_log_exists(start, workplace):
    start("exact", "--max", 2)
    before = snapshot(workplace)
    assert refused(start("exact", "--shard", "0/2"), "log.tsv exists already", "without shards")
    assert snapshot(workplace) == before


def test_merging_needs_shards_and_does_not_replace_a_log_unasked(start, merge, workplace, whole):
    assert refused(merge(), "log.tsv.shards", "--shard K/N")
    assert list(workplace.iterdir()) == []
    start("exact", "--shard", "0/1")
    (workplace / "log.tsv").write_text("idx\tlabel\n")
    assert refused(merge(), "log.tsv exists already", "--overwrite")
    assert (workplace / "log.tsv").read_text() == "idx\tlabel\n"
    for held in ("log.tsv", "log.tsv.tmp"):
        with (workplace / held).open("ab") as file:
            lock(file, Path(held))
            assert refused(merge("--overwrite"), "log.tsv is being written by another process")
    assert merge("--overwrite").code == 0 and not (workplace / "log.tsv.tmp").exists()
    assert_same(workplace / "log.tsv", whole["exact"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (["--seed", 1], "seed was 0, now 1"),
        (["--max", 19], "shard.examples was [0, 20, 1], now [0, 19, 1]"),
        (["--method", "adaptive"], "method was 'exact', now 'adaptive'"),
    ],
)
def test_shards_of_other_settings_are_not_merged(start, merge, workplace, change, field):
    start("exact", "--shard", "0/2")
    assert refused(start("exact", "--shard", "1/2", *change), field, "0-of-2.tsv"), (
        "before any work is done"
    )
    aside = workplace / "aside"
    (workplace / "log.tsv.shards").rename(aside)  # as on another machine
    assert start("exact", "--shard", "1/2", *change).code == 0, "nobody can know yet"
    for path in aside.iterdir():
        path.rename(workplace / "log.tsv.shards" / path.name)
    before = snapshot(workplace)
    assert refused(merge(), field, "0-of-2.tsv", "1-of-2.tsv")
    assert snapshot(workplace) == before
    assert refused(start("exact", "--shard", "1/2"), "-of-2.tsv", field.split()[0]), "nor continued"
    assert start("exact", "--shard", "1/2", "--overwrite").code == 0
    assert merge().code == 0


def test_shard_takes_over_the_batch_of_those_that_are_there(start, merge, workplace):
    start("exact", "--shard", "0/2", "--batch", 50)
    start("exact", "--shard", "1/2")
    assert merge().code == 0 and manifest_of(workplace / "log.tsv")["settings"]["batch"] == 50
