"""Small logs of attacks, written row by row, whose rows and images are known by their index."""

from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import numpy as np

from smoothadv.records.logs import ATTACK_COLUMNS
from smoothadv.records.writer import LogWriter

SHAPE = (1, 2, 3)
COLUMNS = ATTACK_COLUMNS
SETTINGS = {"sigma": 0.25, "N": 1000, "attack": {"name": "PGD"}, "images_saved": True}
RUN = {"image_shape": list(SHAPE), "images": 1000, "skip": 1, "max": None}


def images_of(index: int, shape: tuple[int, ...] = SHAPE) -> tuple[np.ndarray, np.ndarray]:
    """The two images of an example: of no other."""
    generator = np.random.default_rng(index)
    return tuple(generator.random(shape, dtype=np.float32) for _ in range(2))


def row_of(index: int) -> dict[str, object]:
    """The row of an example of class 1, which abstains where the index is even."""
    predict = 1 if index % 2 else -1
    fields = (index, 1, predict, 1, index % 2, "0:00:01", 0.25, 0.5, 1 - index % 2)
    return dict(zip(COLUMNS, fields))


def line_of(index: int) -> str:
    """That row as the log has it."""
    return "\t".join(map(str, row_of(index).values()))


def text_of(indices: Collection[int]) -> str:
    """A log of these examples."""
    return "\n".join(["\t".join(COLUMNS), *map(line_of, indices)]) + "\n"


def open_log(path: Path, existing: str = "resume", **changes: object) -> closing[LogWriter]:
    """A log of attacks; ``changes`` are arguments that differ."""
    usual = {"columns": COLUMNS, "settings": SETTINGS, "run": RUN, "image_shape": SHAPE}
    return closing(LogWriter(path, **{**usual, "existing": existing, **changes}))


def write_rows(path: Path, indices: Collection[int], existing: str = "resume", **changes: object):
    """Append the rows of these examples that the log lacks."""
    with open_log(path, existing, **changes) as log:
        for index in indices:
            if index not in log.rows:
                log.append(row_of(index), images_of(index, log.image_shape or SHAPE))


def assert_images(arrays: dict[str, np.ndarray], indices: list[int]) -> None:
    """An archive has the images of these examples, bit by bit, and the columns of the log."""
    assert arrays["idx"].tolist() == indices
    assert arrays["predict"].tolist() == [row_of(index)["predict"] for index in indices]
    for row, index in enumerate(indices):
        for name, image in zip(("image", "adversarial"), images_of(index)):
            assert arrays[name][row].tobytes() == image.tobytes()
