"""The state of a job, judged by its files; files made with other settings neither count as done nor
are replaced.
"""

import json
import os
import shutil
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from smoothadv.records.logs import manifest_path
from smoothadv.sweep.job_record import BusyError
from smoothadv.sweep.jobs import Job, StateKind, state_of
from smoothadv.sweep.stages import StageProgress
from support.commands import call, rows, snapshot, succeed, timeless
from support.patience import wait_for
from support.sweeping import (
    CERTIFY,
    FIXED,
    do,
    finish,
    held_by_another,
    is_locked,
    jobs_of,
    write_grid,
)

pytestmark = pytest.mark.usefixtures("workplace")
NOISE = {"noise": 0.25}
ATTACK = {"max": 3, "N": 100, "num-steps": 1, "num-noise-vec": 2, "epsilon": [0.25, 0.5]}
FOLDER = Path("gaussian/digits/digits_resnet8/noise_0.25")
LOG = Path("logs/grid", FOLDER, "test/sigma_0.25.tsv")
MODEL = Path("models/grid", FOLDER)


def next_progress(job: Job) -> StageProgress:
    """How far the first unfinished stage has come."""
    reached = [stage.progress() for stage in job.stages]
    return next(progress for progress in reached if not progress.is_complete)


def the_job(fixed: dict = FIXED, certify: dict = CERTIFY, **further) -> Job:
    """The job of a grid of one model, in the working folder."""
    (job,) = jobs_of(
        write_grid(Path("grid.toml"), NOISE, fixed=fixed, certify=[certify], **further)
    )
    return job


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder in which all of the job's stages were done."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finish(the_job())
    return folder


@pytest.fixture
def done(finished, workplace) -> Job:
    """The finished job, in a folder of its own."""
    shutil.copytree(finished, workplace, dirs_exist_ok=True)
    return the_job()


def kind(job: Job) -> StateKind:
    return state_of(job).kind


def artefacts() -> dict:
    """Models and logs, without the records of jobs."""
    everything = snapshot(Path.cwd())
    return {
        path: content for path, content in everything.items() if "/" in path and "job." not in path
    }


def test_job_without_files_waits():
    job = the_job()
    assert state_of(job).kind is StateKind.WAITING and state_of(job).detail == ""
    assert (next_progress(job).done, next_progress(job).total) == (0, 2)
    assert not Path("models").exists() and not Path("logs").exists(), "to look changes nothing"


def test_job_is_done_by_its_artefacts_whatever_the_record_says(done):
    assert kind(done) is StateKind.DONE
    for state in ("failed", "running", "stopped", "queued", "done"):
        done.record.write(state, line="no", stage="train")
        assert kind(done) is StateKind.DONE


def test_record_that_says_done_is_no_artefact_and_one_that_cannot_be_read_none():
    job = the_job()
    job.record.folder.mkdir(parents=True)
    job.record.write("done")
    assert kind(job) is StateKind.STOPPED
    for content in ("", "{", "[]", "5", '"done"', "\0"):
        (job.record.folder / "job.json").write_text(content)
        assert kind(job) is StateKind.WAITING, content
    (job.record.folder / "job.json").unlink()
    assert kind(job) is StateKind.WAITING


def test_record_says_why_a_job_failed_and_where_it_waits():
    job = the_job()
    job.record.folder.mkdir(parents=True)
    job.record.write("failed", stage="train", line="error: no disk")
    assert kind(job) is StateKind.FAILED and "train: error: no disk" in state_of(job).detail
    job.record.write("queued", id="12_3")
    assert kind(job) is StateKind.WAITING and "12_3" in state_of(job).detail


def test_incomplete_epochs_are_not_done_and_the_rest_is_added():
    job = the_job()
    do(job.training, "--epochs", 1)
    state = state_of(job)
    assert state.kind is StateKind.STOPPED and state.detail == "train: 1 of 2 epochs"
    do(job.training)
    assert job.training.progress().is_complete
    assert state_of(job).kind is StateKind.STOPPED and "certify" in state_of(job).detail


def test_torn_last_line_of_a_training_log_is_no_epoch(done):
    log = done.training.folder / "log.txt"
    log.write_bytes(log.read_bytes()[:-3])
    assert kind(done) is StateKind.STOPPED and next_progress(done).done == 1


