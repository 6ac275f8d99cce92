"""The state of a job, judged by its files; files made with other settings neither count as done nor
are replaced. Second stages: the best models are certified on more images, and ensembles evaluated.

Commands are faked: tests/sweep/test_planning.py shows that real ones write what is expected here.
"""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from smoothadv.analysis.facts import facts_of
from smoothadv.records.logs import manifest_path, recorded_settings
from smoothadv.sweep.jobs import (
    BLOCKED,
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    WAITING,
    BusyError,
    SweepJob,
    state_of,
)
from smoothadv.sweep.stages import unmet_need
from support.commands import call, rows, snapshot
from support.sweeping import (
    CERTIFY,
    FIXED,
    fake,
    fake_commands,
    finish,
    jobs_of,
    write_grid,
)

pytestmark = pytest.mark.usefixtures("workplace")
ATTACK = {"max": 3, "N": 100, "num-steps": 1, "num-noise-vec": 2, "epsilon": [0.25, 0.5]}
GRID = Path("grid.toml")
HERE = "digits/digits_resnet8/noise_0.25"
LOG = Path("logs/grid/gaussian", HERE, "test/sigma_0.25.tsv")
MODEL = Path("models/grid/gaussian", HERE)
OTHER = Path("other.pth.tar")
PRETRAINED = {**FIXED, "pretrained-model": str(OTHER)}


def the_job(fixed: dict = FIXED, certify: dict = CERTIFY, **further) -> SweepJob:
    """The job of a grid of one model, in the working folder."""
    (job,) = jobs_of(write_grid(GRID, {"noise": 0.25}, fixed=fixed, certify=[certify], **further))
    return job


@pytest.fixture
def done() -> SweepJob:
    """The job, all of whose stages were done."""
    job = the_job()
    finish(job)
    return job


def kind(job: SweepJob) -> str:
    return state_of(job).kind


