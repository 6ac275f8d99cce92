"""Stages that crash, jobs that a missing file blocks, folders that cannot be made, and names of GPUs."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from smoothadv.commands.sweep.command import visible_gpus
from smoothadv.sweeps.job_execution import BLOCKED, DONE, FAILED, STOPPED, execute
from smoothadv.sweeps.jobs import StateKind, state_of
from support.sweeping import Pretended, pretended_job, pretending


@pytest.fixture
def pretend(tmp_path, monkeypatch) -> Mapping[str, str]:
    """The environment of pretended stages, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return pretending(tmp_path / "pretender")


def run(job, environment) -> str:
    return execute(job, environment, threading.Event(), {})


@pytest.mark.parametrize(("number", "name"), [(11, "Segmentation fault"), (6, "Aborted"), (7, "Bus error")])
def test_crash_is_a_failure_that_says_so(pretend, number, name):
    """The crash would come again, so a scheduler must not repeat the job for ever."""
    crash = f"import os; print('nearly there', flush=True); os.kill(os.getpid(), {number})"
    job = pretended_job(Path.cwd(), Pretended(crash, Path.cwd() / "made"))
    assert run(job, pretend) == FAILED
    detail = state_of(job).detail
    assert state_of(job).kind is StateKind.FAILED and f"signal {number}, {name}" in detail and "nearly there" in detail


@pytest.mark.parametrize("number", [1, 2, 10, 15])
def test_end_that_somebody_asked_for_is_no_failure(pretend, number):
    asked = f"import os, signal; signal.signal({number}, signal.SIG_DFL)"
    job = pretended_job(Path.cwd(), Pretended(f"{asked}; os.kill(os.getpid(), {number})", Path.cwd() / "made"))
    assert run(job, pretend) == STOPPED and state_of(job).kind is StateKind.STOPPED


def test_stage_does_not_start_if_a_file_it_needs_is_gone(pretend):
    """The file disappears after the sweep has looked at the job and before the engine starts it."""
    needed, made = Path.cwd() / "needed", Path.cwd() / "made"
    job = pretended_job(Path.cwd(), Pretended(f"open({str(made)!r}, 'w')", made, needs=(needed,)))
    assert run(job, pretend) == BLOCKED and not made.exists()
    assert state_of(job).kind is StateKind.BLOCKED and str(needed) in state_of(job).detail
    needed.touch()
    assert run(job, pretend) == DONE


def test_file_in_place_of_a_jobs_folder_fails_this_job(pretend, capsys):
    job = pretended_job(Path.cwd(), Pretended("pass", Path.cwd() / "made"))
    (Path.cwd() / "stuck").touch()
    job = replace(job, logs=Path.cwd() / "stuck/logs")
    assert run(job, pretend) == FAILED and str(Path.cwd() / "stuck") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "count", "gpus"),
    [
        (None, 2, ("0", "1")),
        ("", 0, ()),
        ("2,3", 2, ("2", "3")),
        ("0, 1,", 2, ("0", "1")),
        ("0,1,-1,2", 2, ("0", "1")),
        ("-1", 0, ()),
        ("GPU-8f,MIG-1/2", 2, ("GPU-8f", "MIG-1/2")),
    ],
)
def test_gpus_have_the_names_of_the_environment_variable(named, count, gpus):
    assert visible_gpus(named, count) == gpus
