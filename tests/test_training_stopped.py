"""SIGTERM, Ctrl-C and a loss that is not finite end training with one line, and with a checkpoint
to continue from.
"""

import itertools
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from smoothadv.objectives import Objective
from smoothadv.training.update import Update
from support.commands import (
    call,
    rows,
    run_process,
    script,
    succeed,
    timeless,
    wait_until,
)
from support.trainings import AT_ONCE, after_update, read, same_state, send

TRAINING = ["digits", "digits_resnet8"]
STEPS = 12
RECIPE = [
    "--noise",
    0.25,
    "--device",
    "cpu",
    "--lr-step-size",
    1,
    "--epochs",
    2,
    "--evaluate-images",
    20,
    "--batch",
    32,
    "--steps-per-epoch",
    STEPS,
]
STOPPED = {signal.SIGTERM: (143, "stopped by SIGTERM"), signal.SIGINT: (130, "interrupted")}
FILES = ["args.json", "checkpoint.pth.tar", "log.txt"]


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C takes effect even where the tests run in the background, which ignores it; no test
    changes handlers.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = [signal.getsignal(number) for number in STOPPED]
    yield
    assert [signal.getsignal(number) for number in STOPPED] == handlers, (
        "they are as they were before the command"
    )
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("trained") / "whole"
    succeed("train", *TRAINING, folder, *RECIPE)
    return folder


def train(capsys, folder: Path, *options: object):
    return call(capsys, "train", *TRAINING, folder, *RECIPE, *options)


def train_acting(capsys, folder: Path, update: int, act, *options: object):
    """Train, with ``act`` called in the given update of this process."""
    with pytest.MonkeyPatch.context() as patch:
        after_update(patch, update, act)
        return train(capsys, folder, *options)


def assert_resumes(capsys, folder: Path, whole: Path) -> None:
    """The same command with --resume ends where ``whole`` does."""
    assert train(capsys, folder, "--resume").code == 0
    assert same_state(folder, whole)
    assert timeless(folder / "log.txt") == timeless(whole / "log.txt")
    assert sorted(path.name for path in folder.iterdir()) == FILES


def assert_one_line(text: str, *words: str) -> None:
    """The text is one line, after the line break that separates it from the terminal's ^C."""
    assert len(text.strip().splitlines()) == 1
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_process_obeys_a_signal_within_its_first_epoch(number, warm, tmp_path):
    """The signal comes from another process, between steps or within one."""
    command = script("train", *TRAINING, tmp_path / "run", *RECIPE, "--epochs", 1000, *AT_ONCE)
    with warm.start(command, tmp_path) as process:
        try:
            wait_until((tmp_path / "run/checkpoint.pth.tar").exists, process)
            process.send_signal(number)
            said = process.communicate()[1]
        finally:
            process.kill()
    code, words = STOPPED[number]
    assert process.returncode == code
    assert_one_line(said, words, "--resume")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FILES


