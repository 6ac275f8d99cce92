"""Logs of certification procedures as they write them, of a few images of class 3."""

import json
from pathlib import Path
from typing import Any

from smoothadv.records.logs import manifest_path, tsv
from smoothadv.statistics import Smoothing
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.bounds import certified_radius
from support.certified_logs import MANIFEST

SIGMA, N, ALPHA = 0.5, 1000, 0.001
RADII = [0.0, 0.25, 0.5, 0.75]
COLUMNS = ["idx", "label", "predict", "radius", "correct", "time", "successes", "trials"]
ADAPTED = Adaptive(Smoothing(SIGMA, 100, N, ALPHA), RADII)
# The most misses among N draws with which anything is certified.
ALLOWED = max(m for m in range(N) if certified_radius(N - m, N, SIGMA, ALPHA) is not None)


def row(
    idx: int, predict: int, radius: float, successes: int, trials: int, label: int = 3, **more: int
) -> dict:
    correct = int(predict == label)
    return {
        "idx": idx,
        "label": label,
        "predict": predict,
        "radius": radius,
        "correct": correct,
        "time": "0:00:01",
        "successes": successes,
        "trials": trials,
        **more,
    }


def exact_row(idx: int, successes: int, predict: int = 3) -> dict:
    radius = certified_radius(successes, N, SIGMA, ALPHA)
    return row(idx, -1 if radius is None else predict, radius or 0.0, successes, N)


def adaptive_row(idx: int, level: int, predict: int = 3, trials: int = 400, **more: int) -> dict:
    """A row as adaptive writes it, with the most successes that show no more; level -1 abstains."""
    radius = 0.0 if level < 0 else RADII[level]
    found = (ADAPTED.certified_by(count, trials - count, trials) for count in range(trials + 1))
    successes = max(k for k, each in enumerate(found) if each < 0 or each == radius)
    more = {"samples": 100 + trials, "level": level, "looks": 7 if trials else 0, **more}
    return row(idx, predict if level >= 0 else -1, radius, successes, trials, **more)


# 3 of 5 correct, 1 abstains: 0.5 + 0.25 + 0 over five images.
GRID = [
    *map(adaptive_row, range(3), [2, 1, 0]),
    adaptive_row(3, 3, 7),
    adaptive_row(4, -1, trials=0),
]
# 2 of 5 correct; one abstains, two were given up.
AWARE = [
    *(adaptive_row(idx, level, label_aware=0) for idx, level in [(0, 3), (1, 1), (2, -1)]),
    *(adaptive_row(idx, -1, trials=0, label_aware=1) for idx in (3, 4)),
]
PARTIAL = row(4, -1, 0.0, 20, 20 + ALLOWED + 1)
EXACT = [exact_row(0, 1000), exact_row(1, 900), exact_row(2, 700, 7), exact_row(3, 400), PARTIAL]


SETTINGS_OF: dict[str, dict[str, Any]] = {
    "exact": {},
    "adaptive": {"radii": RADII, "ladder": False, "label_aware": False, "tables_sha256": ""},
}


def put(
    name: str, rows: list[dict], method: str = "exact", manifest: bool = True, **more: object
) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tsv(rows[0], rows))
    settings = {**MANIFEST["settings"], "sigma": SIGMA, "N": N, "alpha": ALPHA, "method": method}
    settings |= {**SETTINGS_OF.get(method, {}), **more}
    if "label_aware" in rows[0]:
        settings["label_aware"] = True
    settings = {name: value for name, value in settings.items() if value is not None}
    run = MANIFEST["runs"][0] | {"images": max(entry["idx"] for entry in rows) + 1}
    if manifest:
        manifest_path(path).write_text(json.dumps({"settings": settings, "runs": [run]}))
    return path


def put_one_of_each() -> None:
    """Write a log of exact, of a grid and of label-aware certificates into folders of their own."""
    put("exact/log.tsv", EXACT)
    put("grid/log.tsv", GRID, "adaptive")
    put("aware/log.tsv", AWARE, "adaptive")
