"""Running the commands: as processes where the process itself matters, otherwise in this one, which
is far faster; and what tests read of their logs.
"""

import csv
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.patience import HANG_SECONDS, wait_for

CODE = Path(__file__).parents[2] / "code"
RESEEDED = Path(__file__).parent / "reseeded"


def finding(*folders: object) -> dict[str, str]:
    """The environment in which a process finds the modules in ``folders`` and trains with the seeds
    of this process.
    """
    return {"PYTHONPATH": os.pathsep.join(filter(None, map(str, [RESEEDED, *folders])))}


# As many threads as in this process, and no accelerator: what is computed there and here is equal.
ENVIRONMENT = {
    **os.environ,
    "CUDA_VISIBLE_DEVICES": "",
    **finding(os.environ.get("PYTHONPATH", "")),
}


def script(name: str, *arguments: object) -> list[str]:
    """The command line of an entry point, as a user of a clone types it."""
    return [sys.executable, str(CODE / f"{name}.py"), *map(str, arguments)]


# Files of this process cannot grow beyond so many bytes, which says EFBIG where a full disk says
# ENOSPC.
_ON_A_SMALL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def on_a_small_disk(space: int, command: list[str]) -> list[str]:
    """The command line of a script whose files find room for ``space`` bytes each."""
    return [command[0], "-c", _ON_A_SMALL_DISK, str(space), *command[1:]]


def run_process(
    command: list[str], cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end, with its output captured as text."""
    variables = {**ENVIRONMENT, **environment}
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=HANG_SECONDS
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return as soon as ``condition`` holds; fail if the process ends before or nothing happens for
    too long.
    """
    wait_for(
        condition,
        ended=lambda: process.poll() is not None,
        said=lambda: process.communicate() if process.poll() is not None else "",
    )


@dataclass(frozen=True)
class Outcome:
    """What a command left behind: its exit code and what it printed."""

    code: int
    out: str
    err: str


def refused(outcome: Outcome, *words: object, code: int = 1) -> bool:
    """Whether a command failed with this exit code and one line that has these words."""
    err = without_progress(outcome.err)
    is_line = err.startswith("error: ") and err.count("\n") == 1
    return outcome.code == code and is_line and all(str(word) in outcome.err for word in words)


def call(capsys, name: str, *arguments: object) -> Outcome:
    """Run a command in this process, as ``smoothadv NAME ARGUMENTS``."""
    capsys.readouterr()
    code = command_main(name)([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Outcome(code, captured.out, without_progress(captured.err))


def without_progress(text: str) -> str:
    """``text`` without the lines about progress, which are there on a slow machine, and about the
    device.
    """
    progress = r"^.*\b\d+ of [\d?]+ \(\d+%\), .* so far, .* left.*\n"
    return re.sub(rf"(?m){progress}|^on the (CPU|NVIDIA|standin).*\n", "", text)


def succeed(name: str, *arguments: object) -> None:
    """Run a command in this process and insist that it ends well."""
    assert command_main(name)([str(argument) for argument in arguments]) == 0


def forget_plugins() -> None:
    """As in a process that has just started, no plug-in is loaded."""
    if plugins := sys.modules.get("smoothadv.base.plugins"):
        for plugin in plugins.loaded():
            for one in plugin.provides:
                del one.registry[one.name]
            sys.modules.pop(plugin.name.removesuffix(".py"))
        plugins._loaded.clear()


def command_main(name: str) -> Callable[[list[str]], int]:
    """The main function of a command, which finds no plug-in loaded."""
    forget_plugins()
    main = importlib.import_module("smoothadv.cli").COMMANDS[name].load()
    if "smoothadv.evaluation.voters" not in sys.modules:
        return main
    return importlib.import_module("support.folded").folding_once(main)


def rows(log: Path) -> list[dict[str, str]]:
    """The rows of a tab-separated log, every field as it is written."""
    with log.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def place_of(log: Path, wanted: str, holds: Callable[[dict[str, str]], bool]) -> int:
    """Which row of a log, from 0, is the first of which ``holds`` is true; fails where none is
    ``wanted``.
    """
    found = [place for place, row in enumerate(rows(log)) if holds(row)]
    assert found, (
        f"none of the {len(rows(log))} images in {log} is {wanted}, and this test needs one"
    )
    return found[0]


def timeless(log: Path) -> list[dict[str, str]]:
    """The rows of a log without what differs between equal runs: times, and rates computed from
    them.
    """
    timed = ("time", "images_per_second")
    return [{name: field for name, field in row.items() if name not in timed} for row in rows(log)]


def header(log: Path) -> list[str]:
    """The column names of a log, in their order."""
    return log.read_text().splitlines()[0].split("\t")


def manifest_of(log: Path | str) -> dict:
    return json.loads(Path(f"{log}.manifest.json").read_text())


def settings_of(log: Path | str) -> dict:
    return manifest_of(log)["settings"]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its content (None for a folder): equal before and after if
    nothing changed.
    """
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
