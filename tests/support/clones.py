"""A clone of this repository for tests of shell scripts."""

import shutil
import subprocess
import sys
from pathlib import Path

from support.patience import HANG_SECONDS

_REPOSITORY = Path(__file__).parents[2]
_INSTALLED = ("requirements.txt", "requirements.lock", "setup.py", "pyproject.toml")


def make_clone(folder: Path) -> Path:
    """Code, scripts and docs in ``folder``, whose .venv is this interpreter, so that nothing has to
    be installed.
    """
    for name in ("code", "scripts", "docs"):
        shutil.copytree(
            _REPOSITORY / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    for name in _INSTALLED:
        shutil.copy(_REPOSITORY / name, folder)
    (folder / ".venv/bin").mkdir(parents=True)
    python = folder / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    content = b"".join((folder / name).read_bytes() for name in _INSTALLED)
    checksum = subprocess.run(["cksum"], input=content, capture_output=True, check=True).stdout
    (folder / ".venv/installed").write_text(
        f"{checksum.decode().strip()} in {folder.resolve()}\ntest\n"
    )
    return folder


def run_script(
    clone: Path, name: str, *arguments: object, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What scripts/NAME.sh of the clone does, with its output as text."""
    command = ["bash", str(clone / f"scripts/{name}.sh"), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd or clone, capture_output=True, text=True, timeout=HANG_SECONDS
    )
