"""What scripts/environment.sh installs and .ci/newest.py tries, by what they ask of pip; the versions of the lock."""

import importlib.util
import json
import re
import subprocess
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.clones import make_clone
from support.commands import run_process

# Answers for Python and pip: appends what is asked of pip to `asked`; if there is a file `refuses`, no lock can be had.
PIP = """#!/bin/sh
[ "$1" = -m ] || exit 0
echo "$@" >>asked
case "$*" in *--constraint*) [ ! -e refuses ] || { echo "ERROR: no numpy==9"; echo "more"; exit 1; } >&2 ;; esac
"""
LOCKED = "--constraint requirements.lock"


@pytest.fixture
def enter(tmp_path):
    """Enters a clone as its scripts do; returns what pip was asked for, and what was said on standard error."""
    clone = make_clone(tmp_path)
    (clone / ".venv/bin/python").write_text(PIP)

    def run(**environment: str) -> tuple[list[str], str]:
        (clone / "asked").write_text("")
        done = run_process(["bash", "-euo", "pipefail", "-c", "source scripts/environment.sh"], clone, **environment)
        assert done.returncode == 0
        return (clone / "asked").read_text().splitlines(), done.stderr

    run.clone = clone
    return run


def test_versions_of_the_lock_are_installed_once(enter):
    assert enter() == ([], "")
    with (enter.clone / "requirements.lock").open("a") as lock:
        lock.write("another==1.0\n")
    (asked,), _ = enter()
    assert LOCKED in asked and "--upgrade" not in asked and enter() == ([], "")


def test_newest_versions_are_installed_if_asked_for(enter):
    (asked,), _ = enter(SMOOTHADV_NEWEST="1")
    assert "--upgrade" in asked and LOCKED not in asked and enter(SMOOTHADV_NEWEST="1")[0] == []
    (asked,), _ = enter()
    assert LOCKED in asked, "and those of the lock again without the switch"


def test_other_versions_are_installed_where_those_of_the_lock_cannot_be_had(enter):
    """As on a Python or a platform for which a version was never made."""
    (enter.clone / "refuses").touch()
    (enter.clone / "requirements.lock").write_text("numpy==9\n")
    (first, second), said = enter()
    assert LOCKED in first and LOCKED not in second
    (line,) = said.splitlines()
    assert line.startswith("warning: ") and line.endswith("ERROR: no numpy==9")


def test_lock_names_one_version_of_each_requirement(repository):
    lines = [line for line in (repository / "requirements.lock").read_text().splitlines() if line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "no address, no path, no local version"
    locked = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(locked) == len(lines)
    for text in metadata.requires("smoothadv"):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "test", "python_version": "3.11"}):
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text


@pytest.mark.parametrize("outcome", ["unknown", "none is newer", "cannot be had", "pass", "fail"])
def test_newest_versions_are_tried_where_they_can_be_had(repository, monkeypatch, capsys, outcome):
    spec = importlib.util.spec_from_file_location("newest", repository / ".ci/newest.py")
    newest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(newest)
    monkeypatch.chdir(repository)
    commands = []

    def run(command, **options):
        commands.append(command)
        code = 0
        if "--dry-run" in command:
            found = [] if outcome == "none is newer" else [("numpy", "9.0"), ("smoothadv", "1")]
            entries = [{"metadata": {"name": name, "version": version}} for name, version in found]
            with open(command[command.index("--report") + 1], "w") as report:
                json.dump({"install": entries}, report)
            code = int(outcome == "unknown")
        elif "--target" in command:
            assert command[-1] == "numpy==9.0" and "--no-deps" in command
            code = int(outcome == "cannot be had")
        else:
            assert options["env"]["PYTHONPATH"].startswith(commands[1][commands[1].index("--target") + 1])
            code = int(outcome == "fail")
        return subprocess.CompletedProcess(command, code, "", "ERROR: why\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert newest.main() == (outcome == "fail")
    assert len(commands) == {"unknown": 1, "none is newer": 1, "cannot be had": 2}.get(outcome, 3)
    assert ("ERROR: why" in capsys.readouterr().out) == (outcome in ("unknown", "cannot be had"))
    assert all((repository / test).exists() for test in newest.TESTS)
