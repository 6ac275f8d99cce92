"""No training is lost: killed six times at random moments, or stopped within epochs, it ends like
an undisturbed one.

A run continues from a checkpoint within an epoch, whatever the objective, the schedule and the data
are.
"""

import functools
import itertools
import json
import math
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.objectives import OBJECTIVES
from support.commands import call, rows, script, succeed, timeless, wait_until
from support.diffusion import small_unet
from support.trainings import AT_ONCE, after_update, read, same_state, send

TRAINING = ["digits", "digits_resnet8"]
STEPS = 6
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
SMALL = ["--device", "cpu", "--batch", 32, "--steps-per-epoch", STEPS, "--evaluate-images", 40]
PGD = ["--noise", 0.25, "--attack", "PGD", "--epsilon", 0.5, "--num-steps", 1, "--num-noise-vec", 2]
DDN = [
    "--noise",
    0.25,
    "--attack",
    "DDN",
    "--epsilon",
    "64/255",
    "--num-steps",
    2,
    "--num-noise-vec",
    1,
]
ACR_WEAKNESS = [
    "--noise",
    0.25,
    "--objective",
    "acr-weakness",
    "--num-noise-vec",
    1,
    "--attack-from-epoch",
    1,
    "--drop-below",
    0,
    "--resample-every",
    1,
]
CAT_RS = ["--objective", "cat-rs", "--noise", 0.25, "--noise-steps", 1, "--teacher-draws", 8]
FT_CADIS = [
    *("--objective", "ft-cadis", "--noise", 0.5, "--num-noise-vec", 2, "--noise-steps", 1),
    *("--optimizer", "adamw", "--lr", 0.003, "--lr-schedule", "cosine", "--lr-rise", 1),
    *("--weight-decay-end", 0.1, "--clip-gradients", 0.3),
]
# Epsilon and the learning rate depend on the epoch, and the attack draws random numbers of its own.
KILLED = [*PGD, "--random-start", "--warmup", 3, "--lr-step-size", 2]


def updates_saved(folder: Path) -> int:
    """The number of updates of the weights in the checkpoint, 0 without one; a process may replace
    it meanwhile.
    """
    if not (folder / "checkpoint.pth.tar").exists():
        return 0
    content = read(folder)
    return content["epoch"] * STEPS + content["step"]


def kill_at_random(process, folder: Path, earliest: int, moments: random.Random) -> None:
    """Kill a process shortly after it has saved a random update; one process in five while it
    starts.
    """
    try:
        if moments.random() < 0.2:
            time.sleep(moments.uniform(0, 0.3))
        else:
            update = moments.randrange(earliest + 1, earliest + 5)
            wait_until(lambda: updates_saved(folder) >= update, process)
            time.sleep(moments.uniform(0, 0.06))
    finally:
        process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it must not have finished before"


