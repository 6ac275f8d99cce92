"""Under torchrun any number of processes, killed or not, write the log that one process would have written."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commands import CODE, ENVIRONMENT, call, rows, run_process, snapshot, succeed, timeless, wait_until
from support.patience import HANG_SECONDS
from support.sharding import EXAMPLES, METHODS, OneWorker, assert_same, manifest_of, refused


@pytest.fixture(scope="module")
def twenty(checkpoint, tmp_path_factory) -> Path:
    """The log of twenty examples that one process writes."""
    log = tmp_path_factory.mktemp("twenty") / "log.tsv"
    succeed("certify", "digits", checkpoint, 0.25, log, "--device", "cpu", *EXAMPLES, *METHODS["exact"][1:])
    return log


@pytest.fixture
def start(checkpoint, workplace, capsys) -> Callable:
    """Certify those twenty examples into log.tsv; options given later win."""

    def run(*options: object):
        usual = ["--device", "cpu", *EXAMPLES, *METHODS["exact"][1:]]
        return call(capsys, "certify", "digits", checkpoint, 0.25, "log.tsv", *usual, *options)

    return run


@pytest.fixture
def under_torchrun(monkeypatch) -> None:
    monkeypatch.setattr("smoothadv.evaluation.smoothing_job.join_workers", OneWorker)


def test_shard_of_ones_own_is_refused_under_torchrun(start, workplace, under_torchrun):
    assert refused(start("--shard", "0/2"), "--shard", "torchrun", "leave it out")
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize("rows_done", [0, 7])
def test_torchrun_finishes_what_one_process_began(start, workplace, twenty, monkeypatch, rows_done):
    """Also where torchrun finished the log but did not yet remove the shards."""
    start("--max", rows_done or 20)
    monkeypatch.setattr("smoothadv.evaluation.smoothing_job.join_workers", OneWorker)
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


@pytest.mark.parametrize("before", [["--shard", "0/2"], ["--shard", "3/8"], ["--shard", "2/3", "--max", 19]], ids=str)
def test_torchrun_refuses_shards_of_another_division_before_it_works(start, workplace, monkeypatch, before):
    """Under torchrun twenty examples make three shards; the existing shards are of another division."""
    start(*before)
    monkeypatch.setattr("smoothadv.evaluation.smoothing_job.join_workers", OneWorker)
    left = snapshot(workplace)
    assert refused(start(), "log.tsv.shards")
    assert snapshot(workplace) == left


# Under torchrun the digits' 359 examples are 45 shards: forty examples are five.
FORTY = ["digits", "checkpoint", "0.25", "log.tsv", "--skip", "9", "--device", "cpu"]
TORCHRUN = {"exact": ["--N", "1500"], "adaptive": ["--method", "adaptive", "--N", "4000"]}


def torchrun(checkpoint: Path, processes: int, options: list[str], restarts: int = 0) -> list[str]:
    """As `torchrun --nproc-per-node G code/certify.py ...`."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    certify = [str(CODE / "certify.py"), *(str(checkpoint) if word == "checkpoint" else word for word in FORTY)]
    return [*launch, f"--max-restarts={restarts}", *certify, *options]


