"""Adversarial examples on the disk: they are read as they were written, or one line names the
fault.
"""

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from smoothadv.base.errors import UserError
from smoothadv.evaluation.saved_examples import Spool, pack, write_pictures
from smoothadv.records.logs import examples_path, pictures_folder, spool_path
from smoothadv.records.readers import read_examples
from support.commands import snapshot

SHAPE = (1, 2, 3)
HEADER = len(json.dumps({"shape": list(SHAPE)})) + 1
RECORD = 8 + 2 * 4 * 6
COLUMNS = [
    "idx",
    "label",
    "predict",
    "basePredict",
    "correct",
    "time",
    "attack_norm",
    "epsilon",
    "abstain",
]
INDICES = [3, 10, 11, 40]


def images_of(index: int, shape: tuple[int, ...] = SHAPE) -> tuple[np.ndarray, np.ndarray]:
    """Two images that are unique to this index."""
    generator = np.random.default_rng(index)
    return tuple(generator.random(shape, dtype=np.float32) for _ in range(2))


def write_log(log: Path, indices: list[int]) -> None:
    """A log of attacks on these examples, of class 1 each, which abstain where the index is
    even.
    """
    lines = [
        [i, 1, -1 if i % 2 == 0 else 1, 1, i % 2, "0:00:01", 0.25, 0.5, 1 - i % 2] for i in indices
    ]
    log.write_text("".join("\t".join(map(str, line)) + "\n" for line in [COLUMNS, *lines]))


def fill(
    log: Path, indices: list[int], done: set[int] = frozenset(), shape: tuple[int, ...] = SHAPE
) -> None:
    spool = Spool(log, shape, set(done))
    for index in indices:
        spool.append(index, *images_of(index, shape))
    spool.close()


@pytest.fixture
def log(tmp_path) -> Path:
    """A log of four rows, whose images are in its spool."""
    path = tmp_path / "log.tsv"
    fill(path, INDICES)
    write_log(path, INDICES)
    return path


def assert_holds(arrays: dict[str, np.ndarray], indices: list[int]) -> None:
    assert arrays["idx"].tolist() == indices
    for row, index in enumerate(indices):
        image, adversarial = images_of(index)
        assert arrays["image"][row].tobytes() == image.tobytes()
        assert arrays["adversarial"][row].tobytes() == adversarial.tobytes()


def assert_packs(log: Path, indices: list[int], *parts: Path) -> None:
    """Of a log of these examples, the images in the spools of ``parts`` (by default the log's)
    become the archive.
    """
    write_log(log, indices)
    pack(log, parts or [log])
    assert_holds(read_examples(examples_path(log)), indices)


def test_packed_archive_has_every_row_and_removes_the_spool(log):
    assert pack(log, [log]) == examples_path(log) == log.with_name("log.npz")
    arrays = read_examples(examples_path(log))
    assert_holds(arrays, INDICES)
    assert arrays.keys() == {
        "idx",
        "image",
        "adversarial",
        "label",
        "predict",
        "epsilon",
        "attack_norm",
    }
    assert (
        arrays["image"].shape == (4, *SHAPE)
        and arrays["image"].dtype == arrays["adversarial"].dtype == np.float32
    )
    assert arrays["predict"].tolist() == [1, -1, 1, -1] and arrays["epsilon"].tolist() == [0.5] * 4
    assert sorted(path.name for path in log.parent.iterdir()) == ["log.npz", "log.tsv"]
    with np.load(log.with_name("log.npz"), allow_pickle=False) as archive:
        assert_holds(dict(archive), INDICES)  # which needs no reader of ours
    before = examples_path(log).read_bytes()
    assert pack(log, [log]) == examples_path(log) and examples_path(log).read_bytes() == before, (
        "again, for nothing"
    )


def test_packing_a_log_without_images_does_nothing(tmp_path):
    """Like all logs except those of attacks."""
    write_log(tmp_path / "log.tsv", INDICES)
    assert pack(tmp_path / "log.tsv", [tmp_path / "log.tsv"]) is None
    assert [path.name for path in tmp_path.iterdir()] == ["log.tsv"]


def test_spools_of_several_logs_are_joined_and_equal_images_counted_once(tmp_path):
    log, first, second = (tmp_path / name for name in ("log.tsv", "first.tsv", "second.tsv"))
    fill(first, [11, 3])
    fill(second, [40, 11, 10])
    assert_packs(log, INDICES, log, first, second)
    assert not list(tmp_path.glob("*.examples"))


def test_row_without_an_image_removes_nothing_and_images_without_a_row_are_left_out(log):
    """For example after a kill between the two steps."""
    write_log(log, [*INDICES, 50, 51])
    before = snapshot(log.parent)
    with pytest.raises(
        UserError, match="log.tsv has 6 rows, of which 2 have no adversarial example"
    ):
        pack(log, [log])
    assert snapshot(log.parent) == before
    assert_packs(log, INDICES[:2])


