"""Under torchrun any number of processes, killed or not, write the log that one process would have
written.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import (
    call,
    refused,
    rows,
    run_process,
    script,
    snapshot,
    succeed,
    timeless,
    wait_until,
)
from support.patience import HANG_SECONDS
from support.sharding import EXAMPLES, METHODS, OneWorker, assert_same, manifest_of
from support.torchrun import launched, needs_proc, torchrun, workers_of


@pytest.fixture(scope="module")
def twenty(checkpoint, tmp_path_factory) -> Path:
    """The log of twenty examples that one process writes."""
    log = tmp_path_factory.mktemp("twenty") / "log.tsv"
    succeed(
        "certify",
        "digits",
        checkpoint,
        0.25,
        log,
        "--device",
        "cpu",
        *EXAMPLES,
        *METHODS["exact"][1:],
    )
    return log


@pytest.fixture
def start(checkpoint, workplace, capsys) -> Callable:
    """Certify those twenty examples into log.tsv; options given later win."""

    usual = [
        "digits",
        checkpoint,
        0.25,
        "log.tsv",
        "--device",
        "cpu",
        *EXAMPLES,
        *METHODS["exact"][1:],
    ]
    return lambda *options: call(capsys, "certify", *usual, *options)


def test_shard_of_ones_own_is_refused_under_torchrun(start, workplace, under_torchrun):
    assert refused(start("--shard", "0/2"), "--shard", "torchrun", "leave it out")
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize("rows_done", [0, 7])
def test_torchrun_finishes_what_one_process_began(start, workplace, twenty, monkeypatch, rows_done):
    """Also where torchrun finished the log but did not yet remove the shards."""
    start("--max", rows_done or 20)
    monkeypatch.setattr("smoothadv.evaluation.setup.join_workers", OneWorker)
    (workplace / "log.tsv.shards").mkdir()
    (workplace / "log.tsv.shards" / "0-of-1.tsv").write_bytes((workplace / "log.tsv").read_bytes())
    outcome = start()
    assert outcome.code == 0 and "20 examples" in outcome.out
    assert_same(workplace / "log.tsv", twenty)
    assert sorted(path.name for path in workplace.iterdir()) == ["log.tsv", "log.tsv.manifest.json"]


def test_torchrun_starts_anew_when_told(start, workplace, twenty, under_torchrun):
    """With --overwrite, an old log and any number of old shards are replaced."""
    (workplace / "log.tsv").write_text("idx\tlabel\n0\t1\n")
    for index, count in [(0, 1), (1, 3), (2, 5)]:
        path = workplace / f"log.tsv.shards/{index}-of-{count}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("idx\tlabel\n0\t1\n")
    assert start("--overwrite").code == 0
    assert_same(workplace / "log.tsv", twenty)
    assert sorted(path.name for path in workplace.iterdir()) == ["log.tsv", "log.tsv.manifest.json"]


@pytest.mark.parametrize(
    "before", [["--shard", "0/2"], ["--shard", "3/8"], ["--shard", "2/3", "--max", 19]], ids=str
)
def test_torchrun_refuses_shards_of_another_division_before_it_works(
    start, workplace, monkeypatch, before
):
    """Under torchrun twenty examples make three shards; the existing shards are of another
    division.
    """
    start(*before)
    monkeypatch.setattr("smoothadv.evaluation.setup.join_workers", OneWorker)
    left = snapshot(workplace)
    assert refused(start(), "log.tsv.shards")
    assert snapshot(workplace) == left


# Under torchrun the digits' 359 examples are 45 shards: forty examples are five.
FORTY = ["--skip", "9", "--device", "cpu"]
TORCHRUN = {"exact": ["--N", "1500"], "adaptive": ["--method", "adaptive", "--N", "2000"]}


def certification(
    checkpoint: Path, method: str, *options: object, log: str | Path = "log.tsv"
) -> list[str]:
    return script("certify", "digits", checkpoint, 0.25, log, *FORTY, *TORCHRUN[method], *options)


@pytest.fixture(scope="module")
def forty(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """The log that one process writes of those forty examples."""
    folder = tmp_path_factory.mktemp("forty")
    for method in TORCHRUN:
        succeed("certify", *certification(checkpoint, method, log=folder / method)[2:])
    return {method: folder / method for method in TORCHRUN}


HELD = """
import time
from pathlib import Path
from smoothadv.base.registry import Registry
from smoothadv.records.logs import ExampleLog

append, rows = ExampleLog.append, []

def held(log, row):
    while len(rows) == 9 and Path("held").exists():
        time.sleep(0.01)
    rows.append(append(log, row))