@pytest.mark.parametrize("torn", [0, 1, 7])
def test_missing_and_torn_rows_are_made_again_and_no_others(done, torn):
    log = done.evaluations[0].logs[0]
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:4]) + lines[4][:torn])
    state = state_of(done)
    assert state.kind is StateKind.STOPPED and "3 of 5 images" in state.detail
    Path("whole.tsv").write_bytes(whole)
    do(done.evaluations[0])
    assert kind(done) is StateKind.DONE
    assert log.read_bytes().startswith(b"".join(lines[:4])) and timeless(log) == timeless(
        Path("whole.tsv")
    )


@pytest.mark.parametrize(
    "lost", [LOG, LOG.with_name(f"{LOG.name}.manifest.json")], ids=["rows", "manifest"]
)
def test_log_without_its_other_half_is_not_done(done, lost):
    lost.unlink()
    assert kind(done) in (StateKind.STOPPED, StateKind.FAILED)


def test_no_checkpoint_is_no_model_and_logs_of_it_are_not_trained_for_again(done):
    done.training.checkpoint.unlink()
    state = state_of(done)
    assert (
        state.kind is StateKind.FAILED and "is gone: put it back, or remove the log" in state.detail
    )
    assert next_progress(done).done == 0


def changed_file() -> None:
    """Replace the certified weights by others."""
    path = MODEL / "checkpoint.pth.tar"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "runs": []}, path)


def other_seed() -> None:
    shutil.rmtree(MODEL)
    succeed(
        "train",
        "digits",
        "digits_resnet8",
        MODEL,
        "--noise",
        0.25,
        "--recipe",
        "smoke",
        "--seed",
        1,
    )


def with_field(path: Path, part: str, field: str, value: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, part: {**content[part], field: value}}))


denoised_log = partial(with_field, manifest_path(LOG), "settings", "denoiser", {"sha256": "0"})
pretrained_model = partial(with_field, MODEL / "args.json", "recipe", "pretrained", True)
CONFLICTS = {
    "added denoiser": (
        None,
        FIXED,
        {**CERTIFY, "denoiser": "diffusers:x"},
        ["denoiser than diffusers:x"],
    ),
    "other denoiser": (
        denoised_log,
        FIXED,
        {**CERTIFY, "denoiser": "grid.toml"},
        ["denoiser than grid.toml"],
    ),
    "no denoiser": (denoised_log, FIXED, CERTIFY, [str(LOG), "another denoiser than none"]),
    "pretrained": (pretrained_model, FIXED, CERTIFY, [str(MODEL), "pretrained was True, now None"]),
    "N": (None, FIXED, {**CERTIFY, "N": 300}, ["N was 200, now 300"]),
    "alpha": (None, FIXED, {**CERTIFY, "alpha": 0.01}, ["alpha was 0.001, now 0.01"]),
    "procedure": (
        None,
        FIXED,
        {**CERTIFY, "method": "adaptive"},
        ["method was 'exact', now 'adaptive'"],
    ),
    "sound": (None, FIXED, {**CERTIFY, "sound": True}, ["sound was False, now True"]),
    "batch": (None, FIXED, {**CERTIFY, "batch": 50}, ["batch was 200, now 50"]),
    "compile": (None, FIXED, {**CERTIFY, "compile": True}, ["compiled was False, now True"]),
    "learning rate": (
        None,
        {**FIXED, "lr": 0.02},
        CERTIFY,
        [str(MODEL), "learning_rate was 0.01, now 0.02"],
    ),
    "seed": (None, {**FIXED, "seed": 1}, CERTIFY, [str(MODEL), "seed was 0, now 1"]),
    "input layer": (None, {**FIXED, "input-layer": "center"}, CERTIFY, [str(MODEL), "input_layer"]),
    "fewer epochs": (None, {**FIXED, "epochs": 1}, CERTIFY, [str(MODEL), "epochs"]),
    "retrained with another seed": (other_seed, FIXED, CERTIFY, [str(MODEL), "seed was 1, now 0"]),
    "another checkpoint": (
        changed_file,
        FIXED,
        CERTIFY,
        [str(LOG), str(MODEL / "checkpoint.pth.tar")],
    ),
}


