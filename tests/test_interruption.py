"""A run is never lost: processes are killed or interrupted while they work, resumed, and end as if nothing happened."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import pytest

from support.commands import call, rows, run_process, script, succeed, timeless, wait_until
from support.weights import read, same_state

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = ["digits", "digits_resnet8"]
# Epochs that depend on their number, through the learning rate, and on the momentum of the ones before.
RECIPE = ["--noise", "0.25", "--lr-step-size", "2", "--device", "cpu"]
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "one"
    succeed("train", *TRAINING, folder, "--epochs", 1, *RECIPE)
    return folder


@pytest.fixture(scope="module")
def three_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("trained") / "three"
    succeed("train", *TRAINING, folder, "--epochs", 3, *RECIPE)
    return folder


@pytest.fixture(scope="module")
def checkpoint(one_epoch: Path) -> Path:
    return one_epoch / "checkpoint.pth.tar"


def lines(file: Path) -> int:
    """Whole lines, the header included."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_at(warm, command: list[str], cwd: Path, log: Path, row: int) -> None:
    """Start a command and kill it once the log has more than ``row`` rows: somewhere in the next one."""
    with warm.start(command, cwd) as process:
        try:
            wait_until(lambda: lines(log) > 1 + row, process)
        finally:
            process.kill()
    assert process.returncode == KILLED, "it must not have finished before"


def interrupt_at(warm, command: list[str], cwd: Path, log: Path, row: int) -> tuple[int, str]:
    """As ``kill_at``, but by Ctrl-C; the exit code and what the process said about it."""
    with warm.start(command, cwd) as process:
        try:
            wait_until(lambda: lines(log) > 1 + row, process)
            process.send_signal(signal.SIGINT)
            said = process.communicate()[1]
        finally:
            process.kill()
    return process.returncode, said


def certification(checkpoint: Path, log: Path, *options: object) -> list[object]:
    return ["digits", checkpoint, 0.25, log, "--N", 300, "--device", "cpu", *options]


def test_killed_certification_is_finished_by_resuming(checkpoint, warm, tmp_path):
    """Three kills among 120 examples, at random places that differ from each other."""
    whole, log = tmp_path / "whole.tsv", tmp_path / "killed.tsv"
    succeed("certify", *certification(checkpoint, whole, "--skip", 3))
    moments = random.Random(1)
    for earliest in (0, 30, 60):
        command = script("certify", *certification(checkpoint, log, "--skip", 3, "--resume"))
        kill_at(warm, command, tmp_path, log, moments.randrange(earliest, earliest + 20))
    assert 60 < len(rows(log)) < 120
    succeed("certify", *certification(checkpoint, log, "--skip", 3, "--resume"))
    assert timeless(log) == timeless(whole)
    assert len({row["idx"] for row in rows(log)}) == len(rows(log)) == 120


@pytest.fixture(scope="module")
def finished_log(checkpoint, tmp_path_factory) -> Path:
    log = tmp_path_factory.mktemp("logs") / "log.tsv"
    succeed("certify", *certification(checkpoint, log, "--max", 4))
    return log


@pytest.mark.parametrize(
    "keep",
    [
        lambda text: "",
        lambda text: text[:7],
        lambda text: text[: text.index("\n") + 1],
        lambda text: text[: text.rindex("\t")],
        lambda text: text[:-1],
        lambda text: text[: text.rindex("\n", 0, -1) + 2],
        lambda text: text[: text.rindex("\n", 0, -1) + 1],
    ],
    ids=["nothing", "torn header", "header", "torn row", "row without its end", "start of a row", "whole rows"],
)
def test_torn_log_is_finished_by_resuming(checkpoint, finished_log, tmp_path, keep):
    """A kill, or a full disk, can leave any beginning of the log."""
    torn = tmp_path / "log.tsv"
    torn.write_text(keep(finished_log.read_text()))
    manifest = finished_log.with_name(f"{finished_log.name}.manifest.json")
    (tmp_path / manifest.name).write_bytes(manifest.read_bytes())
    succeed("certify", *certification(checkpoint, torn, "--max", 4, "--resume"))
    assert timeless(torn) == timeless(finished_log)


def test_interrupted_certification_says_how_to_go_on(checkpoint, warm, tmp_path, capsys):
    log, fresh = tmp_path / "interrupted.tsv", tmp_path / "fresh.tsv"
    code, said = interrupt_at(warm, script("certify", *certification(checkpoint, log)), tmp_path, log, 2)
    assert code == 130
    assert len(said.strip().splitlines()) == 1 and "same command again" in said
    done = len(rows(log))
    assert log.read_bytes().endswith(b"\n") and done >= 2
    assert call(capsys, "certify", *certification(checkpoint, log, "--max", done + 1, "--resume")).code == 0
    succeed("certify", *certification(checkpoint, fresh, "--max", done + 1))
    assert timeless(log) == timeless(fresh)


