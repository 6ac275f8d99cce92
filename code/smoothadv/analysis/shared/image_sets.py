"""Which logs are of the same images: accuracies on other images differ by chance too, so the best is chosen per set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smoothadv.analysis.shared.logs import Log


def image_set_names(logs: Sequence[Log]) -> list[str]:
    """What people call the image set of each log, like "digits, 180 images"; "" if all are of one set.

    Logs are of one set if dataset, split, fingerprint and indices are equal. A log whose manifest states no dataset is
    of the set that has its dataset and indices; all others of a dataset are one set, as the paper pools its logs.
    """
    keys = [_key(log) for log in logs]
    stated = {(key[0], key[-1]): key for key in keys if len(key) > 1}
    keys = [stated.get((key[0], _indices(log)), key) if len(key) == 1 else key for key, log in zip(keys, logs)]
    sets: dict[tuple[Any, ...], list[int]] = {}
    for key, log in zip(keys, logs):
        sets.setdefault(key, []).append(len(log.table))
    if len(sets) < 2:
        return [""] * len(logs)
    names: dict[tuple[Any, ...], str] = {}
    for key, sizes in sets.items():
        count = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
        name = f"{key[0] or 'unknown dataset'}, {count} images"
        alike = sum(other.partition(" (")[0] == name for other in names.values())
        names[key] = name if not alike else f"{name} (set {alike + 1})"
    return [names[key] for key in keys]


def _key(log: Log) -> tuple[Any, ...]:
    settings, dataset = log.parameters.settings, log.parameters.get("dataset")
    if dataset is None or not settings.get("dataset"):
        return (dataset,)
    return dataset, log.parameters.get("split"), str(settings.get("dataset_fingerprint")), _indices(log)


def _indices(log: Log) -> bytes:
    return log.table["idx"].to_numpy().tobytes()