ExampleLog.append = held
Registry("nothing").register("held")(held)
"""


def held_certification(checkpoint: Path, method: str, folder: Path) -> list[str]:
    """A process of it waits after nine rows, a shard and one, for as long as there is a file
    ``held``.
    """
    (folder / "held").touch()
    (folder / "held.py").write_text(HELD)
    return certification(checkpoint, method, "--plugin", "held.py")


def rows_in_shards(folder: Path) -> int:
    return sum(
        max(0, path.read_bytes().count(b"\n") - 1) for path in folder.glob("log.tsv.shards/*.tsv")
    )


@pytest.mark.parametrize(
    ("processes", "method"),
    [
        (2, "exact"),
        (2, "adaptive"),
        *(pytest.param(count, "exact", marks=pytest.mark.slow) for count in (1, 3)),
    ],
)
def test_any_number_of_processes_writes_the_log_of_one(
    checkpoint, warm, tmp_path, forty, processes, method
):
    """Processes as torchrun starts them; torchrun itself is at work in the tests below."""
    done = warm.run_workers(processes, certification(checkpoint, method), tmp_path)
    assert [each.returncode for each in done] == [0] * processes, done
    assert "".join(each.stdout for each in done).count("40 examples") == 1, (
        "one of the processes sums up"
    )
    assert_same(tmp_path / "log.tsv", forty[method])
    assert {run["shard"] for run in manifest_of(tmp_path / "log.tsv")["runs"]} == {0, 1, 2, 3, 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.tsv", "log.tsv.manifest.json"]


@needs_proc
@pytest.mark.parametrize(
    ("start", "method", "before", "after", "row"),
    [
        ("warm", "exact", 2, 1, 13),
        pytest.param("cold", "adaptive", 1, 3, 6, marks=pytest.mark.slow),
        pytest.param("cold", "exact", 3, 1, 15, marks=pytest.mark.slow),
    ],
)
def test_killed_torchrun_is_continued_by_another_number_of_processes(
    checkpoint, warm, tmp_path, forty, start, method, before, after, row
):
    """All its processes at once, as when a machine fails. The warm ones are started without
    torchrun at first.
    """
    moments, command = random.Random(row), held_certification(checkpoint, method, tmp_path)

    def ready() -> bool:
        return rows_in_shards(tmp_path) >= row

    if start == "warm":
        with warm.workers(before, command, tmp_path) as workers:
            wait_until(ready, workers[0])
            time.sleep(moments.uniform(0, 0.05))
    else:
        with launched(torchrun(command, before), tmp_path, ready):
            time.sleep(moments.uniform(0, 0.05))
    assert not (tmp_path / "log.tsv").exists() and row <= rows_in_shards(tmp_path) <= 9 * before
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("log.tsv.shards/*.tsv")}
    done = warm.run(torchrun(certification(checkpoint, method), after), tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "log.tsv", forty[method])
    assert not (tmp_path / "log.tsv.shards").exists()
    whole = (tmp_path / "log.tsv").read_bytes()
    lines = itertools.chain.from_iterable(
        shard.splitlines(keepends=True)[:-1] for shard in kept.values()
    )
    assert all(line in whole for line in lines), "no finished row is computed again"


@needs_proc
@pytest.mark.slow
def test_killed_worker_is_started_again_by_torchrun(checkpoint, tmp_path, forty):
    """torchrun then starts all of them anew, which takes 15 seconds."""
    command = torchrun(held_certification(checkpoint, "exact", tmp_path), 2, restarts=1)
    with launched(command, tmp_path, lambda: rows_in_shards(tmp_path) >= 9) as launcher:
        os.kill(workers_of(launcher)[1], signal.SIGKILL)
        (tmp_path / "held").unlink()
        assert launcher.wait(timeout=HANG_SECONDS) == 0, (tmp_path / "output").read_text()
    assert_same(tmp_path / "log.tsv", forty["exact"])
    assert not (tmp_path / "log.tsv.shards").exists()


@pytest.mark.slow
def test_torchrun_leaves_a_finished_log_alone_and_replaces_it_when_told(
    checkpoint, tmp_path, forty
):
    """Three runs of 6 seconds."""
    for name in (forty["exact"], forty["exact"].with_name("exact.manifest.json")):
        (tmp_path / name.name.replace("exact", "log.tsv")).write_bytes(name.read_bytes())

    def started(*options: object) -> list[str]:
        return torchrun(certification(checkpoint, "exact", *options), 2)

    before = snapshot(tmp_path)
    assert run_process(started(), tmp_path).returncode == 0
    assert snapshot(tmp_path) == before
    refused = run_process(started("--seed", 7), tmp_path)
    assert refused.returncode == 1 and "seed was 0, now 7" in refused.stderr
    assert snapshot(tmp_path) == before
    anew = run_process(started("--seed", 7, "--overwrite"), tmp_path)
    assert anew.returncode == 0 and manifest_of(tmp_path / "log.tsv")["settings"]["seed"] == 7
    assert len(rows(tmp_path / "log.tsv")) == 40 and timeless(tmp_path / "log.tsv") != timeless(
        forty["exact"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.tsv", "log.tsv.manifest.json"]
