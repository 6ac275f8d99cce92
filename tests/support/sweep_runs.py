"""Runs of the command sweep on a grid of four small jobs, and a check of what it must have made in
the end.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from support.commands import ENVIRONMENT, rows, script, timeless, without_progress
from support.patience import HANG_SECONDS, wait_for
from support.sweeping import is_alive, write_grid
from support.trainings import same_state

GRID = "tiny.toml"
EPOCHS = 20
EXAMPLES = 24  # every 15th of 359
_SIZES = ("0.25", "0.50")
# The folders of the jobs, in the order of the grid.
NAMES = [
    f"PGD_1step/eps_{epsilon}/digits/digits_resnet8/noise_{noise}"
    for noise in _SIZES
    for epsilon in _SIZES
]


def lay_out(folder: Path, **fixed: object) -> Path:
    """A folder with the grid in it; ``fixed`` are further options of all trainings."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep = {
        "noise": [0.25, 0.5],
        "attack": "PGD",
        "num-steps": 1,
        "epsilon": [0.25, 0.5],
        "warmup": 2,
    }
    write_grid(
        folder / GRID,
        sweep,
        fixed={
            "dataset": "digits",
            "arch": "digits_resnet8",
            "epochs": EPOCHS,
            "checkpoint-minutes": 0.005,
            "lr-schedule": "one-cycle",
            "lr": 0.2,
            **fixed,
        },
        certify=[{"skip": 15, "N": 1000}],
        threads=1,
    )
    return folder


class Running:
    """A command of the sweep in ``folder``, in a process group of its own, with its output in files
    there.
    """

    def __init__(
        self, folder: Path, action: str, *options: object, environment: Mapping[str, str]
    ) -> None:
        self.folder = folder
        number = len([*folder.glob("output*.out")])
        self._out, self._err = folder / f"output{number}.out", folder / f"output{number}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                script("sweep", action, GRID, *options),
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return without_progress(self._err.read_text())

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """The exit code, once it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        raise AssertionError(f"it does not end: {self.out}{self.err}{all_output(self.folder)}")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition`` holds; fail if the command ends before or it takes too
        long.
        """
        wait_for(
            condition,
            lambda: self.process.poll() is not None,
            lambda: self.out + self.err + all_output(self.folder),
        )

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal does it: for the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextlib.contextmanager
def started(
    folder: Path, action: str, *options: object, environment: Mapping[str, str]
) -> Iterator[Running]:
    """Within, ``sweep ACTION GRID OPTIONS`` runs in a folder."""
    running = Running(folder, action, *options, environment=environment)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()


def ran(
    folder: Path, action: str, *options: object, environment: Mapping[str, str] = ENVIRONMENT
) -> Running:
    """Runs ``sweep ACTION GRID OPTIONS`` until it ends."""
    with started(folder, action, *options, environment=environment) as running:
        running.wait()
    return running


def undisturbed(folder: Path) -> Path:
    """The folder of the same sweep, run on this machine without any disturbance."""
    running = ran(lay_out(folder), "run", "--device", "cpu", "--jobs", 4)
    assert running.process.returncode == 0, running.err + all_output(folder)
    return folder


def model(folder: Path, name: str) -> Path:
    """Where a job's model is."""
    return folder / "models/tiny" / name


def job_log(folder: Path, name: str) -> str:
    """The output of the stages of a job."""
    file = folder / "logs/tiny" / name / "job.log"
    return file.read_text() if file.exists() else ""


def all_output(folder: Path) -> str:
    """The output of all jobs and, on Slurm, of the processes that watch them."""
    files = [*folder.glob("logs/**/job.log"), *folder.glob("logs/tiny/slurm/*_log.*")]
    return "".join(
        f"\n--- {file.relative_to(folder)}\n{file.read_text()}" for file in sorted(files)
    )


def trained_epochs(folder: Path, name: str) -> int:
    """How many epochs of a job's training are on the disk."""
    log = model(folder, name) / "log.txt"
    return max(log.read_bytes().count(b"\n") - 1, 0) if log.exists() else 0


def in_training(folder: Path) -> list[str]:
    """The jobs that have trained at least one epoch, and at most half of them."""
    return [name for name in NAMES if 1 <= trained_epochs(folder, name) <= EPOCHS // 2]


def attempts(folder: Path, name: str) -> int:
    """How often a job's training was started."""
    commands = [line for line in job_log(folder, name).splitlines() if line.startswith("$ ")]
    return sum(" train_pgd " in command for command in commands)


def stages(folder: Path, name: str = "") -> list[int]:
    """The living processes of a sweep's stages, or of one job's: they work in its folder and name
    its files.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            is_stage = "smoothadv" in words and any(f"models/tiny/{name}" in word for word in words)
            if (
                is_stage
                and (entry / "cwd").readlink() == folder.resolve()
                and is_alive(int(entry.name))
            ):
                found.append(int(entry.name))
    return found


def artefacts(folder: Path) -> dict[str, int]:
    """The models and logs with the times of their last change, without the records of jobs."""
    files = [
        path for top in ("models", "logs") for path in (folder / top).rglob("*") if path.is_file()
    ]
    files = [
        path
        for path in files
        if path.parent.name not in ("slurm", "tiny") and not path.name.startswith("job.")
    ]
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in sorted(files)}


def audit(folder: Path, reference: Path) -> None:
    """Check that nothing is lost or doubled, and that all equals bit by bit what the undisturbed
    sweep made.

    Rows are compared without the times in them.
    """
    assert artefacts(folder).keys() == artefacts(reference).keys()
    logs = [path for path in artefacts(folder) if path.endswith((".tsv", "/log.txt"))]
    assert len(logs) == 2 * len(NAMES)
    for path in logs:
        column, count = ("epoch", EPOCHS) if path.endswith("log.txt") else ("idx", EXAMPLES)
        numbers = [row[column] for row in rows(folder / path)]
        assert len(numbers) == len(set(numbers)) == count, path
        assert timeless(folder / path) == timeless(reference / path), path
    for name in NAMES:
        assert same_state(model(folder, name), model(reference, name)), name


def assert_done(running: Running, reference: Path, count: int = 4) -> None:
    """All jobs are done, the command printed so for ``count`` of them, and the results show no
    trace of the fault.
    """
    assert running.wait() == 0, running.err + all_output(running.folder)
    assert running.out.splitlines()[-2] == "tiny: 4 jobs: 4 done" and running.err == ""
    assert running.out.count("  done    ") == count, running.out
    audit(running.folder, reference)
