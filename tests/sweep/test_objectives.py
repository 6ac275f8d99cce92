"""A grid of several objectives, faked: jobs wait for teachers, and analyses know what made each
log.
"""

import json
from pathlib import Path

import pytest

from smoothadv.sweep.jobs import BLOCKED, DONE, FAILED, WAITING, state_of
from support.commands import call
from support.sweeping import CERTIFY, finish, jobs_of, write_grid

pytestmark = pytest.mark.usefixtures("workplace")
TEACHER = "models/grid/gaussian/digits/digits_resnet8/noise_0.25/checkpoint.pth.tar"
CAT_RS = {"objective": "cat-rs", "teacher": TEACHER, "teacher-draws": 4, "noise-steps": 3}
ACR = {"objective": "acr-weakness", "attack-from-epoch": 1, "drop-below": 0.01}
ADAMW = {"optimizer": "adamw", "lr": 0.001}
PGD = {"objective": "consistency", "lambda": 1.5, "attack": "PGD", "num-steps": 1, "epsilon": 0.5}
OBJECTIVES = [{"noise": 0.25, "num-noise-vec": 2, **one} for one in (CAT_RS, {**ACR, **ADAMW}, PGD)]


def table(capsys, *words: object) -> list[dict]:
    """The rows of an analysis of all logs."""
    analysis, *options = words
    outcome = call(capsys, "analyze", analysis, "logs/grid", *options, "--format", "json")
    return json.loads(outcome.out)


def test_job_waits_for_no_file_that_is_on_the_hub():
    hub = {"teacher": "hf-hub:me/teacher", "pretrained-model": "hf-hub:me/start"}
    certify = {**CERTIFY, "denoiser": "hf-hub:me/denoiser"}
    grid = write_grid(Path("grid.toml"), {**OBJECTIVES[0], **hub}, certify=[certify])
    assert [state_of(job).kind for job in jobs_of(grid)] == [WAITING]


PARAMETERS = {
    "lambda": (0.5, None, 1.5),
    "num_steps": (3, 3, 1),
    "epsilon": (1, None, 0.5),
    "eta": (None, None, 0.5),
    "drop_below": (None, 0.01, None),
    "attack_from_epoch": (None, 1, None),
    "choose_from_epoch": (None, 1, None),
    "teacher_draws": (4, None, None),
    "optimizer": ("sgd", "adamw", "sgd"),
}


def test_job_waits_for_its_teacher_and_analyses_tell_objectives_apart(capsys):
    grid = write_grid(Path("grid.toml"), *OBJECTIVES, {"noise": 0.25}, certify=[CERTIFY])
    student, *others, teacher = jobs_of(grid)
    state = state_of(student)
    assert state.kind is BLOCKED and TEACHER in state.detail
    for job in (teacher, student, *others):
        assert state_of(job).kind is WAITING
        finish(job)
    assert {state_of(job).kind for job in jobs_of(grid)} == {DONE}
    known = {row["objective"]: row for row in table(capsys, "parameters")}
    trained = [known[name] for name in ("CatRS", "AcrWeakness", "Consistency")]
    assert {name: tuple(row[name] for row in trained) for name in PARAMETERS} == PARAMETERS
    assert known["CatRS"]["teacher"] and not known["Gaussian"]["teacher"]
    rows = table(capsys, "envelope", "--group-by", "objective", "--radii", 0)
    names = ["AcrWeakness", "CatRS", "Consistency", "Gaussian"]
    assert [row["group"] for row in rows] == [f"objective = {name}" for name in names]
    rows = table(capsys, "summary", "--label-by", "training", "sigma")
    names[2] = "Consistency-PGD"
    assert [(row["training"], row["sigma"]) for row in rows] == [(name, 0.25) for name in names]
    Path(TEACHER).write_bytes(b"another one")
    state = state_of(student)
    assert state.kind is FAILED and "teacher_sha256" in state.detail
