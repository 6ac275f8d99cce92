"""Certification logs without files."""

from pathlib import Path

import pandas as pd

from smoothadv.analysis.facts import Facts
from smoothadv.analysis.logs import Log

# What the manifest of a log must have, of ``exact``.
MANIFEST = {
    "settings": {
        **{
            "dataset": "digits",
            "split": "test",
            "dataset_fingerprint": "ab",
            "arch": "digits_resnet8",
        },
        **{
            "input_layer": "normalize",
            "num_classes": 10,
            "sigma": 0.5,
            "alpha": 0.001,
            "seed": 0,
            "N0": 100,
            "N": 1000,
        },
        **{"noise": "GaussianNoise", "method": "exact", "sound": False},
    },
    "runs": [{"images": 1797, "skip": 1, "max": None, "image_shape": [1, 8, 8]}],
}
# What an image of class 1 is taken for: it is right, wrong, or an abstention.
LETTERS = {"R": 1, "W": 0, "A": -1}


def log_of(
    name: str, columns: dict[str, list], group: str = "", notes: tuple = (), **values
) -> Log:
    """A log with these columns, of images 0, 1, ... of class 1 where they do not say others."""
    table = pd.DataFrame({"idx": range(len(columns["predict"])), "label": 1, **columns})
    table["correct"] = (table.predict == table.label).astype(int)
    return Log(name, Path(name), group, table, Facts(values), notes)


def predicted(name: str, letters: str, group: str = "", **values) -> Log:
    """A prediction log of an image for each of the ``LETTERS``."""
    return log_of(name, {"predict": [LETTERS[letter] for letter in letters]}, group, **values)


def log(
    name: str, radii: list[float | None] = (0.5,), group: str = "", notes: tuple = (), **values
) -> Log:
    """A log that is right with each of the ``radii``, of images of class 1, and abstains where
    there is None.
    """
    predict = [-1 if radius is None else 1 for radius in radii]
    return log_of(
        name,
        {"predict": predict, "radius": [radius or 0.0 for radius in radii]},
        group,
        notes,
        **values,
    )
