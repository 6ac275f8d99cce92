"""Small sweeps for tests: their files, their jobs, and stages that run in this process or are only
pretended.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.sweep.jobs import Job
from smoothadv.sweep.stages import Stage, StageProgress
from support.commands import CODE, ENVIRONMENT, finding, succeed

# Two epochs of three updates.
FIXED = {"dataset": "digits", "arch": "digits_resnet8", "recipe": "smoke"}
CERTIFY = {"max": 5, "N": 200}
Table = Mapping[str, Any]


def grid_text(
    *sweeps: Table,
    fixed: Table = FIXED,
    ensemble: Sequence[Table] = (),
    certify: Sequence[Table] = (),
    attack: Sequence[Table] = (),
    **top: Any,
) -> str:
    """A grid as TOML: its ``sweeps``, ``fixed`` options, ensembles, evaluations, and keys of the
    ``top``.
    """
    tables = [("", top), ("[fixed]", fixed)]
    tables_by_name = {"sweep": sweeps, "ensemble": ensemble, "certify": certify, "attack": attack}
    tables += [
        (f"[[{name}]]", table) for name, several in tables_by_name.items() for table in several
    ]
    # JSON writes texts, numbers, true, false and lists of them as TOML does.
    return "\n".join(
        "\n".join(
            [title, *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items())]
        )
        for title, table in tables
    )


def write_grid(path: Path, *sweeps: Table, **further: Any) -> Path:
    """Write ``grid_text`` to a file; returns its path."""
    path.write_text(grid_text(*sweeps, **further) + "\n")
    return path


def plans_of(path: Path) -> list:
    """The plans of a grid's jobs, on the CPU, in the working folder."""
    from smoothadv.sweep.grid import read_grid
    from smoothadv.sweep.planning import plan_sweep

    return plan_sweep(read_grid(path), {"--device": "cpu"})


def jobs_of(path: Path) -> list[Job]:
    """The jobs of a grid, on the CPU, in the working folder."""
    return [plan.job for plan in plans_of(path)]


def do(stage: Stage, *further: object) -> None:
    """Run a stage in this process, with further options; fail unless it succeeds."""
    succeed(*stage.words, *further)


def finish(job: Job) -> None:
    """Run all stages of a job in this process."""
    for stage in job.stages:
        do(stage)


@contextmanager
def held_by_another(path: Path) -> Iterator[subprocess.Popen]:
    """Within, another process holds the lock on a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(1, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}; sys.stdin.read()", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"1\n"
    try:
        yield process
    finally:
        process.communicate()


def commands_in(log: Path) -> int:
    """How many commands a job's log records."""
    return sum(
        line.startswith("$ ") and " smoothadv " in line for line in log.read_text().splitlines()
    )


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock on a file."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Every Python that finds this file on its path executes it first. The words after "pretend" are the
# program of a pretended stage; the process of stop_with_parent, which becomes the stage, does not
# run it.
_PRETENDER = """
import os, sys
words = sys.orig_argv
if "pretend" in words and "smoothadv.sweep.stop_with_parent" not in words:
    code = 0
    exec(words[words.index("pretend") + 1])
    sys.stdout.flush()
    os._exit(code)
"""


def pretending(folder: Path) -> dict[str, str]:
    """The environment in which pretended stages work; ``folder`` gets the file that they need."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_PRETENDER)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(CODE)])}


@dataclass(frozen=True)
class Pretended:
    """A stage that is a program of a few lines, complete when the file ``made`` exists; it starts
    at once.
    """

    program: str
    made: Path
    title: str = "pretend"
    conflict: str = ""
    needs: tuple[Path, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return ("pretend", self.program)

    def progress(self) -> StageProgress:
        return StageProgress(int(self.made.exists()), 1, "files", self.conflict)


def pretended_job(folder: Path, *stages: Pretended) -> Job:
    """A job of pretended stages with the working folder ``folder``."""
    return Job("name", "group", folder, Path("logs"), stages[0], tuple(stages[1:]))


# Reads a pickled job and executes it, as engines do in separate processes.
_WATCHER = """
import json, pickle, sys, threading
from smoothadv.sweep.job_execution import execute
with open(sys.argv[1], "rb") as file:
    job = pickle.load(file)
print(execute(job, json.loads(sys.argv[2]), threading.Event(), {}), flush=True)
"""


def watcher(job_file: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process that executes the pickled job in a file."""
    return subprocess.Popen(
        [sys.executable, "-c", _WATCHER, str(job_file), json.dumps(dict(environment))],
        env={**ENVIRONMENT, **finding(CODE, CODE.parent / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
