"""Under torchrun several processes train one model: identical at every step, and resumable after
one or all stopped.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from support.commands import call, refused, rows, script, succeed, timeless, wait_until
from support.torchrun import agent, store_of_agent
from support.trainings import AT_ONCE, read, same_state, step_saved

PGD = [
    "--noise",
    0.25,
    "--attack",
    "PGD",
    "--epsilon",
    0.5,
    "--num-steps",
    1,
    "--num-noise-vec",
    1,
    "--warmup",
    1,
]
# At every tenth step the processes decide whether to save or stop.
STEPS = 12
TRAINING = [
    "digits",
    "digits_resnet8",
    "run",
    "--device",
    "cpu",
    "--batch",
    32,
    *PGD,
    "--epochs",
    2,
    "--steps-per-epoch",
    STEPS,
    "--evaluate-images",
    41,
]
FEW = ["--steps-per-epoch", 2]
FILES = ["args.json", "checkpoint.pth.tar", "log.txt"]


@pytest.fixture(scope="module")
def done(warm, tmp_path_factory) -> tuple[Path, list[subprocess.CompletedProcess]]:
    """Two undisturbed processes as torchrun starts them: their working folder and their outputs."""
    folder = tmp_path_factory.mktemp("two")
    return folder, warm.run_workers(2, script("train_pgd", *TRAINING), folder)


def test_processes_write_one_run_and_say_everything_once(done):
    folder, (process, other) = done
    assert (process.returncode, other.returncode) == (0, 0), process.stderr + other.stderr
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert sorted(path.name for path in (folder / "run").iterdir()) == FILES
    begun, first, last, ended, advice = process.stdout.splitlines()
    assert begun.startswith("training digits_resnet8") and "2 processes on cpu" in begun
    assert "epoch   1/2" in first and "epoch   2/2" in last
    assert ended.startswith("saved run/") and "certify.py" in advice
    assert process.stderr == other.stderr == other.stdout == ""
    (run,) = json.loads((folder / "run/args.json").read_text())["runs"]
    assert run["processes"] == 2
    assert [row["epoch"] for row in rows(folder / "run/log.txt")] == ["0", "1"]
    assert all(row["test_images"] == "41" for row in rows(folder / "run/log.txt")), (
        "shared, and counted once each"
    )


@pytest.mark.parametrize(
    ("flag", "found", "advice"),
    [
        ("--sync-bn", "cpu", "leave it out"),
        ("--cuda-graph", "cpu", "leave it out"),
        ("--compile", "cuda", "CUDA graphs, the default, are four times as fast: leave it out"),
    ],
)
def test_what_another_device_alone_can_is_refused(
    flag, found, advice, workplace, capsys, monkeypatch
):
    monkeypatch.setattr(
        "smoothadv.training.setup.device_of_run", lambda *_, **__: torch.device(found)
    )
    outcome = call(capsys, "train_pgd", *TRAINING, flag)
    assert refused(outcome, f"error: {flag}", f"this trains on {found}", advice)
    assert list(workplace.iterdir()) == []


def test_run_that_torchrun_starts_again_replaces_another_only_if_told_to(
    workplace, monkeypatch, capsys
):
    """The first start refused the folder, so the second must, too; an old run to overwrite must not
    be continued. A single process needs no others to connect to.
    """
    succeed("train_pgd", *TRAINING, *FEW, "--epochs", 1, "--seed", 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        outcome = call(capsys, "train_pgd", *TRAINING, *FEW, "--seed", 1)
        assert (
            outcome.code == 1
            and "--resume" in outcome.err
            and read(workplace / "run")["epoch"] == 1
        )
    again = [*FEW, "--epochs", 1, "--seed", 2, "--overwrite"]
    outcome = call(capsys, "train_pgd", *TRAINING, *again)
    assert outcome.code == 0, outcome.err
    assert read(workplace / "run")["recipe"]["seed"] == 2


@pytest.mark.parametrize("moment", [(0, 10), (1, 5)], ids=["first epoch", "second epoch"])
def test_killed_workers_that_torchrun_starts_again_go_on_from_the_last_checkpoint(
    done, warm, tmp_path, moment
):
    """Without --resume."""
    whole = done[0] / "run"
    command, store = script("train_pgd", *TRAINING, *AT_ONCE), store_of_agent()
    with warm.workers(2, command, tmp_path, **agent(store.port, 0)) as workers:
        wait_until(lambda: step_saved(tmp_path / "run") >= moment, workers[0])
    again = warm.run_workers(2, command, tmp_path, **agent(store.port, 1))
    assert "resuming after epoch" in again[0].stdout, again
    assert same_state(tmp_path / "run", whole)
    assert timeless(tmp_path / "run/log.txt") == timeless(whole / "log.txt")
    first, second = read(tmp_path / "run")["runs"]
    assert (second["first_epoch"], second["first_step"]) >= moment
    assert (first["first_epoch"], first["first_step"]) == (0, 0)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FILES


def test_three_processes_that_were_stopped_end_with_the_weights_of_others(warm, tmp_path):
    """The sum of three numbers depends on their order, which two cannot show."""
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    for folder, options in [(whole, []), (halves, ["--epochs", 1]), (halves, ["--resume"])]:
        folder.mkdir(exist_ok=True)
        command = script("train_pgd", *TRAINING, *FEW, *options)
        assert [each.returncode for each in warm.run_workers(3, command, folder)] == [0] * 3
    assert timeless(halves / "run/log.txt")[0] == timeless(whole / "run/log.txt")[0], (
        "they began identically"
    )
    assert same_state(halves / "run", whole / "run")


def test_fewer_images_than_processes_are_refused(warm, tmp_path):
    """Once, however many processes there are."""
    content = {"images": np.zeros((3, 8, 8), np.uint8), "labels": np.arange(3)}
    few = {f"train_{name}": one[:1] for name, one in content.items()}
    np.savez(tmp_path / "few.npz", **few, **{f"test_{name}": one for name, one in content.items()})
    command = script("train_pgd", "npz:few.npz", *TRAINING[1:])
    first, other = warm.run_workers(2, command, tmp_path)
    assert first.stderr == "error: found 1 training image for 2 processes: start fewer\n"
    assert first.returncode == other.returncode == 1 and other.stderr == ""
    assert not (tmp_path / "run").exists()


def test_one_process_under_torchrun_is_one_process(workplace):
    """It does not even connect to other processes."""
    options = [*FEW, "--epochs", 1]
    succeed("train_pgd", *TRAINING, *options)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "TORCHELASTIC_RUN_ID": "x",
        }.items():
            patch.setenv(name, value)
        succeed("train_pgd", *TRAINING[:2], "alone", *TRAINING[3:], *options)
    assert same_state(workplace / "run", workplace / "alone")