@pytest.mark.parametrize("what", CONFLICTS)
def test_files_of_other_settings_are_neither_done_nor_replaced(done, capsys, what):
    change, fixed, certify, words = CONFLICTS[what]
    if change is not None:
        change()
    job = the_job(fixed, certify)
    state = state_of(job)
    assert state.kind is StateKind.FAILED, state
    assert [word for word in words if word not in state.detail] == [], state.detail
    before = artefacts()
    for action, output in (("run", "nothing to do"), ("retry", "failed")):
        outcome = call(capsys, "sweep", action, "grid.toml", "--device", "cpu")
        assert outcome.code == 1 and output in outcome.out and words[-1] in outcome.err
        assert artefacts() == before
    assert not job.record.log.exists(), "no command was started for nothing"


def test_smaller_steps_through_the_images_add_what_is_missing(capsys):
    """From every sixth image to every third: except for the order, the log equals one made at
    once.
    """
    finish(the_job(certify={"skip": 6, "N": 100}))
    first = LOG.read_bytes()
    job = the_job(certify={"skip": 3, "N": 100})
    assert kind(job) is StateKind.STOPPED and not job.evaluations[0].progress().is_complete
    do(job.evaluations[0])
    assert kind(job) is StateKind.DONE and LOG.read_bytes().startswith(first)
    direct = list(job.evaluations[0].words)
    succeed(*direct[:4], "direct.tsv", *direct[5:])
    assert len(rows(LOG)) == 120
    assert sorted(timeless(LOG), key=lambda row: int(row["idx"])) == timeless(Path("direct.tsv"))
    assert kind(the_job(certify={"skip": 6, "N": 100})) is not StateKind.DONE, (
        "for it says more than was asked for"
    )


def test_each_log_of_an_attack_counts(done):
    job = the_job(attack=[ATTACK])
    assert kind(job) is StateKind.STOPPED and job.evaluations[0].progress().is_complete
    do(job.evaluations[1])
    assert kind(job) is StateKind.DONE and (job.evaluations[1].progress().done, kind(done)) == (
        6,
        StateKind.DONE,
    )
    log = job.evaluations[1].logs[1]
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    assert kind(job) is StateKind.STOPPED and "5 of 6 images" in state_of(job).detail
    assert kind(the_job(attack=[{**ATTACK, "num-steps": 2}])) is StateKind.FAILED


def test_job_that_needs_a_file_is_blocked_until_it_is_there(done):
    shutil.copy(done.training.checkpoint, "other.pth.tar")
    start = {**FIXED, "pretrained-model": "other.pth.tar"}
    assert kind(the_job(start)) is StateKind.WAITING
    Path("other.pth.tar").rename("away.pth.tar")
    state = state_of(the_job(start))
    assert state.kind is StateKind.BLOCKED and "other.pth.tar" in state.detail
    Path("away.pth.tar").rename("other.pth.tar")
    job = the_job(start)
    finish(job)
    assert kind(job) is StateKind.DONE
    Path("other.pth.tar").unlink()
    assert kind(job) is StateKind.DONE, "what is complete needs nothing"
    job.evaluations[0].logs[0].write_bytes(LOG.read_bytes()[:40])
    assert kind(job) in (StateKind.STOPPED, StateKind.FAILED), "and what is left does not need it"


def test_other_weights_to_start_from_make_another_model(done):
    shutil.copy(done.training.checkpoint, "other.pth.tar")
    start = {**FIXED, "pretrained-model": "other.pth.tar"}
    finish(the_job(start))
    assert kind(the_job(start)) is StateKind.DONE
    content = torch.load("other.pth.tar", weights_only=True)
    torch.save({**content, "epoch": 99}, "other.pth.tar")
    state = state_of(the_job(start))
    assert state.kind is StateKind.FAILED and "pretrained" in state.detail


@pytest.fixture
def begun() -> Job:
    """A job with a lock file and a record that says that another process works on it."""
    job = the_job()
    with job.record.claim(0):
        job.record.write("running", stage="train")
    return job


