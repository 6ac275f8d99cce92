"""Small sweeps for tests: their files, their jobs, and stages that run in this process or are only
pretended.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smoothadv.base.files import write_text
from smoothadv.models.name import Members
from smoothadv.records.logs import (
    ATTACK_COLUMNS,
    CERTIFICATION_COLUMNS,
    format_radius,
    manifest_path,
    tsv,
)
from smoothadv.statistics.bounds import certified_radius
from smoothadv.sweep.grid import Model
from smoothadv.sweep.jobs import SweepJob
from smoothadv.sweep.stages import Stage, StageProgress, TrainingStage, digest
from support.commands import CODE, ENVIRONMENT, finding

# Two epochs of three updates.
FIXED = {"dataset": "digits", "arch": "digits_resnet8", "recipe": "smoke"}
CERTIFY = {"max": 5, "N": 200}
CPU = {"--device": "cpu"}
# The test images of digits.
IMAGES = 359
# What commands find in files, and analyses expect in manifests.
_READ = {
    "dataset_fingerprint": "0",
    "input_layer": "normalize",
    "num_classes": 10,
    "noise": "GaussianNoise",
}
_TRAINING = ("epoch", "time", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
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


def jobs_of(path: Path, shared: Mapping[str, str | None] = CPU) -> list[SweepJob]:
    """The jobs of a grid in the working folder; all commands get the ``shared`` options."""
    from smoothadv.sweep.grid import read_grid
    from smoothadv.sweep.planning import CommandReader, plan_jobs

    return plan_jobs(read_grid(path), CommandReader(), shared)


def fake(stage: Stage, epochs: int | None = None, certified: int = IMAGES) -> None:
    """Write what the command of a stage would, without computing anything: a training of so many
    ``epochs`` (None: all), or logs in which the first ``certified`` images are certified by
    unanimous votes.
    """
    if isinstance(stage, TrainingStage):
        expected = stage.expected
        digests = {field: digest(path) for field, path in expected.digests.items()}
        recipe = {**expected.recipe, **digests}
        record = {"recipe": recipe, "runs": [{"epochs": expected.epochs}]}
        epoch = dict.fromkeys(_TRAINING, 0.5)
        numbers = range(expected.epochs if epochs is None else epochs)
        stage.folder.mkdir(parents=True, exist_ok=True)
        (stage.folder / "args.json").write_text(json.dumps(record))
        log = tsv(_TRAINING, ({**epoch, "epoch": number} for number in numbers))
        (stage.folder / "log.txt").write_text(log)
        stage.checkpoint.write_text(json.dumps(recipe))
        return
    paths, mean = stage.classifier.paths, stage.classifier.mean
    if mean:
        write_text(stage.classifier.name, stage.classifier.described())
    digests, recipes = map(digest, paths), [json.loads(path.read_text()) for path in paths]
    made = {
        "checkpoint_sha256": {mean: list(digests)} if mean else next(digests),
        "training": recipes if mean else recipes[0],
        "arch": recipes[0]["arch"],
        **_READ,
    }
    selection = stage.selection
    for log, known in zip(stage.logs, stage.settings):
        settings = json.loads(json.dumps({**known, **made}))
        log.parent.mkdir(parents=True, exist_ok=True)
        run = {"images": IMAGES, "image_shape": [1, 8, 8], **selection}
        manifest_path(log).write_text(json.dumps({"settings": settings, "runs": [run]}))
        fake_rows(log, range(0, IMAGES, selection["skip"])[: selection["max"]], settings, certified)


def fake_rows(log: Path, indices: Iterable[int], settings: Table, certified: int) -> None:
    """Write the rows of a log whose first ``certified`` images are certified, and no others."""
    n, columns = settings["N"], CERTIFICATION_COLUMNS
    radius = certified_radius(n, n, settings["sigma"], settings["alpha"])
    yes = {"predict": 1, "radius": format_radius(radius), "correct": 1, "successes": n}
    no = {"predict": -1, "radius": "0.0", "correct": 0, "successes": n // 2}
    common = {"label": 1, "time": "0:00:00.1", "trials": n}
    if "attack" in settings:
        columns = ATTACK_COLUMNS
        epsilon = settings["attack"]["epsilon"]
        common |= {"basePredict": 1, "attack_norm": epsilon, "epsilon": epsilon, "abstain": 0}
    rows = [
        {"idx": index, **common, **(yes if number < certified else no)}
        for number, index in enumerate(indices)
    ]
    log.write_text(tsv(columns, ({name: row[name] for name in columns} for row in rows)))


def finish(job: SweepJob, certified: int = IMAGES) -> None:
    """``fake`` all stages of a job."""
    for stage in job.stages:
        fake(stage, certified=certified)


def fake_commands(patch: pytest.MonkeyPatch) -> None:
    """Let the sweeps of this process fake their stages."""
    from smoothadv.sweep import jobs as sweep_jobs

    patch.setattr(sweep_jobs, "_run", lambda job, stage, *_: fake(stage) or 0)


def commands_in(log: Path) -> int:
    """How many commands a job's log records."""
    return sum(
        line.startswith("$ ") and " smoothadv " in line for line in log.read_text().splitlines()
    )


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_with(variable: str, value: str) -> list[int]:
    """The living processes that were started with a variable of this value."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"{variable}={value}".encode() in variables and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return sorted(found)


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
        return StageProgress(int(self.made.exists()), 1, "file", self.conflict)


def pretended_job(folder: Path, *stages: Pretended) -> SweepJob:
    """A job of pretended stages with the working folder ``folder``."""
    model, classifier = Model({}, (), "group", ""), Members(Path("model"), ())
    logs, training, evaluations = Path("logs"), stages[:1], stages[1:]
    return SweepJob("name", model, folder, logs, classifier, training, evaluations)


# Reads a pickled job and executes it, as engines do in separate processes.
_WATCHER = """
import json, pickle, sys, threading
from smoothadv.sweep.jobs import execute
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
