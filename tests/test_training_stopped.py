"""No training is lost: killed five times at random moments, or stopped within epochs, it ends like
an undisturbed one. SIGTERM, Ctrl-C and a loss that is not finite end it with one line, and with a
checkpoint to continue from.

A run continues from a checkpoint within an epoch, whatever the objective, the schedule and the data
are.
"""

import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.objectives import OBJECTIVES, Objective
from smoothadv.training.update import Update
from support.commands import call, rows, run_process, script, succeed, timeless, wait_until
from support.diffusion import small_unet
from support.trainings import (
    AT_ONCE,
    after_update,
    read,
    same_state,
    send,
    step_saved,
    train_on_few_images,
)

TRAINING = ["digits", "digits_resnet8"]
STEPS = 3
SMALL = ["--device", "cpu", "--batch", 32, "--steps-per-epoch", STEPS, "--evaluate-images", 20]
RECIPE = ["--noise", 0.25, "--lr-step-size", 1, *SMALL, "--epochs", 2]
FILES = ["args.json", "checkpoint.pth.tar", "log.txt"]
PGD = ["--noise", 0.25, "--attack", "PGD", "--epsilon", 0.5, "--num-steps", 1, "--num-noise-vec", 2]
DDN = ["--noise", 0.25, "--attack", "DDN", "--num-steps", 2, "--num-noise-vec", 1, "--epsilon"]
# Epsilon and the learning rate depend on the epoch, and the attack draws random numbers of its own.
STEPS_KILLED = 6
KILLED = [
    *(*SMALL, *PGD, "--random-start", "--warmup", 3, "--lr-step-size", 2),
    *("--steps-per-epoch", STEPS_KILLED, "--batch", 16),
]


def updates_saved(folder: Path) -> int:
    """The number of updates of the weights in the checkpoint, 0 without one."""
    epoch, step = step_saved(folder)
    return epoch * STEPS_KILLED + step


def kill_at_random(process, saved: Path, moments: random.Random) -> None:
    """Kill a process shortly after it has saved a random number of times; one process in five while
    it starts.
    """
    count, seen = moments.randrange(1, 5), set[int]()

    def has_saved() -> bool:
        if saved.exists():
            seen.add(saved.stat().st_mtime_ns)
        return len(seen) > count  # the first may be that of the process before

    try:
        if moments.random() < 0.2:
            time.sleep(moments.uniform(0, 0.3))
        else:
            wait_until(has_saved, process)
            time.sleep(moments.uniform(0, 0.06))
    finally:
        process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it must not have finished before"


def test_training_killed_five_times_is_finished_by_resuming(warm, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    moments = random.Random(1)
    # The last epoch is set only when the kills are over: however slow this machine is, none comes
    # too late.
    options = [*TRAINING, killed, *KILLED, *AT_ONCE]
    command = script("train_pgd", *options, "--epochs", 1000, "--resume")
    left, within = [], []
    for _ in range(5):
        process = warm.start(command, tmp_path)
        kill_at_random(process, killed / "checkpoint.pth.tar", moments)
        left.append(updates_saved(killed))
        within.append(left[-1] % STEPS_KILLED > 0)
        if left[-1]:
            assert 0 <= read(killed)["epoch"] - len(rows(killed / "log.txt")) <= 1, (
                "the checkpoint comes first"
            )
    assert left == sorted(left) and len(set(left)) > 2, (
        "what was saved is never lost, and they did get somewhere"
    )
    assert any(within), "at least one was killed with a checkpoint within an epoch"
    epochs = math.ceil(left[-1] / STEPS_KILLED) + 1
    succeed("train_pgd", *options, "--epochs", epochs, "--resume")
    succeed("train_pgd", *TRAINING, whole, *KILLED, "--epochs", epochs)
    assert same_state(killed, whole)
    assert (
        timeless(killed / "log.txt") == timeless(whole / "log.txt")
        and len(rows(whole / "log.txt")) == epochs
    )
    assert sorted(path.name for path in killed.iterdir()) == FILES
    # The checkpoint lists the runs that trained, each with its first update, which an earlier run
    # had saved.
    runs = read(killed)["runs"]
    assert json.loads((killed / "args.json").read_text())["runs"] == runs
    assert runs[-1]["command"][-1] == "--resume"
    first = [run["first_epoch"] * STEPS_KILLED + run["first_step"] for run in runs]
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
    "DDN": ("train_pgd", [*DDN, "64/255", "--warmup", 0]),
    "self-training": ("train", ["--noise", 0.25, "--unlabelled-weight", 0.5]),
    "micro-batches": ("train_pgd", [*PGD, "--warmup", 0, "--micro-batch", 16]),
    "one-cycle": ("train", ["--noise", 0.25, "--lr-schedule", "one-cycle"]),
    "released behaviour": (
        "train_pgd",
        [*DDN, 64, "--released-behaviour", "--warmup", 1],
    ),
    "crops and mirror images": (
        "train",
        ["--noise", 0.25, "--crop-padding", 1, "--horizontal-flip"],
    ),
    "bf16": ("train_pgd", [*PGD, "--warmup", 0, "--precision", "bf16"]),
    "acr-weakness": (
        "train",
        [
            *("--objective", "acr-weakness", "--noise", 0.25, "--num-noise-vec", 1),
            *("--attack-from-epoch", 1, "--drop-below", 0, "--resample-every", 1),
        ],
    ),
    "smoothmix": (
        "train",
        ["--objective", "smoothmix", "--noise", 0.25, "--warmup", 3, "--one-step-adversary"],
    ),
    "cat-rs": (
        "train",
        ["--objective", "cat-rs", "--noise", 0.25, "--noise-steps", 1, "--teacher-draws", 8],
    ),
    "distillation": ("train", ["--objective", "distillation", "--noise", 0.25, "--transfer", 0.5]),
    "consistency": ("train", ["--objective", "consistency", "--noise", 0.25]),
    "macer": ("train", ["--objective", "macer", "--noise", 0.25, "--num-noise-vec", 4]),
    "stability": ("train", ["--objective", "stability", "--noise", 0.25]),
    "AdamW": ("train", ["--noise", 0.25, "--optimizer", "adamw", "--lr", 0.003]),
    "ft-cadis": (
        "train",
        [
            *("--objective", "ft-cadis", "--noise", 0.5, "--num-noise-vec", 2, "--noise-steps", 1),
            *("--optimizer", "adamw", "--lr", 0.003, "--lr-schedule", "cosine", "--lr-rise", 1),
            *("--weight-decay-end", 0.1, "--clip-gradients", 0.3, "--batch", 8),
        ],
    ),
}


