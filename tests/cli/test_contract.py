"""Every evaluation ends with the log and the images of an undisturbed process: stopped anywhere,
killed, in shards, or shared out by torchrun among any number of processes.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from smoothadv.base.errors import counted
from smoothadv.base.files import lock
from support.commands import (
    call,
    manifest_of,
    refused,
    rows,
    script,
    snapshot,
    succeed,
    wait_until,
)
from support.evaluations import EVALUATIONS, IMAGES, arguments_of, assert_equal, stop_at_pass
from support.torchrun import agent, store_of_agent, torchrun

pytestmark = pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")
LOGS = {kind: log for kind, (_, _, log) in EVALUATIONS.items()}


@pytest.fixture(scope="module")
def certified(checkpoint, tmp_path_factory) -> Path:
    """The log whose certificates are attacked."""
    log = tmp_path_factory.mktemp("certified") / "log.tsv"
    options = ["--N", 100, "--max", IMAGES, "--device", "cpu"]
    succeed("certify", "digits", checkpoint, 0.25, log, *options)
    return log


@pytest.fixture(scope="module")
def whole(checkpoint, certified, tmp_path_factory) -> Callable[[str], Path]:
    """The folder that one undisturbed process makes, by the kind of evaluation."""
    folders: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folders[kind])
                succeed(EVALUATIONS[kind][0], *arguments_of(kind, checkpoint, certified))
        return folders[kind]

    return make


@pytest.fixture
def start(checkpoint, certified, workplace, capsys) -> Callable:
    """Run an evaluation in this process; options given later win."""
    return lambda kind, *options: call(
        capsys, EVALUATIONS[kind][0], *arguments_of(kind, checkpoint, certified, *options)
    )


@pytest.fixture
def command(checkpoint, certified) -> Callable[..., list[str]]:
    """The command line of an evaluation."""

    return lambda kind, *options: script(
        EVALUATIONS[kind][0], *arguments_of(kind, checkpoint, certified, *options)
    )


def remove_shards(log: Path) -> None:
    """As merging suggests."""
    for path in log.with_name(f"{log.name}.shards").iterdir():
        path.unlink()


@pytest.fixture
def merge(workplace, capsys) -> Callable:
    """Merge the shards of an evaluation."""

    return lambda kind, *options: call(capsys, EVALUATIONS[kind][0], "merge", LOGS[kind], *options)


def rows_in(folder: Path, kind: str) -> int:
    """The whole rows of a log and of its shards."""
    log = folder / LOGS[kind]
    paths = [log, *log.with_name(f"{log.name}.shards").glob("*.tsv")]
    counts = [path.read_bytes().count(b"\n") - 1 for path in paths if path.exists()]
    return sum(max(0, count) for count in counts)


# Stopped


@pytest.mark.parametrize("kind", ["exact", "adaptive", "predict", "restarts", "falsify", "sets"])
def test_interrupted_at_any_pass_it_is_continued_by_the_same_command(
    start, workplace, whole, monkeypatch, kind
):
    """Stopped later each time, then left alone: no finished row is computed again."""
    kept: list[bytes] = []
    log = workplace / LOGS[kind]
    for number in (2, 11, 40, 400):
        with monkeypatch.context() as patch:
            stop_at_pass(patch, number, KeyboardInterrupt())
            outcome = start(kind)
        if outcome.code == 0:
            break
        assert outcome.code == 130 and "run the same command again" in outcome.err
        lines = log.read_bytes() if log.exists() else b""
        assert not kept or lines.startswith(kept[-1])
        kept.append(lines)
    assert outcome.code == 0 and len(kept) >= 2 and kept[-1].count(b"\n") > 1
    assert_equal(workplace, whole(kind), kind)


@pytest.mark.parametrize("kind", ["exact", "restarts", "sets"])
def test_killed_at_random_it_is_finished_by_the_same_command(
    start, command, warm, workplace, whole, kind
):
    """Half of the time the power fails as well and leaves half a row or image."""
    moments = random.Random(kind)
    for row in (1, 11):
        process = warm.start(command(kind), workplace)
        try:
            wait_until(lambda row=row: rows_in(workplace, kind) >= row, process)
            time.sleep(moments.uniform(0, 0.03))
        finally:
            process.kill()
        process.communicate()
        log = workplace / LOGS[kind]
        for path in (log, log.with_name(f"{log.name}.examples")):
            if path.exists() and process.returncode and moments.random() < 0.5:
                with path.open("ab") as file:
                    file.write(b"20\t8\t8\t0\t"[: moments.randrange(1, 9)])
    assert start(kind).code == 0
    assert_equal(workplace, whole(kind), kind)


# Shards


@pytest.mark.parametrize(
    "kind, order",
    [
        *(("exact", (0,)), ("exact", (2, 0, 1))),
        *((kind, (1, 0)) for kind in ("named", "predict", "attack", "falsify", "sets")),
    ],
)
def test_shards_in_any_order_merge_into_the_log_of_one_process(
    start, merge, workplace, whole, kind, order
):
    for index in order:
        outcome = start(kind, "--shard", f"{index}/{len(order)}")
        assert (outcome.code, outcome.err) == (0, "")
        assert f"merge {LOGS[kind]}" in outcome.out, "what to do next"
    if len(order) > 1:
        assert refused(start(kind), ".shards", "merge", "remove that folder")
    outcome = merge(kind)
    assert (outcome.code, outcome.err) == (
        0,
        "",
    ) and f"from {counted(len(order), 'shard')}" in outcome.out
    assert [run["shard"] for run in manifest_of(workplace / LOGS[kind])["runs"]] == sorted(order)
    before = snapshot(workplace)
    assert start(kind).code == 0 and snapshot(workplace) == before, "the summary"
    remove_shards(workplace / LOGS[kind])
    assert_equal(workplace, whole(kind), kind)


@pytest.mark.parametrize(("kind", "keep"), [("exact", 0), ("attack", 3)])
def test_unfinished_shard_is_refused_and_continued_by_the_same_command(
    start, merge, workplace, whole, kind, keep
):
    for index in (0, 1):
        start(kind, "--shard", f"{index}/2")
    log = workplace / LOGS[kind]
    part = log.with_name(f"{log.name}.shards") / "1-of-2.tsv"
    left = b"".join(part.read_bytes().splitlines(keepends=True)[: 1 + keep])
    part.write_bytes(left + b"16\t4\t")
    assert refused(merge(kind), f"{11 + keep} rows of 21", "shards 1 lack", "--shard 1/2")
    assert start(kind, "--shard", "1/2").code == 0
    assert part.read_bytes().startswith(left)
    finished = snapshot(workplace)
    outcome = start(kind, "--shard", "1/2")
    assert outcome.code == 0 and "shard 1/2 is done" in outcome.out
    assert snapshot(workplace) == finished
    assert merge(kind).code == 0
    remove_shards(log)
    assert_equal(workplace, whole(kind), kind)


def test_more_shards_than_examples_do_and_take_over_the_batch_of_the_first(start, merge, workplace):
    for index, batch in enumerate((["--batch", 50], [], [])):
        assert start("exact", "--max", 2, "--shard", f"{index}/3", *batch).code == 0
    assert rows(workplace / "log.tsv.shards/2-of-3.tsv") == []
    assert merge("exact").code == 0 and len(rows(workplace / "log.tsv")) == 2
    assert manifest_of(workplace / "log.tsv")["settings"]["batch"] == 50


def test_merging_needs_shards_and_does_not_replace_a_log_unasked(start, merge, workplace):
    assert refused(merge("exact"), "log.tsv.shards", "--shard K/N")
    assert list(workplace.iterdir()) == []
    start("exact", "--max", 2, "--shard", "0/1")
    (workplace / "log.tsv").write_text("idx\tlabel\n")
    assert refused(merge("exact"), "log.tsv exists already", "--overwrite")
    assert (workplace / "log.tsv").read_text() == "idx\tlabel\n"
    assert merge("exact", "--overwrite").code == 0


def test_shard_that_another_process_writes_is_not_removed(start, workplace):
    start("exact", "--max", 2)
    shard = workplace / "log.tsv.shards/0-of-2.tsv"
    shard.parent.mkdir()
    shard.write_bytes((workplace / "log.tsv").read_bytes().splitlines(keepends=True)[0])
    with shard.open("ab") as file:
        lock(file, shard)
        outcome = start("exact", "--max", 2, "--overwrite")
        assert refused(outcome, "is being written by another process")
    assert shard.exists() and len(rows(workplace / "log.tsv")) == 2
    assert start("exact", "--max", 2, "--overwrite").code == 0 and not shard.parent.exists()


def test_shard_of_other_settings_than_those_beside_it_is_refused_before_any_work(start):
    start("exact", "--max", 2, "--shard", "0/2", "--batch", 50)
    outcome = start("exact", "--max", 2, "--shard", "1/2", "--seed", 1)
    assert refused(outcome, "seed was 0, now 1", "0-of-2.tsv")


# torchrun


@pytest.mark.parametrize("kind", ["adaptive", "named", "falsify", "sets"])
def test_processes_write_the_log_of_one(command, warm, tmp_path, whole, kind):
    """As torchrun starts them; torchrun itself is at work below."""
    done = warm.run_workers(2, command(kind), tmp_path)
    assert [each.returncode for each in done] == [0, 0], done
    assert len([each for each in done if each.stdout]) == 1, "one of the processes sums up"
    runs = manifest_of(tmp_path / LOGS[kind])["runs"]
    assert {run["shard"] for run in runs} == {0, 1}
    assert_equal(tmp_path, whole(kind), kind)


HELD = """
import time
from pathlib import Path
from smoothadv.base.registry import Registry
from smoothadv.records.writer import LogWriter

