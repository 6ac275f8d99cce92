"""A grid of several objectives, really trained: jobs wait for teachers, and analyses know what made
each log.
"""

import json
from pathlib import Path

import pytest

from smoothadv.sweep.jobs import StateKind, state_of
from support.commands import call
from support.sweeping import CERTIFY, finish, jobs_of, write_grid

pytestmark = pytest.mark.usefixtures("workplace")
HERE = "digits/digits_resnet8/noise_0.25"
TEACHER = f"models/grid/gaussian/{HERE}/checkpoint.pth.tar"
FEW = {"noise": 0.25, "num-noise-vec": 2}
CAT_RS = {**FEW, "objective": "cat-rs", "teacher": TEACHER, "teacher-draws": 4, "noise-steps": 3}
ACR = {
    **FEW,
    "objective": "acr-weakness",
    "attack-from-epoch": 1,
    "drop-below": 0.01,
    "optimizer": "adamw",
    "lr": 0.001,
}
ATTACKED = {
    **FEW,
    "objective": "consistency",
    "lambda": 1.5,
    "attack": "PGD",
    "num-steps": 1,
    "epsilon": 0.5,
}


def rows(capsys, *words: object) -> list[dict]:
    return json.loads(
        call(capsys, "analyze", words[0], "logs/grid", *words[1:], "--format", "json").out
    )


def test_job_waits_for_its_teacher_and_analyses_tell_objectives_apart(capsys):
    grid = write_grid(Path("grid.toml"), CAT_RS, ACR, ATTACKED, {"noise": 0.25}, certify=[CERTIFY])
    student, *others, teacher = jobs_of(grid)
    assert (state_of(student).kind, TEACHER in state_of(student).detail) == (
        StateKind.BLOCKED,
        True,
    )
    for job in (teacher, student, *others):
        assert state_of(job).kind is StateKind.WAITING
        finish(job)
    assert {state_of(job).kind for job in jobs_of(grid)} == {StateKind.DONE}
    known = {row["objective"]: row for row in rows(capsys, "parameters")}
    names = (
        "lambda num_steps epsilon eta drop_below attack_from_epoch choose_from_epoch teacher_draws "
        "optimizer"
    )
    names = names.split()
    assert [known["CatRS"][name] for name in names] == [0.5, 3, 1, None, None, None, None, 4, "sgd"]
    assert [known["AcrWeakness"][name] for name in names] == [
        None,
        3,
        None,
        None,
        0.01,
        1,
        1,
        None,
        "adamw",
    ]
    assert [known["Consistency"][name] for name in names] == [
        1.5,
        1,
        0.5,
        0.5,
        None,
        None,
        None,
        None,
        "sgd",
    ]
    assert known["CatRS"]["teacher"] and not known["Gaussian"]["teacher"]
    groups = [
        row["group"] for row in rows(capsys, "envelope", "--group-by", "objective", "--radii", 0)
    ]
    assert groups == [
        f"objective = {name}" for name in ("AcrWeakness", "CatRS", "Consistency", "Gaussian")
    ]
    found = [
        (row["training"], row["sigma"])
        for row in rows(capsys, "summary", "--label-by", "training", "sigma")
    ]
    assert found == [
        ("AcrWeakness", 0.25),
        ("CatRS", 0.25),
        ("Consistency-PGD", 0.25),
        ("Gaussian", 0.25),
    ]
    Path(TEACHER).write_bytes(b"another one")
    state = state_of(student)
    assert state.kind is StateKind.FAILED and "teacher_sha256" in state.detail, (
        "made with another teacher"
    )
