"""Shards: every example is in exactly one; merging joins them in order, or names the fault and
writes nothing.
"""

import argparse
import json
import re
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smoothadv.cli.options.smoothing import shard
from smoothadv.evaluation import shards
from smoothadv.evaluation.shards import Shard, merge, shard_count, shards_of
from smoothadv.records.logs import ExampleLog, manifest_path
from support import refusals
from support.commands import snapshot

COLUMNS = ("idx", "label", "time")
SETTINGS = {"sigma": 0.25, "N": 1000, "batch": 200}


@pytest.mark.parametrize(
    "text, index, count",
    [("0/1", 0, 1), ("0/8", 0, 8), ("7/8", 7, 8), ("999999998/999999999", 999999998, 999999999)],
)
def test_shard_is_written_as_its_number_and_how_many_there_are(text, index, count):
    assert shard(text) == Shard(index, count)
    assert str(shard(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "/",
        "1/",
        "/2",
        "2/2",
        "8/4",
        "0/0",
        "-1/4",
        "1/-4",
        "1.0/4",
        "1/4/2",
        " 1/4",
        "1/4\n",
        "a/b",
        "1:4",
    ]
    + ["0/9999999999"],
)
def test_anything_else_is_refused_with_the_way_to_write_it(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        shard(text)
    assert (
        f"'{text}'" in str(error.value) and "K/N" in str(error.value) and "0/8" in str(error.value)
    )


selections = st.builds(range, st.just(0), st.integers(0, 400), st.integers(1, 50))


@given(selections, st.integers(1, 60))
def test_every_example_is_in_exactly_one_shard_whose_record_says_so(examples, count):
    shares = [Shard(index, count).of(examples) for index in range(count)]
    assert sorted(index for share in shares for index in share) == list(examples)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1, "nobody has more than a fair share"
    for index, share in enumerate(shares):
        record = json.loads(json.dumps(Shard(index, count).record(examples)))
        again = Shard(record["index"], record["count"]).of(range(*record["examples"]))
        assert list(again) == list(share)


@given(st.integers(0, 10**7))
def test_there_is_a_shard_for_every_eight_examples_up_to_256(examples):
    count = shard_count(examples)
    assert 1 <= count <= 256
    assert 8 * count >= examples or count == 256
    assert 8 * (count - 1) < max(1, examples)


def test_shards_are_found_in_their_numerical_order(tmp_path):
    log = tmp_path / "log.tsv"
    assert shards_of(log) == []
    for index in (11, 2, 0, 10, 1, 9, 3, 8, 4, 7, 5, 6):
        path = Shard(index, 12).path(log)
        path.parent.mkdir(exist_ok=True)
        path.touch()
        manifest_path(path).touch()
    found = shards_of(log)
    assert found == [Shard(index, 12).path(log) for index in range(12)]
    assert found == sorted(found), (
        "names are padded, so that other tools sort them in the same order"
    )
    assert {path.parent.parent for path in found} == {tmp_path}


def write_shard(
    log: Path,
    index: int,
    count: int = 3,
    examples: range = range(0, 35, 5),
    rows: list[int] | None = None,
    columns: tuple[str, ...] = COLUMNS,
    **changed: object,
) -> Path:
    """A finished shard of ``log``, or one with these ``rows``; ``changed`` are settings that
    differ.
    """
    part = Shard(index, count)
    record = {**SETTINGS, **changed, "shard": part.record(examples)}
    path = part.path(log)
    with closing(
        ExampleLog(path, columns, record, {"device": f"device {index}"}, "overwrite")
    ) as written:
        for idx in part.of(examples) if rows is None else rows:
            written.append({"idx": idx, "label": idx % 10, "time": f"0:00:0{index}", "more": 1})
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of the examples 0, 5, ... 30, in three finished shards."""
    path = tmp_path / "logs" / "log.tsv"
    for index in range(3):
        write_shard(path, index)
    return path


WHOLE = "idx\tlabel\ttime\n" + "".join(f"{5 * k}\t{5 * k % 10}\t0:00:0{k % 3}\n" for k in range(7))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_merged_log_has_all_rows_in_order_and_can_be_resumed(log, order):
    """Its manifest has the common settings and every run; the shards are left where they are."""
    before = snapshot(log.with_name("log.tsv.shards"))
    assert merge(log, [shards_of(log)[index] for index in order]) == 7 and log.read_text() == WHOLE
    assert snapshot(log.with_name("log.tsv.shards")) == before
    manifest = json.loads(manifest_path(log).read_text())
    assert manifest["settings"] == SETTINGS
    assert manifest["runs"] == [
        {"shard": k, "first_row": 0, "device": f"device {k}"} for k in order
    ]
    with closing(ExampleLog(log, COLUMNS, SETTINGS, {}, "resume")) as whole:
        assert whole.done == set(range(0, 35, 5))
    assert log.read_text() == WHOLE


def test_shards_may_lie_anywhere_and_the_folder_of_the_log_is_made(log, tmp_path):
    elsewhere = tmp_path / "new" / "place" / "log.tsv"
    assert merge(elsewhere, shards_of(log)) == 7
    assert elsewhere.read_text() == WHOLE


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("file", ["write_text", "write_json"])
def test_merging_that_is_killed_can_be_done_again(log, monkeypatch, file, written, overwrite):
    """Killed at any point, merging must leave no log without its manifest, or with another
    log's.
    """
    if overwrite:
        with closing(ExampleLog(log, COLUMNS, {**SETTINGS, "sigma": 1.0}, {})) as other:
            other.append({"idx": 1, "label": 1, "time": "0:00:09"})
    write = getattr(shards, file)

    def killed(*arguments: object) -> None:
        if written:
            write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, file, killed)
        merge(log, shards_of(log), overwrite)
    if overwrite or not is_whole(log):
        merge(log, shards_of(log), overwrite)
    assert is_whole(log)


def is_whole(log: Path) -> bool:
    """Whether a log and its manifest are those of the merged shards."""
    if not log.exists() or log.read_text() != WHOLE or not manifest_path(log).exists():
        return False
    return json.loads(manifest_path(log).read_text())["settings"] == SETTINGS


def refusal(log: Path, shards: list[Path] | None = None, overwrite: bool = False) -> str:
    """The message with which merging is refused. Nothing is written or removed."""
    before = snapshot(log.parent)
    message = refusals.refusal(merge, log, shards_of(log) if shards is None else shards, overwrite)
    assert snapshot(log.parent) == before
    return message


def test_shard_that_was_named_but_is_not_there_is_named(log, tmp_path):
    message = refusal(log, [*shards_of(log)[:2], tmp_path / "gone.tsv"])
    assert str(tmp_path / "gone.tsv") in message and "not exist" in message
    assert str(tmp_path) in refusal(log, [*shards_of(log)[:2], tmp_path]), "a folder is no shard"


@pytest.mark.parametrize("missing", [[0], [1], [2], [0, 2]])
def test_gap_is_refused_with_the_shards_to_make(log, missing):
    for index in missing:
        Shard(index, 3).path(log).unlink()
    message = refusal(log)
    assert f"of 3 shards {len(missing)} are missing, {', '.join(map(str, missing))};" in message
    assert f"--shard {missing[0]}/3" in message


def test_many_missing_shards_are_not_all_listed(tmp_path):
    write_shard(tmp_path / "log.tsv", 3, 40, range(80))
    message = refusal(tmp_path / "log.tsv")
    assert (
        "of 40 shards 39 are missing, 0, 1, 2, 4, 5, 6, 7, 8, ..." in message and len(message) < 200
    )


def test_the_same_shard_twice_is_refused_with_both_places(log, tmp_path):
    copy = write_shard(tmp_path / "copy" / "log.tsv", 1)
    message = refusal(log, [*shards_of(log), copy])
    assert (
        str(copy) in message and str(shards_of(log)[1]) in message and "both are shard 1" in message
    )
    assert "both are shard 1" in refusal(log, [*shards_of(log)[:2], copy]), (
        "also where another one is missing"
    )


DAMAGES = {
    "a row less": (lambda lines: lines[:-1], "2 rows of 3"),
    "no rows": (lambda lines: lines[:1], "0 rows of 3"),
    "empty file": (lambda lines: [], "0 rows of 3"),
    "row without its end": (lambda lines: [*lines[:-1], lines[-1][:-1]], "torn"),
    "torn row": (lambda lines: [*lines[:-1], lines[-1][:4]], "torn"),
    "row of another shard": (lambda lines: [*lines, "5\t5\t0:00:00\n"], "4 rows of 3"),
    "row twice": (lambda lines: [*lines, lines[-1]], "4 rows of 3"),
    "row of another shard in place of one": (
        lambda lines: [*lines[:-1], "5\t5\t0:00:00\n"],
        "example 5 does not belong",
    ),
    "row of no shard in place of one": (
        lambda lines: [*lines[:-1], "16\t6\t0:00:00\n"],
        "example 16 does not belong",
    ),
    "row twice in place of one": (lambda lines: [*lines[:-1], lines[-2]], ""),
    "text in place of a row": (lambda lines: [*lines[:-1], "what is this?\n"], ""),
    "blank line": (lambda lines: [*lines, "\n"], ""),
}


@pytest.mark.parametrize("damage, words", DAMAGES.values(), ids=DAMAGES)
def test_shard_without_exactly_its_rows_is_refused_with_the_way_to_finish_it(log, damage, words):
    path = shards_of(log)[0]
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    message = refusal(log)
    assert str(path) in message and words in message and "--shard 0/3" in message


@pytest.mark.parametrize(
    "change, words",
    [
        ({"sigma": 0.5}, "sigma was 0.25, now 0.5"),
        ({"N": 2000}, "N was 1000, now 2000"),
        ({"seed": 7}, "seed was None, now 7"),
        ({"radii": [0.0, 0.5]}, "radii was None, now [0.0, 0.5]"),
        ({"count": 4}, "shard.count was 3, now 4"),
        ({"examples": range(7)}, "shard.examples was [0, 35, 5], now [0, 7, 1]"),
    ],
)
def test_mixed_settings_are_refused_naming_the_field(log, tmp_path, change, words):
    other = write_shard(tmp_path / "other" / "log.tsv", 2, **change)
    message = refusal(log, [*shards_of(log)[:2], other])
    assert words in message and str(other) in message and str(shards_of(log)[0]) in message


def test_other_columns_are_refused(log):
    write_shard(log, 2, columns=(*COLUMNS, "more"))
    message = refusal(log)
    assert "columns" in message and "more" in message and str(shards_of(log)[2]) in message


@pytest.mark.parametrize("record", ["absent", None, 3, [], {"index": 0}, {"index": 0, "count": 3}])
def test_log_whose_manifest_does_not_say_which_shard_it_is_is_refused(log, record):
    """Such as a log that is no shard."""
    settings = SETTINGS if record == "absent" else {**SETTINGS, "shard": record}
    manifest_path(shards_of(log)[2]).write_text(json.dumps({"settings": settings, "runs": []}))
    assert re.search("no shard|says that shard is", refusal(log))


@pytest.mark.parametrize(
    "content", [None, "", '{"settings": {"sig', "[]", "{}", '{"settings": 1, "runs": []}']
)
def test_shard_without_a_readable_manifest_is_refused(log, content):
    manifest = manifest_path(shards_of(log)[1])
    manifest.unlink() if content is None else manifest.write_text(content)
    message = refusal(log)
    assert str(manifest) in message and "missing or unreadable" in message


@pytest.mark.parametrize("name", ["backup-0-of-3.tsv", "-of-.tsv", "copy-of-log.tsv"])
def test_other_files_beside_the_shards_are_no_shards(log, name):
    (shards_of(log)[0].parent / name).write_text(WHOLE)
    assert [path.name for path in shards_of(log)] == ["0-of-3.tsv", "1-of-3.tsv", "2-of-3.tsv"]


def test_no_other_file_is_replaced_by_a_merged_log(log):
    """For example a checkpoint that was named by mistake."""
    log.write_bytes(b"PK\x03\x04 weights")
    assert "no log" in refusal(log, overwrite=True)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 12), st.randoms(use_true_random=False))
@example(2, 1, 3, Random(0))
@example(300, 1, 1, Random(0))
@example(300, 1, 256, Random(0))
def test_merging_undoes_sharding(tmp_path_factory, examples, step, count, random):
    """Whatever the selection, the number of shards and the order in which they are named."""
    selection, log = range(0, examples, step), tmp_path_factory.mktemp("merge") / "log.tsv"
    shards = [write_shard(log, index, count, selection) for index in range(count)]
    random.shuffle(shards)
    assert merge(log, shards) == len(selection)
    assert [int(line.split("\t")[0]) for line in log.read_text().splitlines()[1:]] == list(
        selection
    )
