"""attack in shards or under torchrun ends in the logs and adversarial examples of one process."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.cli import merging
from smoothadv.evaluation import log as log_writing
from smoothadv.records.logs import spool_path
from support.attack_runs import SIGMA, archive, assert_same_attack
from support.commands import call, refused, rows, script, snapshot, succeed
from support.sharding import OneWorker, manifest_of

USUAL = ["--device", "cpu", "--N", 50, "--max", 20, "--num-steps", 2, "--num-noise-vec", 4]
SIZES = ["--epsilon", 0.25, 0.5]
NAMES = ["epsilon_0.25", "epsilon_0.5"]
OUTPUT = sorted(name + end for name in NAMES for end in (".npz", ".tsv", ".tsv.manifest.json"))
LOG = "out/epsilon_0.5.tsv"


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory) -> Path:
    """The folder that one process makes."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    succeed("attack", "digits", checkpoint, SIGMA, folder, *USUAL, *SIZES)
    return folder


@pytest.fixture
def attack(checkpoint, workplace, capsys) -> Callable:
    """Attack twenty images into out/; options given later win."""
    return lambda *options: call(
        capsys, "attack", "digits", checkpoint, SIGMA, "out", *USUAL, *SIZES, *options
    )


@pytest.fixture
def merge(workplace, capsys) -> Callable:
    return lambda *options, log=LOG: call(capsys, "attack", "merge", log, *options)


def assert_all_the_same(folder: Path, whole: Path) -> None:
    for name in NAMES:
        assert_same_attack(folder / f"{name}.tsv", whole / f"{name}.tsv")


@pytest.mark.parametrize("order", [(0,), (2, 0, 1)], ids=str)
def test_shards_in_any_order_merge_into_the_logs_of_one_process(
    attack, merge, workplace, whole, order
):
    for index in order:
        outcome = attack("--shard", f"{index}/{len(order)}")
        assert (outcome.code, outcome.err) == (0, "")
        for name in NAMES:
            assert f"python code/attack.py merge out/{name}.tsv" in outcome.out, "what to do next"
    for name in NAMES:
        outcome = merge(log=f"out/{name}.tsv")
        assert (
            outcome.code == 0
            and f"20 examples from {len(order)} shards" in outcome.out
            and outcome.err == ""
        )
    assert_all_the_same(workplace / "out", whole)
    assert not list(workplace.rglob("*.examples"))


def test_shards_of_images_named_one_by_one_merge(attack, merge, workplace, whole):
    only = ["--max", -1, "--only", 17, 3, 8]
    for index in (1, 0):
        assert attack(*only, "--shard", f"{index}/2").code == 0
    assert merge().code == 0
    assert archive(workplace / LOG)["idx"].tolist() == [3, 8, 17]
    wanted = archive(whole / "epsilon_0.5.tsv")["adversarial"][[3, 8, 17]]
    assert archive(workplace / LOG)["adversarial"].tobytes() == wanted.tobytes()


def test_shards_may_be_brought_together_from_several_places(attack, merge, workplace, whole):
    for index in (0, 1):
        attack("--shard", f"{index}/2")
        (workplace / f"{LOG}.shards").rename(workplace / f"machine{index}")
        (workplace / "out/epsilon_0.25.tsv.shards").rename(workplace / f"other{index}")
    assert merge("machine1/1-of-2.tsv", "machine0/0-of-2.tsv").code == 0
    assert_same_attack(workplace / LOG, whole / "epsilon_0.5.tsv")


def test_images_that_a_shard_lost_are_missed_before_anything_is_removed(
    attack, merge, workplace, whole
):
    for index in (0, 1):
        attack("--shard", f"{index}/2")
    lost = spool_path(workplace / f"{LOG}.shards/1-of-2.tsv")
    content = lost.read_bytes()
    lost.unlink()
    assert refused(merge(), "10 have no adversarial example")
    lost.write_bytes(content)
    assert merge("--overwrite").code == 0
    assert_same_attack(workplace / LOG, whole / "epsilon_0.5.tsv")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stop_merging(patch: pytest.MonkeyPatch, moment: str | None) -> None:
    """Let a process end before it packs the images of merged shards into an archive, or while it
    removes a shard's.
    """
    unlink = Path.unlink

    def stop(path: Path, *arguments: object, **options: bool) -> None:
        if moment == "before the archive" or path.name.startswith("1-of-"):
            raise KeyboardInterrupt
        unlink(path, **options)

    if moment == "before the archive":
        for module in (merging, log_writing):
            patch.setattr(module, "pack", stop)
    else:
        patch.setattr(Path, "unlink", stop)