def test_each_image_is_on_the_disk_when_the_next_is_made_and_nothing_before_the_first(tmp_path):
    spool = Spool(tmp_path / "log.tsv", SHAPE, set())
    assert list(tmp_path.iterdir()) == []
    for count, index in enumerate(INDICES, start=1):
        spool.append(index, *images_of(index))
        assert spool_path(tmp_path / "log.tsv").stat().st_size == HEADER + count * RECORD
    spool.close()


@pytest.mark.parametrize("leave", [[], INDICES[:3]], ids=["unfinished", "finished"])
def test_log_begun_anew_forgets_the_images_of_the_old_one(tmp_path, leave):
    path = tmp_path / "log.tsv"
    fill(path, INDICES)
    if leave:
        write_log(path, leave)
        pack(path, [path])
    fill(path, [7, 8])
    assert not examples_path(path).exists(), "it would be of other rows"
    assert_packs(path, [7, 8])


def test_rows_whose_images_are_gone_are_refused_at_once(tmp_path):
    with pytest.raises(
        UserError, match="cannot resume .*log.tsv: its adversarial examples, .*log.npz, are missing"
    ):
        Spool(tmp_path / "log.tsv", SHAPE, {3})


numbers = st.integers(1, 6).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, HEADER + n * 60))
)


@given(numbers)
@example((4, 2, HEADER + 2 * RECORD))
@example((4, 2, HEADER + 3 * RECORD + 1))
@example((4, 4, HEADER + 4 * RECORD - 1))
def test_spool_cut_anywhere_goes_on_or_says_that_it_cannot(fact):
    """The log has ``rows`` rows: if their images are whole, the others are made again; else
    resuming is refused.
    """
    count, rows, cut = fact
    indices = list(range(10, 10 + count))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.tsv"
        fill(path, indices)
        content = spool_path(path).read_bytes()
        assert len(content) == HEADER + count * RECORD
        spool_path(path).write_bytes(content[:cut])
        whole = rows == 0 or cut >= HEADER + rows * RECORD
        with (
            contextlib.nullcontext()
            if whole
            else pytest.raises(UserError, match="log.tsv.*--overwrite")
        ):
            fill(path, [*indices[rows:], 99], done=set(indices[:rows]))
        if not whole:
            return
        assert_packs(path, [*indices, 99])


@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True),
    st.tuples(st.sampled_from([1, 3]), st.integers(1, 5), st.integers(1, 5)),
    st.integers(0, 5),
)
def test_images_of_any_shape_and_order_come_back_bit_by_bit(indices, shape, stop):
    """Written by two processes, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.tsv"
        fill(path, indices[:stop], shape=shape)
        fill(path, indices[stop:], done=set(indices[:stop]), shape=shape)
        write_log(path, indices)
        pack(path, [path])
        arrays = read_examples(examples_path(path))
        assert arrays["idx"].tolist() == sorted(indices)
        assert arrays["predict"].tolist() == [1 if index % 2 else -1 for index in sorted(indices)]
        for index, image, adversarial in zip(
            sorted(indices), arrays["image"], arrays["adversarial"]
        ):
            wanted = images_of(index, shape)
            assert (image.tobytes(), adversarial.tobytes()) == (
                wanted[0].tobytes(),
                wanted[1].tobytes(),
            )


FOREIGN = {
    "empty": b"",
    "text": b"idx\tlabel\n0\t1\n",
    "binary": bytes(range(256)),
    "no shape": b'{"size": 3}\n',
    "list": b"[1, 2, 3]\n",
    "number": b'{"shape": 5}\n',
    "words": b'{"shape": ["a", "b"]}\n',
    "negative": b'{"shape": [-1, 2]}\n',
    "huge": b'{"shape": [99999999999, 99999999999]}\n',
    "fraction": b'{"shape": [1.5]}\n',
    "null": b"null\n",
    "other shape": b'{"shape": [3, 2, 3]}\n' + bytes(2000),
    "other order": b'{"shape": [1, 3, 2]}\n' + bytes(2000),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_spool_that_is_something_else_is_one_line(log, content):
    spool_path(log).write_bytes(content)
    with pytest.raises(UserError, match="log.tsv.examples.*--overwrite"):
        fill(log, [41], done=set(INDICES))
    assert spool_path(log).read_bytes() == content


def archive_bytes(*array: np.ndarray, **arrays: np.ndarray) -> bytes:
    """Of named arrays, or of a single one without a name."""
    with tempfile.TemporaryFile() as file:
        np.save(file, *array) if array else np.savez(file, **arrays)
        file.seek(0)
        return file.read()


PICTURES = np.zeros((4, *SHAPE), np.float32)
OWN = {"idx": np.array(INDICES), "image": PICTURES, "adversarial": PICTURES}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "text": lambda content: b"I am a file.\n",
    "start": lambda content: content[:100],
    "end lost": lambda content: content[:-40],
    "zeros inside": lambda content: content[:400] + bytes(60) + content[460:],
    "no images": lambda content: archive_bytes(idx=np.array(INDICES)),
    "pickled": lambda content: archive_bytes(**{**OWN, "image": np.array([{}], dtype=object)}),
    "a single array": lambda content: archive_bytes(PICTURES),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_archive_that_is_something_else_is_one_line(log, damage):
    pack(log, [log])
    path = examples_path(log)
    path.write_bytes(damage(path.read_bytes()))
    for use in (
        lambda: read_examples(path),
        lambda: write_pictures(log, 1),
        lambda: fill(log, [41], done=set(INDICES)),
    ):
        with pytest.raises(UserError, match="log.npz"):
            use()
    assert not spool_path(log).exists() and not pictures_folder(log).exists()


UNFIT = {
    "other shape": {
        **OWN,
        "image": np.zeros((4, 3, 2, 3), np.float32),
        "adversarial": np.zeros((4, 3, 2, 3), "f4"),
    },
    "fewer": {name: array[:3] for name, array in OWN.items()},
    "fewer images": {**OWN, "image": PICTURES[:3]},
    "other indices": {**OWN, "idx": np.array([3, 10, 11, 41])},
    "one index": {**OWN, "idx": np.array(3)},
    "words": {**OWN, "idx": np.array(["a", "b", "c", "d"])},
}


@pytest.mark.parametrize("arrays", UNFIT.values(), ids=UNFIT)
def test_archive_of_another_log_is_not_continued(log, arrays):
    pack(log, [log])
    examples_path(log).write_bytes(archive_bytes(**arrays))
    with pytest.raises(UserError, match="log"):
        fill(log, [41], done=set(INDICES))


def test_archive_that_lacks_columns_or_is_missing_is_one_line(log):
    pack(log, [log])
    examples_path(log).write_bytes(archive_bytes(**OWN))
    with pytest.raises(UserError, match="log.npz"):
        write_pictures(log, 1)
    examples_path(log).unlink()
    with pytest.raises(UserError, match="log.npz cannot be read"):
        read_examples(examples_path(log))


@pytest.fixture
def full_disk(monkeypatch):
    """Once called, every file is written but then turns out not to have reached the disk."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", fail)