# Calls the compiler. Its first call in an update asks the training to end.
SIGNALLING_COMPILER = """#!/bin/sh
case "$*" in *" -o "*)
    echo $$ >> {folder}/called
    mkdir {folder}/sent && kill -{number:d} $PPID;;
esac
exec {compiler} "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_training_stops_at_once_while_its_network_is_compiled(warm, tmp_path):
    """Two minutes. Nothing is lost: the compiler works in the first update after a checkpoint."""

    def compiled(name: str, *options: object, path: str = os.environ["PATH"]):
        command = script("train", *TRAINING, name, *RECIPE, "--compile", *options)
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache" / path), "PATH": path}
        with warm.start(command, tmp_path, **cache) as process:
            return process.communicate()[1], process.returncode

    assert compiled("whole")[1] == 0
    for number, (code, words) in STOPPED.items():
        name, folder = number.name, tmp_path / f"{number.name} by"
        folder.mkdir()
        text = {"folder": f"'{folder}'", "number": number, "compiler": shutil.which("g++")}
        (folder / "g++").write_text(SIGNALLING_COMPILER.format(**text))
        (folder / "g++").chmod(0o755)
        said, ended = compiled(name, path=f"{folder}:{os.environ['PATH']}")
        assert ended == code and words in said and "Traceback" not in said
        assert not (tmp_path / name / "checkpoint.pth.tar").exists(), "the update was not finished"
        for child in (folder / "called").read_text().split():
            assert not Path("/proc", child).exists(), "the compiler does not outlive it"
        assert compiled(name, "--resume")[1] == 0
        assert same_state(tmp_path / name, tmp_path / "whole")


def test_interruption_while_libraries_load_is_quiet_too(tmp_path):
    """That takes seconds, in which people notice a slip; this torch is one whose import was
    interrupted.
    """
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    done = run_process(
        script("train", *TRAINING, "run", *RECIPE), tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 130
    assert len(done.stderr.strip().splitlines()) <= 1


def test_signal_during_the_test_of_an_epoch_is_obeyed_after_it(whole, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:

        def signalled(*arguments, evaluate=Update.evaluate):
            send(signal.SIGINT)
            return evaluate(*arguments)

        patch.setattr(Update, "evaluate", signalled)
        assert train(capsys, tmp_path).code == 130
    assert (read(tmp_path)["epoch"], read(tmp_path)["step"]) == (1, 0)
    assert_resumes(capsys, tmp_path, whole)


def test_signal_while_a_checkpoint_is_written_waits_for_it(whole, tmp_path, capsys, monkeypatch):
    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:

        def signalled(descriptor):
            fsync(descriptor)
            send(signal.SIGINT)

        after_update(patch, 3, lambda: patch.setattr(os, "fsync", signalled))
        assert train(capsys, tmp_path).code == 130
    assert not list(tmp_path.glob("*.tmp"))
    assert_resumes(capsys, tmp_path, whole)


@pytest.mark.parametrize("saved", [True, False], ids=["after a checkpoint", "before any"])
def test_second_ctrl_c_stops_at_once(saved, whole, tmp_path, capsys, monkeypatch):
    """The present step is not saved; the checkpoint is the last one before it."""
    times = iter([10.0, 10.1, 11.2])

    def twice():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("smoothadv.training.run.time.monotonic", lambda: next(times))
            send(signal.SIGINT)  # looks at the clock twice
            send(signal.SIGINT)
        raise AssertionError("it must not come here")

    outcome = train_acting(capsys, tmp_path, STEPS + 3 if saved else 3, twice)
    assert outcome.code == 130
    assert_one_line(outcome.err, "interrupted", "--resume")
    assert (tmp_path / "checkpoint.pth.tar").exists() == saved
    if saved:
        assert (read(tmp_path)["epoch"], read(tmp_path)["step"]) == (1, 0)
    assert_resumes(capsys, tmp_path, whole)


@pytest.mark.parametrize(
    ("update", "sent", "kept"),
    [
        (17, [signal.SIGTERM], (1, 5)),
        (17, [signal.SIGINT], (1, 5)),
        (1, [signal.SIGTERM], (0, 1)),
        (2 * STEPS, [signal.SIGTERM], (1, STEPS)),
        (3, [signal.SIGINT, signal.SIGINT], (0, 3)),
        (3, [signal.SIGTERM, signal.SIGINT], (0, 3)),
    ],
    ids=[
        "SIGTERM",
        "Ctrl-C",
        "very first update",
        "last update of all",
        "Ctrl-C that torchrun passes on",
        "both signals",
    ],
)
def test_signals_of_one_moment_save_that_very_update_once_and_say_how_to_go_on(
    update, sent, kept, whole, tmp_path, capsys
):
    """Also before the test of the last epoch, which may take longer than a cluster waits."""
    outcome = train_acting(capsys, tmp_path, update, lambda: [send(number) for number in sent])
    (said,) = {said for code, said in map(STOPPED.get, sent) if code == outcome.code}
    assert_one_line(outcome.err, said, "--resume")
    assert "saved" not in outcome.out, "it does not claim to be finished"
    assert (read(tmp_path)["epoch"], read(tmp_path)["step"]) == kept and len(
        rows(tmp_path / "log.txt")
    ) == kept[0]
    assert_resumes(capsys, tmp_path, whole)


def test_ignored_signals_stay_ignored(whole, tmp_path, capsys):
    """As under nohup, or where a shell starts a job in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome = train_acting(capsys, tmp_path, 3, lambda: send(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.code == 0 and same_state(tmp_path, whole)


def breaking(patch: pytest.MonkeyPatch, what: str, number: int) -> None:
    """In that update the loss is nan, or a weight becomes infinite, or so does the loss of that
    test, whose running statistics may be too large where weights are finite.
    """
    owner, name = {
        "loss": (Objective, "criterion"),
        "weights": (torch.optim.SGD, "step"),
        "test loss": (Update, "evaluate"),
    }[what]
    usual, calls = getattr(owner, name), itertools.count(1)

    def broken(*arguments):
        found = usual(*arguments)
        is_due = next(calls) == number
        if is_due and what == "loss":
            return found[0] * math.nan, found[1]
        if is_due and what == "test loss":
            return {**found, "test_loss": math.nan}
        if is_due:
            arguments[0].param_groups[0]["params"][-1].data[0] = math.inf
        return found

    patch.setattr(owner, name, broken)


@pytest.mark.parametrize(
    ("what", "number", "how", "kept"),
    [
        ("loss", 17, "", (1, 0)),
        ("loss", 17, "saved often", (1, 4)),
        pytest.param("loss", 24, "saved often", (1, 11), marks=pytest.mark.slow),
        ("loss", 1, "saved often", None),
        pytest.param("loss", 5, "", None, marks=pytest.mark.slow),
        ("weights", 15, "saved often", (1, 2)),
        ("weights", 15, "stopped", (1, 0)),
        ("test loss", 2, "", (1, 0)),
    ],
)
def test_what_is_no_number_ends_in_one_line_and_leaves_the_last_good_checkpoint(
    what, number, how, kept, whole, tmp_path, capsys
):
    clock = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        if how == "stopped":
            after_update(patch, number, send)
        if how == "saved often":  # by a clock of its own: a fast machine would leave out a step
            patch.setattr("smoothadv.training.run.time.monotonic", lambda: float(next(clock)))
        breaking(patch, what, number)
        outcome = train(capsys, tmp_path, *(AT_ONCE if how == "saved often" else []))
    where = f"the {what} stopped being finite in epoch {1 if kept is None else 2}"
    saved = tmp_path / "checkpoint.pth.tar"
    said = f"the last good checkpoint is {saved}" if kept else "nothing was saved yet"
    assert outcome.code == 1 and saved.exists() == bool(kept)
    assert_one_line(outcome.err, "error: ", where, "--lr", said)
    if kept is not None:
        content = read(tmp_path)
        assert (content["epoch"], content["step"]) == kept
        assert all(weights.isfinite().all() for weights in content["state_dict"].values())
    assert_resumes(capsys, tmp_path, whole)


def test_folder_that_is_deleted_during_the_training_is_made_anew(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    assert train_acting(capsys, folder, 1, lambda: shutil.rmtree(folder)).code == 0
    assert same_state(folder, whole)
