"""examples: images counted by hand over three logs, and pictures that show what became of an image
under attack.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smoothadv.analysis.examples import Examples, write_pictures
from smoothadv.analysis.logs import Log, Logs
from smoothadv.analysis.report import Report
from smoothadv.records.logs import examples_path, pictures_folder
from smoothadv.records.writer import finish_images
from support.certified_logs import log_of
from support.logs_of_attacks import open_log, row_of
from support.refusals import refusal

KEYS = [
    "idx",
    "label",
    "logs",
    "certified",
    "abstained",
    "mean_radius",
    "largest_radius",
    "best_log",
    "taken_for",
]


def log(name: str, outcomes: dict[int, tuple[int, float]]) -> Log:
    """Predictions and radii by idx; the label of an image is its idx modulo 3."""
    label = [idx % 3 for idx in outcomes]
    predict, radius = map(list, zip(*outcomes.values()))
    return log_of(name, {"idx": [*outcomes], "label": label, "predict": predict, "radius": radius})


# idx 0 (label 0) is easy, 1 (label 1) right once, 2 (label 2) never, 10 (label 1) in one log only.
THREE = Logs(
    [
        log("a", {0: (0, 0.5), 1: (2, 0.9), 2: (-1, 0.0), 10: (1, 0.25)}),
        log("b", {0: (0, 1.0), 1: (1, 0.5), 2: (1, 0.7)}),
        log("c", {0: (0, 1.0), 1: (-1, 0.0), 2: (0, 0.1)}),
    ]
)
WORST_FIRST = [
    ("2", "2", 3, 0, 1, 0.0, 0.0, None, "0"),
    ("1", "1", 3, 1, 1, pytest.approx(0.5 / 3), 0.5, "b", "2"),
    ("10", "1", 1, 1, 0, 0.25, 0.25, "a", None),
    ("0", "0", 3, 3, 0, pytest.approx(2.5 / 3), 1.0, "b", None),
]


def test_images_are_counted_over_all_logs_worst_first():
    """Radii of wrong answers count as 0; of equally common mistakes the smaller class is shown, of
    equal logs the first."""
    table = Examples()(THREE)
    assert table.keys == KEYS and table.for_people is None
    assert [tuple(row) for row in table.plain_rows()] == WORST_FIRST


def test_report_shows_the_examples_beside_predictions_of_another_kind():
    predictions = replace(log("predicted", {0: (0, 0.0)}), procedure="top-2")
    page = Report()(Logs([log("a", {0: (0, 0.5)})], [predictions]))
    assert "Worst</" in page and "Best</" in page


# Pictures


def finished_log(log: Path, shape: tuple[int, ...], *levels: float) -> Path:
    """The log of two images of one grey level, and another one after the attack."""
    with open_log(log, image_shape=shape) as written:
        for index in (5, 123456):
            images = [np.full(shape, level, np.float32) for level in levels]
            written.append(row_of(index), images)
    finish_images(log, shape)
    return log


def colours(path: Path, box: tuple[int, int, int, int]) -> set[tuple[int, int, int]]:
    with Image.open(path) as picture:
        return {colour for _, colour in picture.crop(box).getcolors(2**20)}


@pytest.mark.parametrize(
    ("shape", "levels", "shown"),
    [
        *(
            (shape, (0.2, 0.4), (51, 102, 255))
            for shape in [(1, 8, 8), (3, 8, 8), (3, 4, 9), (1, 300, 200)]
        ),
        ((1, 2, 3), (0.4, 0.4), (102, 102, 128)),
    ],
    ids=str,
)
def test_pictures_show_the_image_what_became_of_it_and_the_difference(
    tmp_path, shape, levels, shown
):
    """Uniform images: their difference, magnified to the full range, is white, or grey where there
    is none.
    """
    log = finished_log(tmp_path / "log.tsv", shape, *levels)
    with np.errstate(all="raise"):
        paths = write_pictures(log, 1)
    assert paths == [pictures_folder(log) / "00005.png"] == list(pictures_folder(log).iterdir())
    assert [path.name for path in write_pictures(log, 9)] == ["00005.png", "123456.png"]
    scale = max(1, -(-128 // min(shape[1:])))
    height, width = shape[1] * scale, shape[2] * scale
    with Image.open(paths[0]) as picture:
        assert picture.format == "PNG" and picture.mode == "RGB"
        margin = (picture.width - 3 * width) // 4
        assert picture.height > height + 2 * margin and picture.width < 3 * width + 100
    for panel, level in enumerate(shown):
        left = margin + panel * (width + margin)
        assert colours(paths[0], (left, margin, left + width, margin + height)) == {(level,) * 3}
        assert colours(paths[0], (left - margin, 0, left, height)) == {(255,) * 3}


def test_archive_that_lacks_columns_or_is_damaged_gives_no_pictures(tmp_path):
    log = finished_log(tmp_path / "log.tsv", (1, 2, 3), 0.2, 0.4)
    with np.load(examples_path(log)) as archive:
        arrays = {name: archive[name] for name in ("idx", "image", "adversarial")}
    np.savez(examples_path(log), **arrays)
    refusal(write_pictures, log, 1, names="log.npz lacks label or predict")
    examples_path(log).write_bytes(b"I am a file.\n")
    refusal(write_pictures, log, 1, names="log.npz cannot be read")
    assert not pictures_folder(log).exists()