def keep_lines(path: Path, count: int, torn: int = 0) -> None:
    """Keep the first lines of a file, and the beginning of another."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:count]) + lines[count][:torn])


def set_field(path: Path, part: str, field: str, value: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, part: {**content[part], field: value}}))


def empty_log() -> None:
    """As a full disk may leave it: without a manifest. The command begins it anew."""
    LOG.write_bytes(b"")
    manifest_path(LOG).unlink()


CHANGES = {
    "nothing": (lambda: None, DONE, ""),
    "torn epoch": (lambda: keep_lines(MODEL / "log.txt", 2, 5), STOPPED, "train: 1 of 2 epochs"),
    "no epoch": (lambda: keep_lines(MODEL / "log.txt", 1), STOPPED, "train: 0 of 2 epochs"),
    "rows missing": (lambda: keep_lines(LOG, 4), STOPPED, "certify sigma_0.25: 3 of 5 images"),
    "torn row": (lambda: keep_lines(LOG, 4, 7), STOPPED, "3 of 5 images"),
    "no rows": (LOG.unlink, STOPPED, "0 of 5 images"),
    "no manifest": (lambda: manifest_path(LOG).unlink(), FAILED, "is missing or unreadable"),
    "empty log": (empty_log, STOPPED, "0 of ? images"),
    "no checkpoint": ((MODEL / "checkpoint.pth.tar").unlink, FAILED, "another model than"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_state_is_that_of_the_files(done, what):
    change, expected, detail = CHANGES[what]
    change()
    state = state_of(done)
    assert state.kind is expected and detail in state.detail, state


def test_job_that_has_begun_is_stopped_until_all_is_done():
    job = the_job(attack=[ATTACK])
    fake(job.training, epochs=1)
    assert (kind(job), state_of(job).detail) == (STOPPED, "train: 1 of 2 epochs")
    for stage in job.stages:
        assert kind(job) is STOPPED
        fake(stage)
    assert kind(job) is DONE and job.evaluations[1].progress().done == 6
    keep_lines(job.evaluations[1].logs[1], 3)
    assert kind(job) is STOPPED and "5 of 6 images" in state_of(job).detail
    assert kind(the_job(attack=[{**ATTACK, "num-steps": 2}])) is FAILED


@pytest.mark.parametrize("state", ["failed", "running", "stopped", "queued", "done"])
def test_job_is_done_by_its_artefacts_whatever_the_record_says(done, state):
    done.record.folder.mkdir(parents=True, exist_ok=True)
    done.record.write(state, line="no", stage="train")
    assert kind(done) is DONE


RECORDS = {
    "done": ({"state": "done"}, STOPPED, ""),
    "failed": ({"state": "failed", "stage": "train", "line": "no disk"}, FAILED, "train: no disk"),
    "queued": ({"state": "queued", "id": "12_3"}, WAITING, "12_3"),
}


@pytest.mark.parametrize("what", RECORDS)
def test_record_says_what_the_files_cannot(what):
    content, expected, detail = RECORDS[what]
    job = the_job()
    job.record.folder.mkdir(parents=True)
    (job.record.folder / "job.json").write_text(json.dumps(content))
    assert kind(job) is expected and detail in state_of(job).detail
    for broken in ("", "{", "\0"):
        (job.record.folder / "job.json").write_text(broken)
        assert kind(job) is WAITING


def denoised_log() -> None:
    set_field(manifest_path(LOG), "settings", "denoiser", {"sha256": "0"})


CONFLICTS = {
    "added denoiser": (None, {}, {"denoiser": "diffusers:x"}, ["denoiser than diffusers:x"]),
    "other denoiser": (denoised_log, {}, {"denoiser": "grid.toml"}, ["denoiser than grid.toml"]),
    "other file of OpenAI": (
        denoised_log,
        *({}, {"denoiser": "openai:grid.toml"}, ["denoiser than openai:grid.toml"]),
    ),
    "no denoiser": (denoised_log, {}, {}, [str(LOG), "another denoiser than none"]),
    "pretrained": (
        lambda: set_field(MODEL / "args.json", "recipe", "pretrained", True),
        *({}, {}, [str(MODEL), "pretrained was True, now False"]),
    ),
    "N": (None, {}, {"N": 300}, ["N was 200, now 300"]),
    "alpha": (None, {}, {"alpha": 0.01}, ["alpha was 0.001, now 0.01"]),
    "procedure": (None, {}, {"method": "adaptive"}, ["method was 'exact', now 'adaptive'"]),
    "sound": (None, {}, {"sound": True}, ["sound was False, now True"]),
    "batch": (None, {}, {"batch": 50}, ["batch was None, now 50"]),
    "compile": (None, {}, {"compile": True}, ["compiled was False, now True"]),
    "fewer images": (None, {}, {"max": 3}, ["has image 3, which is not selected here"]),
    "larger steps": (None, {}, {"skip": 2}, ["has image 1, which is not selected here"]),
    "learning rate": (None, {"lr": 0.02}, {}, [str(MODEL), "learning_rate was 0.01, now 0.02"]),
    "seed": (None, {"seed": 1}, {}, [str(MODEL), "seed was 0, now 1"]),
    "input layer": (None, {"input-layer": "center"}, {}, [str(MODEL), "input_layer"]),
    "fewer epochs": (None, {"epochs": 1}, {}, [str(MODEL), "epochs"]),
    "more epochs": (None, {"epochs": 3}, {}, [str(LOG), "of 2 epochs in", "to 3 would replace"]),
    "retrained with another seed": (
        lambda: fake(the_job({**FIXED, "seed": 1}).training),
        *({}, {}, [str(MODEL), "seed was 1, now 0"]),
    ),
    "another checkpoint": (
        lambda: (MODEL / "checkpoint.pth.tar").write_text("{}"),
        *({}, {}, [str(LOG), str(MODEL / "checkpoint.pth.tar")]),
    ),
}


@pytest.mark.parametrize("what", CONFLICTS)
def test_files_of_other_settings_are_neither_done_nor_replaced(done, capsys, what):
    change, fixed, certify, words = CONFLICTS[what]
    if change is not None:
        change()
    job = the_job({**FIXED, **fixed}, {**CERTIFY, **certify})
    state = state_of(job)
    assert state.kind is FAILED, state
    assert [word for word in words if word not in state.detail] == [], state.detail
    before = artefacts()
    for action, output in (("run", "nothing to do"), ("retry", "failed")):
        outcome = call(capsys, "sweep", action, "grid.toml", "--device", "cpu")
        assert outcome.code == 1 and output in outcome.out and words[-1] in outcome.err
        assert "give the grid other" in outcome.err
        assert artefacts() == before
    assert not job.record.log.exists(), "no command was started for nothing"


def artefacts() -> dict:
    """Models and logs, without the records of jobs."""
    everything = snapshot(Path.cwd())
    return {path: everything[path] for path in everything if "/" in path and "job." not in path}


@pytest.mark.parametrize(
    ("first", "then"), [({"skip": 6}, {"skip": 3}), ({"max": 5}, {"max": 6}), ({"max": 5}, {})]
)
def test_more_images_are_added_to_a_log(first, then):
    finish(the_job(certify={"N": 100, **first}))
    more = the_job(certify={"N": 100, **then})
    assert kind(more) is STOPPED
    fake(more.evaluations[0])
    assert kind(more) is DONE and kind(the_job(certify={"N": 100, **first})) is FAILED


def test_job_that_needs_a_file_is_blocked_until_it_is_there(done):
    state = state_of(the_job(PRETRAINED))
    assert state.kind is BLOCKED and str(OTHER) in state.detail
    shutil.copy(done.training.checkpoint, OTHER)
    job = the_job(PRETRAINED)
    assert kind(job) is WAITING
    finish(job)
    OTHER.unlink()
    assert kind(job) is DONE, "what is complete needs nothing"
    keep_lines(job.evaluations[0].logs[0], 3)
    assert kind(job) is STOPPED, "and what is left does not need it"


def test_other_weights_to_start_from_make_another_model():
    OTHER.write_text("{}")
    finish(the_job(PRETRAINED))
    assert kind(the_job(PRETRAINED)) is DONE
    OTHER.write_text("[]")
    state = state_of(the_job(PRETRAINED))
    assert state.kind is FAILED and "pretrained" in state.detail


def test_a_student_waits_for_the_teacher_and_is_not_that_of_another_one():
    teacher = MODEL / "checkpoint.pth.tar"
    student = {"noise": 0.25, "objective": "cat-rs", "teacher": str(teacher), "group": "B"}
    first, second = jobs_of(write_grid(GRID, student, {"noise": 0.25}))
    assert kind(first) is BLOCKED and str(teacher) in state_of(first).detail
    for job in (second, first):
        assert kind(job) is WAITING
        finish(job)
    assert kind(first) is DONE
    teacher.write_bytes(b"another one")
    assert kind(first) is FAILED and "teacher_sha256" in state_of(first).detail


def test_no_file_of_the_hub_is_waited_for():
    hub = {"objective": "cat-rs", "teacher": "hf-hub:me/teacher", "pretrained-model": "hf-hub:a/b"}
    assert kind(the_job({**FIXED, **hub}, {**CERTIFY, "denoiser": "hf-hub:a/d"})) is WAITING


def test_training_does_not_start_from_an_unfinished_model(done):
    """Its checkpoint exists, but lacks an epoch."""
    start = {**FIXED, "pretrained-model": str(MODEL / "checkpoint.pth.tar"), "seed": 1}
    assert kind(the_job(start)) is WAITING
    keep_lines(MODEL / "log.txt", 2)
    state = state_of(the_job(start))
    assert state.kind is BLOCKED and "which has 1 of 2 epochs" in state.detail


@pytest.mark.parametrize("epochs", ["9", None, [9]])
def test_checkpoint_beside_arguments_of_others_can_be_used(epochs):
    Path("args.json").write_text(json.dumps({"runs": [{"epochs": epochs}]}))
    checkpoint = Path("checkpoint.pth.tar")
    checkpoint.touch()
    assert unmet_need(checkpoint) == ""


@pytest.mark.parametrize("state", ["running", "failed", "done"])
def test_holder_of_the_lock_works_on_the_job_whatever_the_record_says(state):
    job = the_job()
    with job.record.claim(0):
        job.record.write(state, line="x")
        assert kind(job) is RUNNING
        assert job.record.holder() == f"{socket.gethostname()}, process {os.getpid()}"
        with pytest.raises(BusyError, match="is being worked on"), job.record.claim(0):
            pass
    assert job.record.holder() == "" and kind(job) is not RUNNING


# The best models, and ensembles


SWEEP = {"noise": [0.25, 0.5, 1.0], "group": "A"}
FEW = {"name": "all", "max": 5, "N": 200}
MORE = {"name": "more", "max": 9, "N": 300}
HERE = "digits/digits_resnet8/noise_0.25"


def log(noise: str, name: str) -> Path:
    folder = f"logs/grid/gaussian/digits/digits_resnet8/noise_{noise}"
    return Path(folder, f"test/sigma_{noise}_{name}.tsv")


def sweep(capsys, action: str, *options: object):
    return call(capsys, "sweep", action, GRID, "--device", "cpu", *options)


@pytest.mark.parametrize(
    ("best", "is_whole", "begun", "made"),
    [
        ("all", True, "2 stopped, 1 done", ["0.25", "0.50"]),
        (
            True,
            False,
            "1 stopped, 2 done; the best models, for 'more', are not known yet",
            ["1.00"],
        ),
    ],
)
def test_best_models_are_certified_on_more_images_as_soon_as_all_have_been_compared(
    best, is_whole, begun, made, capsys, monkeypatch
):
    """At noise 0.25 one of three models is best at radius 0.25, at 0.5 one up to 0.75, until the
    log of the third one is made anew in the same run, where it is the best at all radii.
    """
    fake_commands(monkeypatch)
    write_grid(GRID, SWEEP, certify=[FEW, {**MORE, "best": best}])
    for job, certified in zip(jobs_of(GRID), (4, 3, 0)):
        finish(job, certified)
    kept = log("1.00", "all").read_text()
    log("1.00", "all").write_text("".join(kept.splitlines(keepends=True)[:-1]))
    assert all([table.name for table in job.pending] == ["more"] for job in jobs_of(GRID))
    assert sweep(capsys, "plan").out.count("perhaps certify more") == 3
    if is_whole:
        log("1.00", "all").write_text(kept)
    outcome = sweep(capsys, "run")
    first, *_, last, _ = outcome.out.splitlines()
    assert outcome.code == 0 and first.startswith(f"grid: 3 jobs: {begun}")
    assert last == "grid: 3 jobs: 3 done"
    assert [noise for noise in ("0.25", "0.50", "1.00") if log(noise, "more").exists()] == made
    assert {len(rows(log(noise, "more"))) for noise in made} == {9}
    assert "nothing to do" in sweep(capsys, "run").out
    assert sweep(capsys, "report").code == 0
    assert "on other images" in Path("logs/grid/report.html").read_text()


SEEDS = {"noise": 0.25, "seed": [0, 1], "group": "single"}
TOGETHER = Path(f"logs/grid/gaussian/ensemble_of_2_probabilities/{HERE}/test/sigma_0.25.tsv")
MEMBERS = [Path(f"models/grid/gaussian/seed_{seed}/{HERE}/checkpoint.pth.tar") for seed in (0, 1)]


def test_one_run_trains_the_members_and_then_evaluates_them_together(capsys, monkeypatch):
    fake_commands(monkeypatch)
    ensemble = {"of": "single", "mean": "probabilities"}
    attack = {**CERTIFY, "group": "single ensemble", "epsilon": 0.5, "num-steps": 1}
    write_grid(GRID, SEEDS, ensemble=[ensemble], certify=[CERTIFY], attack=[attack])
    together = jobs_of(GRID)[2]
    assert together.training is None and together.group == "single ensemble"
    members = tuple(Path.cwd() / path for path in MEMBERS)
    assert {stage.needs for stage in together.evaluations} == {members}
    outcome = sweep(capsys, "run")
    assert outcome.code == 0, outcome
    assert "3 jobs: 2 waiting, 1 blocked" in outcome.out and "3 jobs: 3 done" in outcome.out
    assert len(recorded_settings(TOGETHER)["checkpoint_sha256"]["probabilities"]) == 2
    found = facts_of("certification", TOGETHER, {})
    # What all members have in common.
    assert found.get("training") == "Gaussian" and found.get("noise") == 0.25
    assert "nothing to do" in sweep(capsys, "run").out
    assert sweep(capsys, "report").code == 0
    assert "single ensemble" in Path("logs/grid/report.html").read_text()
    MEMBERS[1].write_bytes(MEMBERS[0].read_bytes())
    state = state_of(together)
    assert state.kind is FAILED and "another model" in state.detail
    assert f"{MEMBERS[0]} or " in state.detail


def test_members_of_several_architectures_are_named_by_both():
    models = {"noise": [0.25, 0.5], "arch": ["digits_resnet8", "cifar_resnet20"], "group": "A"}
    write_grid(GRID, models, ensemble=[{"of": "A", "over": "arch"}], certify=[CERTIFY])
    names = [job.name for job in jobs_of(GRID) if job.training is None]
    both = "digits/digits_resnet8+cifar_resnet20"
    assert names == [f"gaussian/ensemble_of_2/{both}/noise_{noise}" for noise in ("0.25", "0.50")]


def test_a_member_of_another_recipe_is_not_evaluated():
    """The grid was edited after a member had been trained, so that its own job fails, and the
    ensemble must too.
    """
    for weight_decay in (0.1, 0.5):
        models = {**SEEDS, "weight-decay": weight_decay}
        write_grid(GRID, models, ensemble=[{"of": "single"}], certify=[CERTIFY])
        for job in jobs_of(GRID)[:2] * (weight_decay == 0.1):
            fake(job.training)
    for job in jobs_of(GRID):
        state = state_of(job)
        assert state.kind is FAILED, job.name
        assert "holds a model of another recipe" in state.detail