def test_training_killed_six_times_is_finished_by_resuming(warm, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    moments = random.Random(1)
    # The last epoch is set only when the kills are over: however slow this machine is, none comes
    # too late.
    options = [*TRAINING, killed, *KILLED, *SMALL, *AT_ONCE]
    command = script("train_pgd", *options, "--epochs", 1000, "--resume")
    left, within = [], []
    for _ in range(6):
        process = warm.start(command, tmp_path)
        kill_at_random(process, killed, left[-1] if left else 0, moments)
        left.append(updates_saved(killed))
        within.append(left[-1] % STEPS > 0)
        if left[-1]:
            assert 0 <= read(killed)["epoch"] - len(rows(killed / "log.txt")) <= 1, (
                "the checkpoint comes first"
            )
    assert left == sorted(left) and len(set(left)) > 2, (
        "what was saved is never lost, and they did get somewhere"
    )
    assert any(within), "at least one was killed with a checkpoint within an epoch"
    epochs = math.ceil(left[-1] / STEPS) + 1
    succeed("train_pgd", *options, "--epochs", epochs, "--resume")
    succeed("train_pgd", *TRAINING, whole, *KILLED, *SMALL, "--epochs", epochs)
    assert same_state(killed, whole)
    assert (
        timeless(killed / "log.txt") == timeless(whole / "log.txt")
        and len(rows(whole / "log.txt")) == epochs
    )
    assert sorted(path.name for path in killed.iterdir()) == [
        "args.json",
        "checkpoint.pth.tar",
        "log.txt",
    ]
    check_runs(killed, left)


def check_runs(folder: Path, left: list[int]) -> None:
    """The checkpoint lists the runs that trained, each with its first update, which an earlier run
    had saved.
    """
    runs = read(folder)["runs"]
    assert (
        json.loads((folder / "args.json").read_text())["runs"] == runs
        and runs[-1]["command"][-1] == "--resume"
    )
    first = [run["first_epoch"] * STEPS + run["first_step"] for run in runs]
    assert first == sorted(first) and set(first) <= {0, *left} and first[-1] == left[-1]


def pseudo_labelled(folder: Path) -> Path:
    """Noise with labels that mean nothing."""
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (700, 8, 8, 1), dtype=np.uint8)
    file = folder / "pseudo.pickle"
    file.write_bytes(
        pickle.dumps({"data": images, "extrapolated_targets": draws.integers(0, 10, 700)})
    )
    return file


WAYS = {
    "gaussian": ("train", ["--noise", 0.25]),
    "PGD": ("train_pgd", [*PGD, "--random-start", "--warmup", 2]),
    "DDN": ("train_pgd", [*DDN, "--warmup", 0]),
    "self-training": ("train", ["--noise", 0.25, "--unlabelled-weight", 0.5]),
    "micro-batches": ("train_pgd", [*PGD, "--warmup", 0, "--micro-batch", 16]),
    "one-cycle": ("train", ["--noise", 0.25, "--lr-schedule", "one-cycle"]),
    "released behaviour": (
        "train_pgd",
        [*DDN[:4], "--epsilon", 64, *DDN[6:], "--released-behaviour", "--warmup", 1],
    ),
    "crops and mirror images": (
        "train",
        ["--noise", 0.25, "--crop-padding", 1, "--horizontal-flip"],
    ),
    "bf16": ("train_pgd", [*PGD, "--warmup", 0, "--precision", "bf16"]),
    "acr-weakness": ("train", ACR_WEAKNESS),
    "smoothmix": (
        "train",
        ["--objective", "smoothmix", "--noise", 0.25, "--warmup", 3, "--one-step-adversary"],
    ),
    "cat-rs": (
        "train",
        CAT_RS,
    ),
    "distillation": ("train", ["--objective", "distillation", "--noise", 0.25, "--transfer", 0.5]),
    "consistency": ("train", ["--objective", "consistency", "--noise", 0.25]),
    "macer": ("train", ["--objective", "macer", "--noise", 0.25, "--num-noise-vec", 4]),
    "stability": ("train", ["--objective", "stability", "--noise", 0.25]),
    "AdamW": ("train", ["--noise", 0.25, "--optimizer", "adamw", "--lr", 0.003]),
    "ft-cadis": ("train", FT_CADIS),
}


RARE = {"micro-batches", "one-cycle", "released behaviour", "crops and mirror images", "bf16"}