def test_log_that_is_being_written_is_refused(checkpoint, warm, tmp_path, capsys):
    log = tmp_path / "busy.tsv"
    with warm.start(script("certify", *certification(checkpoint, log)), tmp_path) as process:
        try:
            wait_until(lambda: lines(log) > 1, process)
            before = log.read_bytes()
            outcomes = [
                call(capsys, "certify", *certification(checkpoint, log, flag)) for flag in ("--resume", "--overwrite")
            ]
        finally:
            process.kill()
    assert log.read_bytes().startswith(before)
    for outcome in outcomes:
        assert outcome.code == 1 and "another process" in outcome.err and outcome.err.count("\n") == 1


def test_folder_that_is_being_trained_into_is_refused(warm, tmp_path, capsys):
    folder = tmp_path / "busy"
    command = [*TRAINING, folder, "--epochs", 1000, *RECIPE]
    with warm.start(script("train", *command), tmp_path) as process:
        try:
            wait_until(lambda: lines(folder / "log.txt") > 1, process)
            outcomes = [call(capsys, "train", *command, flag) for flag in ("--resume", "--overwrite")]
        finally:
            process.kill()
    for outcome in outcomes:
        assert outcome.code == 1 and "another process" in outcome.err and outcome.err.count("\n") == 1


def test_killed_training_is_finished_by_resuming(three_epochs, warm, tmp_path):
    killed = tmp_path / "killed"
    kill_at(warm, script("train", *TRAINING, killed, "--epochs", 3, *RECIPE), tmp_path, killed / "log.txt", 0)
    assert not same_state(killed, three_epochs)
    succeed("train", *TRAINING, killed, "--epochs", 3, *RECIPE, "--resume")
    assert same_state(killed, three_epochs)
    first, second = read(killed)["runs"]
    assert first["first_epoch"] == 0 and 0 < second["first_epoch"] < 3
    assert second["command"][-1] == "--resume"
    assert json.loads((killed / "args.json").read_text())["runs"] == [first, second]
    assert timeless(killed / "log.txt") == timeless(three_epochs / "log.txt")
    assert [row["epoch"] for row in rows(killed / "log.txt")] == ["0", "1", "2"]


def test_interrupted_training_says_how_to_go_on(warm, tmp_path):
    folder, fresh = tmp_path / "interrupted", tmp_path / "fresh"
    command = script("train", *TRAINING, folder, "--epochs", 1000, *RECIPE)
    code, said = interrupt_at(warm, command, tmp_path, folder / "log.txt", 0)
    assert code == 130
    assert len(said.strip().splitlines()) == 1 and "--resume" in said
    epochs = read(folder)["epoch"] + 1
    succeed("train", *TRAINING, folder, "--epochs", epochs, *RECIPE, "--resume")
    succeed("train", *TRAINING, fresh, "--epochs", epochs, *RECIPE)
    assert same_state(folder, fresh)
    assert timeless(folder / "log.txt") == timeless(fresh / "log.txt")


def test_interruption_while_libraries_load_is_quiet_too(tmp_path):
    """That takes seconds, in which people notice a slip; this torch is one whose import was interrupted."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    done = run_process(script("train", *TRAINING, "run", *RECIPE), tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 130
    assert len(done.stderr.strip().splitlines()) <= 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "log.txt").write_text((folder / "log.txt").read_text().rsplit("\n", 2)[0] + "\n"),
        lambda folder: (folder / "log.txt").unlink(),
        lambda folder: (folder / "checkpoint.pth.tar.tmp").write_bytes(b"half a checkpo"),
        lambda folder: (folder / "log.txt.tmp").write_bytes(b"epoch\tti"),
    ],
    ids=["log lacks the last epoch", "no log", "half a checkpoint", "half a log"],
)
def test_kill_while_an_epoch_is_saved_is_mended_by_resuming(one_epoch, three_epochs, tmp_path, damage):
    """The checkpoint is replaced first and as a whole, then the log: a kill can fall before, between or after."""
    killed = tmp_path / "killed"
    shutil.copytree(one_epoch, killed)
    damage(killed)
    succeed("train", *TRAINING, killed, "--epochs", 3, *RECIPE, "--resume")
    assert same_state(killed, three_epochs)
    assert timeless(killed / "log.txt") == timeless(three_epochs / "log.txt")
    assert sorted(path.name for path in killed.iterdir()) == ["args.json", "checkpoint.pth.tar", "log.txt"]


def test_kill_after_the_last_checkpoint_is_mended_by_resuming(three_epochs, tmp_path):
    """Nothing is left to train, but the log lacks a line."""
    killed = tmp_path / "killed"
    shutil.copytree(three_epochs, killed)
    log = killed / "log.txt"
    log.write_text(log.read_text().rsplit("\n", 2)[0] + "\n")
    succeed("train", *TRAINING, killed, "--epochs", 3, *RECIPE, "--resume")
    assert log.read_text() == (three_epochs / "log.txt").read_text()