append, rows = LogWriter.append, []

def held(log, *arguments):
    while len(rows) == 4 and Path("held").exists():
        time.sleep(0.01)
    rows.append(append(log, *arguments))

LogWriter.append = held
Registry("nothing").register("held")(held)
"""


def hold(folder: Path) -> list[object]:
    """Options with which a process waits after four rows, for as long as there is a file
    ``held``.
    """
    (folder / "held").touch()
    (folder / "held.py").write_text(HELD)
    return ["--plugin", "held.py"]


def release(folder: Path) -> None:
    for name in ("held", "held.py"):
        (folder / name).unlink(missing_ok=True)


def test_killed_processes_are_continued_by_another_number(start, command, warm, workplace, whole):
    """First one process begins, then two go on until they are killed, then three, which finish."""
    kind = "attack"
    start(kind, "--max", 2)
    begun = (workplace / LOGS[kind]).read_bytes().splitlines()
    with warm.workers(2, command(kind, *hold(workplace)), workplace) as workers:
        wait_until(lambda: rows_in(workplace, kind) == 2 + 4 + 4, workers[0])
    release(workplace)
    paths = workplace.rglob("*.tsv")
    kept = [line for path in paths for line in path.read_bytes().split(b"\n")[1:-1]]
    assert refused(start(kind), "shards of this log", "torchrun")
    done = warm.run_workers(3, command(kind), workplace)
    assert [each.returncode for each in done] == [0] * 3, done
    assert {*begun, *kept} <= {*(workplace / LOGS[kind]).read_bytes().splitlines()}
    assert_equal(workplace, whole(kind), kind)


def test_dry_run_under_torchrun_counts_shards_and_refuses_what_the_run_would(
    command, warm, workplace, start
):
    start("exact", "--shard", "0/2")
    before = snapshot(workplace)
    for each in warm.run_workers(2, command("exact", "--shard", "0/2"), workplace):
        assert each.returncode == 1 and "--shard" in each.stderr and "leave it out" in each.stderr
    (first, _) = warm.run_workers(2, command("exact", "--dry-run"), workplace)
    assert first.returncode == 0 and first.stdout.startswith("10 of 21 images"), first
    (first, _) = warm.run_workers(2, command("exact", "--seed", 1, "--dry-run"), workplace)
    assert first.returncode == 1 and "seed was 0, now 1" in first.stderr, first
    assert snapshot(workplace) == before


def test_torchrun_starts_anew_only_when_told(command, warm, workplace, start, whole):
    """With --overwrite, an old log and any number of old shards are replaced."""
    start("exact", "--seed", 1, "--max", 3)
    (first, _) = warm.run_workers(2, command("exact"), workplace)
    assert first.returncode == 1 and "seed was 1, now 0; --overwrite" in first.stderr
    for index, count in [(0, 1), (1, 3), (2, 5)]:
        path = workplace / f"log.tsv.shards/{index}-of-{count}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("idx\tlabel\n0\t1\n")
    done = warm.run_workers(2, command("exact", "--overwrite"), workplace)
    assert [each.returncode for each in done] == [0, 0], done
    before = snapshot(workplace)
    assert warm.run_workers(2, command("exact"), workplace)[0].returncode == 0
    said = [one.stdout for one in warm.run_workers(2, command("exact", "--dry-run"), workplace)]
    assert said == ["nothing is left to be done: log.tsv has 21 rows\n", ""]
    assert snapshot(workplace) == before, "a finished log is left alone"
    assert_equal(workplace, whole("exact"), "exact")


def test_killed_workers_are_started_again_by_torchrun(command, warm, tmp_path, whole):
    """Also with --overwrite, no finished row is computed again."""
    store, held = store_of_agent(), command("exact", "--overwrite", *hold(tmp_path))
    with warm.workers(2, held, tmp_path, **agent(store.port, 0)) as workers:
        wait_until(lambda: rows_in(tmp_path, "exact") == 8, workers[0])
    release(tmp_path)
    kept = [row for path in tmp_path.rglob("*.tsv") for row in path.read_bytes().splitlines()]
    done = warm.run_workers(2, command("exact", "--overwrite"), tmp_path, **agent(store.port, 1))
    assert [each.returncode for each in done] == [0, 0], done
    assert {*kept} <= {*(tmp_path / "log.tsv").read_bytes().splitlines()}
    assert_equal(tmp_path, whole("exact"), "exact")


def test_merged_shards_do_not_stand_in_the_way_of_a_log_that_is_overwritten(
    start, merge, workplace, whole
):
    """Its rows differ from theirs in their times."""
    kind = "attack"
    for index in range(2):
        assert start(kind, "--shard", f"{index}/2").code == 0
    assert merge(kind).code == 0
    assert start(kind, "--overwrite").code == 0
    assert start(kind).code == 0
    assert_equal(workplace, whole(kind), kind)


VARIES = """
import os
from smoothadv.base.registry import Registry
from smoothadv.evaluation import setup

