"""Pictures of adversarial examples show what became of an image."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smoothadv.analysis.examples import write_pictures
from smoothadv.base.errors import UserError
from smoothadv.records.logs import examples_path, pictures_folder
from smoothadv.records.writer import finish_images
from support.logs_of_attacks import open_log, row_of


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


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (3, 4, 9), (1, 300, 200)], ids=str)
def test_pictures_show_the_image_what_became_of_it_and_the_difference(tmp_path, shape):
    """Uniform images of grey level 51 and 102: their difference, magnified to the full range, is
    white.
    """
    log = finished_log(tmp_path / "log.tsv", shape, 0.2, 0.4)
    paths = write_pictures(log, 1)
    assert paths == [pictures_folder(log) / "00005.png"] == list(pictures_folder(log).iterdir())
    assert [path.name for path in write_pictures(log, 9)] == ["00005.png", "123456.png"]
    scale = max(1, -(-128 // min(shape[1:])))
    height, width = shape[1] * scale, shape[2] * scale
    with Image.open(paths[0]) as picture:
        assert picture.format == "PNG" and picture.mode == "RGB"
        margin = (picture.width - 3 * width) // 4
        assert picture.height > height + 2 * margin and picture.width < 3 * width + 100
    for panel, level in enumerate((51, 102, 255)):
        left = margin + panel * (width + margin)
        assert colours(paths[0], (left, margin, left + width, margin + height)) == {(level,) * 3}
        assert colours(paths[0], (left - margin, 0, left, height)) == {(255,) * 3}


def test_picture_of_an_image_that_was_left_alone_has_no_division_by_zero(tmp_path):
    log = finished_log(tmp_path / "log.tsv", (1, 2, 3), 0.5, 0.5)
    with np.errstate(all="raise"):
        path, _ = write_pictures(log, 2)
    with Image.open(path) as picture:
        picture.verify()


def test_archive_that_lacks_columns_or_is_damaged_gives_no_pictures(tmp_path):
    log = finished_log(tmp_path / "log.tsv", (1, 2, 3), 0.2, 0.4)
    with np.load(examples_path(log)) as archive:
        arrays = {name: archive[name] for name in ("idx", "image", "adversarial")}
    np.savez(examples_path(log), **arrays)
    with pytest.raises(UserError, match="log.npz lacks label or predict"):
        write_pictures(log, 1)
    examples_path(log).write_bytes(b"I am a file.\n")
    with pytest.raises(UserError, match="log.npz cannot be read"):
        write_pictures(log, 1)
    assert not pictures_folder(log).exists()
