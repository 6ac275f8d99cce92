"""Which logs are of the same images: accuracies on other images differ by chance too, so the best is chosen per set."""

from collections.abc import Sequence
from typing import Any

from smoothadv.analysis.shared.hyper_parameters import Parameters
from smoothadv.readers import DataFrame


def image_set_names(logs: Sequence[tuple[DataFrame, Parameters]]) -> list[str]:
    """What people call the image set of each log, like "digits, 180 images"; "" if all are of one set.

    Logs are of one set if dataset, split, fingerprint and indices are equal. A log whose manifest states no dataset is
    of the set that has its dataset and indices; all others of a dataset are one set, as the paper pools its logs.
    """
    indices = [table["idx"].to_numpy().tobytes() for table, _ in logs]
    keys = [_key(parameters, own) for (_, parameters), own in zip(logs, indices)]
    stated = {(key[0], key[-1]): key for key in keys if len(key) > 1}
    keys = [key if len(key) > 1 else stated.get((key[0], own), key) for key, own in zip(keys, indices)]
    sizes: dict[tuple[Any, ...], list[int]] = {}
    for key, (table, _) in zip(keys, logs):
        sizes.setdefault(key, []).append(len(table))
    names: dict[tuple[Any, ...], str] = {}
    for key, some in sizes.items():
        count = " to ".join(f"{size:,}" for size in sorted({min(some), max(some)}))
        name = f"{key[0] or 'unknown dataset'}, {count} images"
        alike = sum(other.partition(" (")[0] == name for other in names.values())
        names[key] = name if not alike else f"{name} (set {alike + 1})"
    return [names[key] if len(names) > 1 else "" for key in keys]


def _key(parameters: Parameters, indices: bytes) -> tuple[Any, ...]:
    settings, dataset = parameters.settings, parameters.get("dataset")
    if dataset is None or not settings.get("dataset"):
        return (dataset,)
    return dataset, parameters.get("split"), str(settings.get("dataset_fingerprint")), indices
