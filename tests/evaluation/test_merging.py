"""Shards: every example is in exactly one. Merging joins finished ones in order, or names the fault
and writes nothing; gathering takes what there is.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothadv.base.files import lock
from smoothadv.evaluation.shards import Shard, gather, merge
from smoothadv.records.logs import examples_path, manifest_path, shards_of
from smoothadv.records.writer import finish_images
from support import refusals
from support.commands import snapshot
from support.logs_of_attacks import (
    RUN,
    SETTINGS,
    SHAPE,
    assert_images,
    line_of,
    open_log,
    text_of,
    write_rows,
)


@given(st.integers(0, 400), st.integers(1, 50), st.integers(1, 60))
def test_every_example_is_in_exactly_one_shard_whose_record_says_so(images, step, count):
    examples = range(0, images, step)
    shares = [Shard(index, count).of(examples) for index in range(count)]
    assert sorted(index for share in shares for index in share) == list(examples)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1, "nobody has more than a fair share"
    for index, share in enumerate(shares):
        record = json.loads(json.dumps(Shard(index, count).record(examples)))
        again = Shard(record["index"], record["count"]).of(range(*record["examples"]))
        assert list(again) == list(share)


def write_shard(log: Path, index: int, count: int = 3, examples=range(0, 35, 5), **changed) -> Path:
    """A finished shard of a log without images; ``changed`` are settings that differ."""
    shard = Shard(index, count)
    settings = {"sigma": 0.25, "N": 1000, **changed, "shard": shard.record(examples)}
    run = {**RUN, "device": f"device {index}"}
    arguments = {"settings": settings, "image_shape": None, "run": run}
    write_rows(shard.path(log), shard.of(examples), "overwrite", **arguments)
    return shard.path(log)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """The examples 0, 5, ... 30 in three finished shards of LOG."""
    return [write_shard(tmp_path / "logs" / "log.tsv", index) for index in range(3)]


def log_of(shards: list[Path]) -> Path:
    return shards[0].parents[1] / "log.tsv"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_merged_log_has_all_rows_in_order_and_can_be_resumed(shards, tmp_path, order):
    """The shards stay where they are, which may be anywhere."""
    before, log = snapshot(shards[0].parent), tmp_path / "new" / "place" / "log.tsv"
    assert merge(log, [shards[index] for index in order]) == 7
    assert log.read_text() == text_of(range(0, 35, 5)) and snapshot(shards[0].parent) == before
    runs = json.loads(manifest_path(log).read_text())["runs"]
    assert [(run["shard"], run["first_row"], run["device"]) for run in runs] == [
        (index, 0, f"device {index}") for index in order
    ]
    with open_log(log, settings={"sigma": 0.25, "N": 1000}, image_shape=None) as whole:
        assert whole.rows.keys() == set(range(0, 35, 5))


def merge_refusal(shards: list[Path]) -> str:
    """The message with which merging is refused. Nothing is written or removed."""
    log = log_of(shards)
    before = snapshot(log.parent)
    message = refusals.refusal(merge, log, shards, True)
    assert snapshot(log.parent) == before
    return message


def test_shard_that_was_named_but_is_not_there_is_named(shards, tmp_path):
    for path, word in ((tmp_path / "gone.tsv", "does not exist"), (tmp_path, "missing")):
        message = merge_refusal([*shards[:2], path])
        assert str(path) in message and word in message


@pytest.mark.parametrize("kept, absent", [((1, 2), "0"), ((0, 1), "2"), ((1,), "0, 2")])
def test_gap_is_refused_with_the_shards_to_make(shards, kept, absent):
    message = merge_refusal([shards[index] for index in kept])
    assert f"of 7, and shards {absent} lack some" in message and f"--shard {absent[0]}/3" in message


DAMAGES = {
    "a row less": (lambda lines: lines[:-1], "--shard 0/3"),
    "no rows": (lambda lines: lines[:1], "--shard 0/3"),
    "torn row": (lambda lines: [*lines[:-1], lines[-1][:4]], "--shard 0/3"),
    "row without its end": (lambda lines: [*lines[:-1], lines[-1][:-1]], "--shard 0/3"),
    "row of another shard": (lambda lines: [*lines, line_of(5) + "\n"], "example 5 is in"),
    "row of no shard": (lambda lines: [*lines, line_of(16) + "\n"], "example 16 does not belong"),
    "row twice": (lambda lines: [*lines, lines[-1]], "line 5 is no row"),
    "text in place of a row": (lambda lines: [*lines[:-1], "what is this?\n"], "line 4 is no row"),
    "blank line": (lambda lines: [*lines, "\n"], "line 5 is no row"),
}


@pytest.mark.parametrize("damage, words", DAMAGES.values(), ids=DAMAGES)
def test_shard_without_exactly_its_rows_is_refused(shards, damage, words):
    shards[0].write_text("".join(damage(shards[0].read_text().splitlines(keepends=True))))
    assert words in merge_refusal(shards)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"index": 1}, "example 5 is in"),
        ({"sigma": 0.5}, "sigma was 0.5, now 0.25"),
        ({"seed": 7}, "seed was 7, now None"),
        ({"radii": [0.0, 0.5]}, "radii was [0.0, 0.5], now None"),
        ({"count": 4}, "shard.count was 4, now 3"),
        ({"examples": range(7)}, "shard.examples was [0, 7, 1], now [0, 35, 5]"),
    ],
)
def test_mixed_settings_and_one_shard_twice_are_refused_with_both_places(
    shards, tmp_path, change, words
):
    other = write_shard(tmp_path / "other" / "log.tsv", **{"index": 2, **change})
    message = merge_refusal([*shards[:2], other])
    assert words in message and str(other) in message
    assert str(shards[1 if "index" in change else 0]) in message


def test_other_columns_are_refused(shards):
    shards[2].write_text(shards[2].read_text().replace("predict", "guess"))
    message = merge_refusal(shards)
    assert "columns" in message and "guess" in message and str(shards[2]) in message


@pytest.mark.parametrize("record", ["absent", None, 3, [], {"index": 0}, {"index": 0, "count": 3}])
def test_log_whose_manifest_does_not_say_which_shard_it_is_is_refused(shards, record):
    settings = {} if record == "absent" else {"shard": record}
    manifest_path(shards[2]).write_text(json.dumps({"settings": settings, "runs": []}))
    message = merge_refusal(shards)
    assert "no shard" in message or "says that shard is" in message


@pytest.mark.parametrize("content", [None, "", '{"settings": {"sig', "[]", "{}"])
def test_shard_without_a_readable_manifest_is_refused(shards, content):
    manifest = manifest_path(shards[1])
    manifest.unlink() if content is None else manifest.write_text(content)
    message = merge_refusal(shards)
    assert str(manifest) in message and "missing or unreadable" in message


def test_shards_are_found_in_their_numerical_order_and_nothing_else(tmp_path):
    log = tmp_path / "log.tsv"
    assert shards_of(log) == []
    expected = [Shard(index, 12).path(log) for index in range(12)]
    expected[0].parent.mkdir()
    others = [expected[0].with_name(name) for name in ("backup-0-of-3.tsv", "-of-.tsv", "0-of-1")]
    for path in [*expected[::-1], *others, *map(manifest_path, expected)]:
        path.touch()
    assert shards_of(log) == expected == sorted(expected)


def test_no_other_file_is_replaced_by_a_merged_log(shards):
    log_of(shards).write_bytes(b"PK\x03\x04 weights")
    assert "no log" in merge_refusal(shards)


def test_gathering_refuses_other_settings_and_a_shard_that_is_being_written(shards):
    log, before = log_of(shards), snapshot(log_of(shards).parent)
    message = refusals.refusal(gather, log, {"sigma": 0.5, "N": 1000})
    assert "sigma was 0.25, now 0.5" in message and "--overwrite" in message
    with shards[1].open("rb") as file:
        lock(file, shards[1])
        refusals.refusal(gather, log, {"sigma": 0.25, "N": 1000}, names=shards[1])
    assert snapshot(log.parent) == before
    gather(log, {"sigma": 0.25, "N": 1000})
    assert log.read_text() == text_of(range(0, 35, 5)) and not shards[0].parent.exists()


def test_processes_that_left_no_row_leave_no_log(tmp_path):
    log = tmp_path / "log.tsv"
    Shard(0, 2).path(log).parent.mkdir()
    Shard(0, 2).path(log).touch()
    gather(log, SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_images_that_lie_in_another_order_are_found_again(tmp_path):
    """As those of an attack that was killed while shards were gathered."""
    log = tmp_path / "log.tsv"
    write_rows(log, [3, 1, 2])
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([lines[0], lines[3]]))
    write_rows(log, [2, 0])
    finish_images(log, SHAPE)
    with np.load(examples_path(log)) as arrays:
        assert_images(dict(arrays), [0, 2])