@pytest.mark.parametrize("way", [SLOW(way) if way in RARE else way for way in WAYS])
def test_stops_within_epochs_leave_no_trace(way, tmp_path, capsys, two_epochs):
    """Stopped after the updates 2, 6 (the last of its epoch, before its test) and 9; terms of the
    loss go on, too.
    """
    command, options = WAYS[way]
    terms = OBJECTIVES[way].TERMS if way in OBJECTIVES else ()
    if way == "self-training":
        options = [*options, "--use-unlabelled", pseudo_labelled(tmp_path)]
    if way in ("cat-rs", "distillation"):
        options = [*options, "--teacher", two_epochs[0] / "checkpoint.pth.tar"]
    if way == "ft-cadis":
        options = [*options, "--denoiser", f"openai:{small_unet(tmp_path)}"]
    options = [*SMALL, "--epochs", 2, *options]
    succeed(command, *TRAINING, tmp_path / "whole", *options)
    done, stopped = 0, tmp_path / "stopped"
    for last, saved in [(2, (0, 2)), (6, (0, 6)), (9, (1, 3))]:
        with pytest.MonkeyPatch.context() as patch:
            after_update(
                patch,
                last - done,
                send,
                getattr(torch.optim, "AdamW" if "adamw" in options else "SGD"),
            )
            outcome = call(capsys, command, *TRAINING, stopped, *options, "--resume")
        assert outcome.code == 143
        content = read(stopped)
        assert (content["epoch"], content["step"], len(content["sums"])) == (*saved, 5 + len(terms))
        assert len(rows(stopped / "log.txt")) == content["epoch"]
        assert (f"step {done} of {STEPS}" in outcome.out) == (done > 0)
        done = content["epoch"] * STEPS + content["step"]
    succeed(command, *TRAINING, stopped, *options, "--resume")
    assert same_state(stopped, tmp_path / "whole")
    log = timeless(stopped / "log.txt")
    assert log == timeless(tmp_path / "whole/log.txt") and all(
        float(log[1][f"train_{name}"]) > 0 for name in terms
    )
    assert read(stopped)["step"] == 0, "the last checkpoint is that of a whole epoch"


def test_the_time_of_an_epoch_is_that_of_all_its_parts(tmp_path, capsys, monkeypatch):
    """With a clock that advances by a second at every reading."""
    ticks = itertools.count()
    monkeypatch.setattr("smoothadv.training.run.time.monotonic", lambda: float(next(ticks)))
    options = [*TRAINING, tmp_path, "--noise", 0.25, *SMALL, "--epochs", 1]
    with pytest.MonkeyPatch.context() as patch:
        after_update(patch, 4, send)
        assert call(capsys, "train", *options).code == 143
    before = read(tmp_path)["seconds"]
    assert before > 3
    succeed("train", *options, "--resume")
    assert float(rows(tmp_path / "log.txt")[0]["time"]) > before + 1


SAVED = [*TRAINING, "run", "--noise", 0.25, "--lr-step-size", 1, *SMALL, "--resume", "--epochs"]


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory) -> list[Path]:
    """A run after its first and after its second epoch."""
    folders = [tmp_path_factory.mktemp("trained") / "run" for _ in range(2)]
    for epochs, folder in enumerate(folders, start=1):
        succeed("train", *[folder if word == "run" else word for word in SAVED], epochs)
    return folders


def without_last_row(log: Path) -> None:
    log.write_text(log.read_text().rsplit("\n", 2)[0] + "\n")


@pytest.mark.parametrize(
    ("epochs", "damage"),
    [
        (1, lambda run: without_last_row(run / "log.txt")),
        (2, lambda run: without_last_row(run / "log.txt")),
        (1, lambda run: (run / "log.txt").unlink()),
        (1, lambda run: (run / "checkpoint.pth.tar.tmp").write_bytes(b"half a checkpo")),
        (1, lambda run: (run / "log.txt.tmp").write_bytes(b"epoch\tti")),
    ],
    ids=[
        "log lacks its epoch",
        "log lacks the last epoch",
        "no log",
        "half a checkpoint",
        "half a log",
    ],
)
def test_kill_while_an_epoch_is_saved_is_mended_by_resuming(two_epochs, workplace, epochs, damage):
    """The checkpoint is replaced first and as a whole, then the log: a kill can fall before,
    between or after.
    """
    run = Path(shutil.copytree(two_epochs[epochs - 1], workplace / "run"))
    damage(run)
    succeed("train", *SAVED, 2)
    assert same_state(run, two_epochs[1]) and timeless(run / "log.txt") == timeless(
        two_epochs[1] / "log.txt"
    )
    assert sorted(path.name for path in run.iterdir()) == [
        "args.json",
        "checkpoint.pth.tar",
        "log.txt",
    ]
