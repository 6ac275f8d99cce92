"""Runs a part of the tests with the newest versions of what requirements.txt names, and of what
that needs, where these are not the ones in .venv.

Only what is newer is downloaded, into a temporary folder that Python searches before .venv. Fails
if these tests fail: requirements.txt promises that newer versions do. Where the newest cannot be
found out, or be had here, it says so and passes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PIP = [
    sys.executable,
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--upgrade",
]
SECONDS = 900  # for each of two downloads, so that a slow mirror does not hold up everything else
TESTS = [
    *(
        "tests/test_core.py",
        "tests/models/test_checkpoints.py",
        "tests/records/test_readers.py",
        "tests/analysis",
        "tests/datasets",
    ),
    *(
        "tests/cli/test_analyze.py",
        "tests/cli/test_certify.py",
        "tests/cli/test_train.py",
    ),
]


def failure(*arguments: str) -> str:
    """Why pip could not install this; "" if it could."""
    try:
        done = subprocess.run([*PIP, *arguments], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"it takes more than {SECONDS} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def newer(report: dict) -> list[str]:
    """What a report of pip's would install, like "numpy==3.0.0"."""
    found = [entry["metadata"] for entry in report["install"]]
    return sorted(f"{one['name']}=={one['version']}" for one in found)


def main() -> int:
    os.chdir(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        wanted = ["--upgrade-strategy", "eager", "--requirement", "requirements.txt"]
        if reason := failure("--dry-run", "--report", str(report), *wanted):
            print(f"newest versions: not tried, they cannot be found out: {reason}")
            return 0
        versions = newer(json.loads(report.read_text()))
        if not versions:
            print("newest versions: they are those in .venv")
            return 0
        print(f"newest versions: {' '.join(versions)}", flush=True)
        packages = str(Path(folder, "packages"))
        if reason := failure("--no-deps", "--target", packages, *versions):
            print(f"newest versions: not tried, they cannot be had here: {reason}")
            return 0
        path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "2", *TESTS], env=environment
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