setup.device_name = lambda device: f"device {os.environ['RANK']}"
Registry("nothing").register("varies")(setup.device_name)
"""


def test_processes_whose_rows_could_not_join_are_refused_before_any_work(command, warm, workplace):
    """By torchrun itself, which ends those that wait for the one that refuses."""
    Path("varies.py").write_text(VARIES)
    done = warm.run(torchrun(command("exact", "--plugin", "varies.py"), 2), workplace)
    assert done.returncode and "process 1 would write rows that cannot join" in done.stderr
    assert "device was 'device 0', now 'device 1'" in done.stderr
    assert not list(workplace.rglob("*.tsv"))


TWICE = """
import sys
import smoothadv

for n in (100, 120):
    smoothadv.certify(
        sys.argv[1], "digits", sigma=0.25, n=n, limit=4, log="log.tsv", device="cpu",
        existing="overwrite",
    )
"""


def test_a_program_of_torchrun_may_overwrite_a_log_twice(checkpoint, warm, workplace):
    Path("twice.py").write_text(TWICE)
    done = warm.run_workers(2, [script("certify")[0], "twice.py", str(checkpoint)], workplace)
    assert [each.returncode for each in done] == [0, 0], done
    assert manifest_of(Path("log.tsv"))["settings"]["N"] == 120 and len(rows(Path("log.tsv"))) == 4