def test_full_disk_while_packing_keeps_the_spool(log, full_disk):
    full_disk()
    with pytest.raises(OSError, match="No space left on device") as caught:
        pack(log, [log])
    assert caught.value.filename == str(examples_path(log))
    assert not examples_path(log).exists() and spool_path(log).exists()
    assert sorted(path.name for path in log.parent.iterdir()) == ["log.tsv", "log.tsv.examples"]


def test_full_disk_while_appending_names_the_file_and_leaves_what_can_be_continued(
    tmp_path, full_disk, monkeypatch
):
    """The image may be whole or not: its row was not written, so it is made again."""
    path, fsync = tmp_path / "log.tsv", os.fsync
    spool = Spool(path, SHAPE, set())
    spool.append(3, *images_of(3))
    full_disk()
    with pytest.raises(OSError, match="No space left on device") as caught:
        spool.append(10, *images_of(10))
    monkeypatch.setattr(os, "fsync", fsync)
    spool.close()
    fill(path, INDICES[1:], done={3})
    assert_packs(path, INDICES)
    assert caught.value.filename == str(spool_path(path))


def colours(path: Path, box: tuple[int, int, int, int]) -> set[tuple[int, int, int]]:
    with Image.open(path) as picture:
        return {colour for _, colour in picture.crop(box).getcolors(2**20)}


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (3, 4, 9), (1, 300, 200)], ids=str)
def test_pictures_show_the_image_what_became_of_it_and_the_difference(tmp_path, shape):
    """Uniform images of grey level 51 and 102: their difference, magnified to the full range, is
    white.
    """
    log = tmp_path / "log.tsv"
    spool = Spool(log, shape, set())
    for index in (5, 123456):
        spool.append(index, np.full(shape, 0.2, np.float32), np.full(shape, 0.4, np.float32))
    spool.close()
    write_log(log, [5, 123456])
    pack(log, [log])
    paths = write_pictures(log, 1)
    assert (
        paths == [pictures_folder(log) / "00005.png"]
        and list(pictures_folder(log).iterdir()) == paths
    )
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


def test_picture_of_an_image_that_was_left_alone_has_no_division_by_zero(tmp_path):
    log = tmp_path / "log.tsv"
    spool = Spool(log, SHAPE, set())
    spool.append(0, *[images_of(0)[0]] * 2)
    spool.close()
    write_log(log, [0])
    pack(log, [log])
    with np.errstate(all="raise"):
        (path,) = write_pictures(log, 1)
    with Image.open(path) as picture:
        picture.verify()