MOMENTS = ["before the archive", "among the images"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("again", ["merge", "attack"])
def test_merging_that_was_stopped_can_be_repeated(
    attack, merge, workplace, whole, monkeypatch, moment, again
):
    """Merging again, or the plain command, finishes the log without attacking any image again:
    before the archive the shards have the images; afterwards the archive has them all, although
    some shards have lost theirs."""
    for index in (0, 1):
        attack("--shard", f"{index}/2")
    merge(log="out/epsilon_0.25.tsv")
    with monkeypatch.context() as patch:
        stop_merging(patch, moment)
        assert merge().code == 130
    outcome = merge("--overwrite") if again == "merge" else attack()
    assert (outcome.code, outcome.err) == (0, "")
    assert_all_the_same(workplace / "out", whole)


@pytest.mark.parametrize("moment", [None, *MOMENTS])
def test_torchrun_writes_every_log_and_removes_the_shards(
    attack, workplace, whole, under_torchrun, monkeypatch, moment
):
    """Also where it was stopped before."""
    with monkeypatch.context() as patch:
        stop_merging(patch, moment)
        assert moment is None or attack().code == 130
    outcome = attack()
    assert (outcome.code, outcome.err) == (0, "") and outcome.out.count("20 examples") == 2
    assert_all_the_same(workplace / "out", whole)
    assert files(workplace / "out") == OUTPUT
    before = snapshot(workplace)
    assert attack().code == 0
    assert snapshot(workplace) == before


def test_torchrun_finishes_what_one_process_began(attack, workplace, whole, monkeypatch):
    attack("--max", 7)
    monkeypatch.setattr("smoothadv.evaluation.setup.join_workers", OneWorker)
    assert attack().code == 0
    assert_all_the_same(workplace / "out", whole)
    assert files(workplace / "out") == OUTPUT


@pytest.mark.parametrize(
    ("workers", "examples", "group"), [(None, 500, 256), (2, 500, 62), (8, 500, 15), (8, 20, 1)]
)
def test_no_process_takes_so_many_images_at_once_that_others_have_none(workers, examples, group):
    """Each process gets images about four times; a single process attacks enough images at once for
    several passes.
    """
    attack = SmoothedAttack(PGD(0.5, 2), 0.25, batch=64)
    job = SimpleNamespace(
        workers=workers and SimpleNamespace(size=workers), indices=range(examples)
    )
    assert log_writing.examples_at_a_time(attack, job) == group


def test_two_processes_write_the_logs_of_one(checkpoint, warm, tmp_path):
    """As torchrun starts them."""
    usual = [
        "--device",
        "cpu",
        "--N",
        50,
        "--skip",
        18,
        "--num-steps",
        2,
        "--num-noise-vec",
        4,
        *SIZES,
        "--png",
        1,
    ]
    succeed("attack", "digits", checkpoint, SIGMA, tmp_path / "whole", *usual)
    done = warm.run_workers(
        2, script("attack", "digits", checkpoint, SIGMA, "out", *usual), tmp_path
    )
    assert [each.returncode for each in done] == [0, 0], done
    assert "".join(each.stdout for each in done).count("20 examples") == 2, (
        "one of the processes sums up"
    )
    assert_all_the_same(tmp_path / "out", tmp_path / "whole")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    for name in NAMES:
        assert {run["shard"] for run in manifest_of(tmp_path / f"out/{name}.tsv")["runs"]} == {
            0,
            1,
            2,
        }
        assert len(rows(tmp_path / f"out/{name}.tsv")) == 20
