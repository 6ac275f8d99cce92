"""Checks the page that scripts/reproduce_paper.sh digits wrote, and that its sweep, run again,
finds nothing to do.
"""

import os
import subprocess
import sys
from pathlib import Path

GRID, MODELS = "scripts/grids/digits-smoke.toml", 8


def artefacts() -> dict[str, int]:
    """All files that the sweep made, by when they were written; looking at a lock opens, but does
    not write it.
    """
    files = [
        path
        for name in ("models", "logs")
        for path in Path(name, "digits-smoke").rglob("*")
        if path.is_file()
    ]
    return {str(path): os.stat(path).st_mtime_ns for path in files}


page = Path(sys.argv[1]).read_text()
parts = (
    "Upper envelopes by group",
    "Best certified accuracy by sigma and epsilon",
    "Selected log at each radius",
)
for part in (*parts, "Chosen on some images, measured on others", "on other images"):
    assert part in page, f"the report has no '{part}'"
chosen = sum(1 for path in Path("logs/digits-smoke").rglob("sigma_*_best.tsv"))
assert 2 <= chosen < MODELS, f"{chosen} models were chosen as the best of their group"
before = artefacts()
assert sum(name.endswith("checkpoint.pth.tar") for name in before) == MODELS
done = subprocess.run(
    [sys.executable, "code/sweep.py", "run", GRID], capture_output=True, text=True
)
assert done.returncode == 0 and "nothing to do" in done.stdout, done.stdout + done.stderr
assert artefacts() == before, "a second run wrote something"
print(f"sweep: {MODELS} models are reported on, and a second run does nothing")