def say_host(job: Job, host: str, seconds_ago: float) -> None:
    """Write the record and the sign of life of a ``host`` that touched the job ``seconds_ago``."""
    file = job.record.folder / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": host}))
    moment = time.time() - seconds_ago
    os.utime(job.record.folder / "job.lock", (moment, moment))


def test_record_of_a_process_that_died_here_is_no_holder(begun):
    assert begun.record.holder() == "" and kind(begun) is StateKind.STOPPED
    assert begun.record.read()["host"] == socket.gethostname()
    with begun.record.claim(0):
        pass


@pytest.mark.parametrize("state", ["running", "failed", "done", None])
def test_holder_of_the_lock_works_on_the_job_whatever_the_record_says(state):
    job = the_job()
    if state:
        job.record.folder.mkdir(parents=True)
        job.record.write(state, line="x")
    with held_by_another(job.record.folder / "job.lock"):
        assert kind(job) is StateKind.RUNNING and job.record.holder()
        with pytest.raises(BusyError), job.record.claim(0):
            pass
    assert job.record.holder() == "" and kind(job) is not StateKind.RUNNING


def test_readers_of_the_lock_do_not_see_each_other(begun):
    assert not is_locked(begun.record.folder / "job.lock")
    with begun.record.claim(0):
        assert is_locked(begun.record.folder / "job.lock")
        assert [begun.record.holder() != "" for _ in range(3)] == [True] * 3
        with pytest.raises(BusyError), begun.record.claim(0):
            pass
    assert not is_locked(begun.record.folder / "job.lock")


def test_sign_of_life_of_another_machine_counts_for_a_while(begun):
    say_host(begun, "elsewhere", seconds_ago=1)
    state = state_of(begun)
    assert state.kind is StateKind.RUNNING and "elsewhere" in state.detail
    with pytest.raises(BusyError) as refused, begun.record.claim(0):
        pass
    assert "elsewhere" in str(refused.value)
    say_host(begun, "elsewhere", seconds_ago=-20)
    assert "elsewhere" in begun.record.holder(), "clocks may differ a little"
    for seconds in (3600, -86_400):  # a file from tomorrow is no sign of life either
        say_host(begun, "elsewhere", seconds_ago=seconds)
        assert begun.record.holder() == "" and kind(begun) is StateKind.STOPPED
    file = begun.record.folder / "job.lock"
    with begun.record.claim(0):
        wait_for(lambda: time.time() - file.stat().st_mtime < 1800)  # a sign of life of its own


def test_other_machines_that_have_finished_do_not_count(begun):
    begun.record.write("failed", stage="train", line="x")
    say_host(begun, "elsewhere", seconds_ago=1)
    assert begun.record.holder() == "" and kind(begun) is StateKind.FAILED


@pytest.mark.parametrize("selection", [{"max": 5, "skip": 1}, {"max": 3}, {"skip": 2, "max": 3}])
def test_log_is_whole_by_its_rows_if_it_holds_no_others(done, selection):
    """How the run that wrote it selected its images does not matter."""
    job = the_job(certify={**CERTIFY, **selection})
    # Other images in it are reported, and never count as the selected ones.
    assert kind(job) is (StateKind.DONE if selection == {"max": 5, "skip": 1} else StateKind.FAILED)
    assert kind(the_job(certify={**CERTIFY, "max": 6})) is StateKind.STOPPED


def test_log_without_a_byte_is_none(done):
    """A full disk may leave an empty log without a manifest; the command begins it anew."""
    LOG.write_bytes(b"")
    Path(f"{LOG}.manifest.json").unlink()
    assert kind(done) is StateKind.STOPPED
    do(done.evaluations[0])
    assert kind(done) is StateKind.DONE


def test_training_does_not_start_from_an_unfinished_model(done):
    """Its checkpoint exists, but lacks an epoch."""
    start = {**FIXED, "pretrained-model": str(MODEL / "checkpoint.pth.tar"), "seed": 1}
    assert kind(the_job(start)) is StateKind.WAITING
    log = MODEL / "log.txt"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    state = state_of(the_job(start))
    assert state.kind is StateKind.BLOCKED and "which has 1 of 2 epochs" in state.detail