# The others go on in the same way as one of these.
TYPICAL = [
    *("gaussian", "PGD", "self-training", "acr-weakness"),
    *("smoothmix", "macer", "distillation", "ft-cadis"),
]
# After these updates: within an epoch, and with the last one of an epoch, before its test.
WITHIN, LAST = (1, 0, 1), (STEPS, 0, STEPS)


@pytest.mark.parametrize(
    ("way", "stops"),
    [
        ("gaussian", [WITHIN, LAST, (5, 1, 2)]),
        *((way, [(4, 1, 1)]) for way in TYPICAL[1:]),
        *(
            pytest.param(way, [LAST, (4, 1, 1)], marks=pytest.mark.slow)
            for way in WAYS
            if way not in TYPICAL
        ),
    ],
)
def test_stops_within_epochs_leave_no_trace(
    way, stops, tmp_path, capsys, two_epochs, checkpoint, monkeypatch
):
    """Terms of the loss go on, too. Each stop is an update from the first one on, and the epoch and
    the step of the checkpoint.
    """
    train_on_few_images(monkeypatch, 100)
    command, options = WAYS[way]
    terms = OBJECTIVES[way].TERMS if way in OBJECTIVES else ()
    if way == "self-training":
        options = [*options, "--use-unlabelled", pseudo_labelled(tmp_path)]
    if way in ("cat-rs", "distillation"):
        options = [*options, "--teacher", two_epochs[0] / "checkpoint.pth.tar"]
    if way == "macer":  # of a network without a right answer the hinge is 0
        options = [*options, "--pretrained-model", checkpoint]
    if way == "ft-cadis":
        options = [*options, "--denoiser", f"openai:{small_unet(tmp_path)}"]
    options, kind = [*SMALL, "--epochs", 2, *options], torch.optim.SGD
    if "adamw" in options:
        kind = torch.optim.AdamW
    succeed(command, *TRAINING, tmp_path / "whole", *options)
    done, stopped = 0, tmp_path / "stopped"
    for last, *saved in stops:
        with pytest.MonkeyPatch.context() as patch:
            after_update(patch, last - done, send, kind)
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
        after_update(patch, 2, send)
        assert call(capsys, "train", *options).code == 143
    before = read(tmp_path)["seconds"]
    assert before > 3
    succeed("train", *options, "--resume")
    assert float(rows(tmp_path / "log.txt")[0]["time"]) > before + 1


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory) -> list[Path]:
    """A run after its first and after its second epoch."""
    folders = [tmp_path_factory.mktemp("trained") / "run" for _ in range(2)]
    for epochs, folder in enumerate(folders, start=1):
        succeed("train", *TRAINING, folder, *RECIPE, "--epochs", epochs)
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
    succeed("train", *TRAINING, run, *RECIPE, "--resume")
    assert same_state(run, two_epochs[1]) and timeless(run / "log.txt") == timeless(
        two_epochs[1] / "log.txt"
    )
    assert sorted(path.name for path in run.iterdir()) == FILES


STOPPED = {signal.SIGTERM: (143, "stopped by SIGTERM"), signal.SIGINT: (130, "interrupted")}


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


@pytest.fixture
def whole(two_epochs) -> Path:
    """A run that nothing disturbed."""
    return two_epochs[1]


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

        after_update(patch, 2, lambda: patch.setattr(os, "fsync", signalled))
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

    outcome = train_acting(capsys, tmp_path, STEPS + 2 if saved else 2, twice)
    assert outcome.code == 130
    assert_one_line(outcome.err, "interrupted", "--resume")
    assert (tmp_path / "checkpoint.pth.tar").exists() == saved
    if saved:
        assert (read(tmp_path)["epoch"], read(tmp_path)["step"]) == (1, 0)
    assert_resumes(capsys, tmp_path, whole)


@pytest.mark.parametrize(
    ("update", "sent", "kept"),
    [
        (5, [signal.SIGTERM], (1, 2)),
        (5, [signal.SIGINT], (1, 2)),
        (1, [signal.SIGTERM], (0, 1)),
        (2 * STEPS, [signal.SIGTERM], (1, STEPS)),
        (2, [signal.SIGINT, signal.SIGINT], (0, 2)),
        (2, [signal.SIGTERM, signal.SIGINT], (0, 2)),
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
        outcome = train_acting(capsys, tmp_path, 2, lambda: send(signal.SIGINT))
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
        ("loss", 5, "", (1, 0)),
        ("loss", 5, "saved often", (1, 1)),
        pytest.param("loss", 6, "saved often", (1, 2), marks=pytest.mark.slow),
        ("loss", 1, "saved often", None),
        pytest.param("loss", 2, "", None, marks=pytest.mark.slow),
        ("weights", 5, "saved often", (1, 1)),
        ("weights", 5, "stopped", (1, 0)),
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