@pytest.fixture(scope="module")
def forty(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """The log that one process writes of those forty examples."""
    folder = tmp_path_factory.mktemp("forty")
    for method, options in TORCHRUN.items():
        positional = ["digits", checkpoint, "0.25", folder / method]
        succeed("certify", *positional, *FORTY[4:], *options)
    return {method: folder / method for method in TORCHRUN}


def workers_of(launcher: subprocess.Popen) -> list[int]:
    """The processes that torchrun has started and that still run."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(child) for child in children if b"certify.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def rows_in_shards(folder: Path) -> int:
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in folder.glob("log.tsv.shards/*.tsv"))


@contextlib.contextmanager
def launched(command: list[str], folder: Path, count: int) -> Iterator[subprocess.Popen]:
    """A torchrun at work, once its shards have ``count`` rows; nothing of it is left afterwards."""
    with (folder / "output").open("w") as output:
        launcher = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=output, stderr=output)
    workers: list[int] = []
    try:
        wait_until(lambda: rows_in_shards(folder) >= count, launcher)
        workers = workers_of(launcher)
        yield launcher
    finally:
        for process in (launcher.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launcher.wait()


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds torchrun's processes in /proc")


@pytest.mark.parametrize(
    ("processes", "method"),
    [
        (2, "exact"),
        (2, "adaptive"),
        *(pytest.param(count, "exact", marks=pytest.mark.slow) for count in (1, 3)),
    ],
)
def test_any_number_of_processes_writes_the_log_of_one(checkpoint, warm, tmp_path, forty, processes, method):
    """Processes as torchrun starts them; torchrun itself is at work in the tests below."""
    command = torchrun(checkpoint, processes, TORCHRUN[method])
    done = warm.run_workers(processes, [sys.executable, *command[command.index(str(CODE / "certify.py")) :]], tmp_path)
    assert [each.returncode for each in done] == [0] * processes, done
    assert "".join(each.stdout for each in done).count("40 examples") == 1, "one of the processes sums up"
    assert_same(tmp_path / "log.tsv", forty[method])
    assert {run["shard"] for run in manifest_of(tmp_path / "log.tsv")["runs"]} == {0, 1, 2, 3, 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.tsv", "log.tsv.manifest.json"]


@needs_proc
@pytest.mark.parametrize(
    ("method", "before", "after", "row"),
    [
        ("exact", 1, 2, 13),
        pytest.param("adaptive", 1, 3, 6, marks=pytest.mark.slow),
        pytest.param("exact", 3, 1, 15, marks=pytest.mark.slow),
    ],
)
def test_killed_torchrun_is_continued_by_another_number_of_processes(
    checkpoint, tmp_path, forty, method, before, after, row
):
    """All its processes at once, as when a machine fails; 12 seconds each."""
    moments = random.Random(row)
    with launched(torchrun(checkpoint, before, TORCHRUN[method]), tmp_path, row):
        time.sleep(moments.uniform(0, 0.05))
    assert not (tmp_path / "log.tsv").exists() and row <= rows_in_shards(tmp_path) < 40
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("log.tsv.shards/*.tsv")}
    done = run_process(torchrun(checkpoint, after, TORCHRUN[method]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "log.tsv", forty[method])
    assert not (tmp_path / "log.tsv.shards").exists()
    whole = (tmp_path / "log.tsv").read_bytes()
    lines = itertools.chain.from_iterable(shard.splitlines(keepends=True)[:-1] for shard in kept.values())
    assert all(line in whole for line in lines), "no finished row is computed again"


@needs_proc
@pytest.mark.slow
def test_killed_worker_is_started_again_by_torchrun(checkpoint, tmp_path, forty):
    """torchrun then starts all of them anew, which takes 15 seconds."""
    with launched(torchrun(checkpoint, 2, TORCHRUN["exact"], restarts=1), tmp_path, 9) as launcher:
        os.kill(workers_of(launcher)[1], signal.SIGKILL)
        assert launcher.wait(timeout=HANG_SECONDS) == 0, (tmp_path / "output").read_text()
    assert_same(tmp_path / "log.tsv", forty["exact"])
    assert not (tmp_path / "log.tsv.shards").exists()


@pytest.mark.slow
def test_torchrun_leaves_a_finished_log_alone_and_replaces_it_when_told(checkpoint, tmp_path, forty):
    """Three runs of 6 seconds."""
    for name in (forty["exact"], forty["exact"].with_name("exact.manifest.json")):
        (tmp_path / name.name.replace("exact", "log.tsv")).write_bytes(name.read_bytes())
    before = snapshot(tmp_path)
    assert run_process(torchrun(checkpoint, 2, TORCHRUN["exact"]), tmp_path).returncode == 0
    assert snapshot(tmp_path) == before
    refused = run_process(torchrun(checkpoint, 2, [*TORCHRUN["exact"], "--seed", "7"]), tmp_path)
    assert refused.returncode == 1 and "seed was 0, now 7" in refused.stderr
    assert snapshot(tmp_path) == before
    anew = run_process(torchrun(checkpoint, 2, [*TORCHRUN["exact"], "--seed", "7", "--overwrite"]), tmp_path)
    assert anew.returncode == 0 and manifest_of(tmp_path / "log.tsv")["settings"]["seed"] == 7
    assert len(rows(tmp_path / "log.tsv")) == 40 and timeless(tmp_path / "log.tsv") != timeless(forty["exact"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.tsv", "log.tsv.manifest.json"]
