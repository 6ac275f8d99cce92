"""Logs: whatever stops their writers, no row and no image is lost; anything odd is refused, in one
line.
"""

import errno
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smoothadv.base.errors import UserError
from smoothadv.evaluation.shards import Shard, gather, is_merged, merge
from smoothadv.records import writer
from smoothadv.records.logs import (
    CERTIFICATION_COLUMNS,
    examples_path,
    manifest_path,
    shard_folder,
    shards_of,
    spool_path,
)
from smoothadv.records.readers import read_examples
from smoothadv.records.writer import finish_images
from support import refusals
from support.commands import snapshot
from support.logs_of_attacks import (
    COLUMNS,
    RUN,
    SETTINGS,
    SHAPE,
    assert_images,
    images_of,
    line_of,
    open_log,
    row_of,
    text_of,
    write_rows,
)

ROWS = [3, 10, 11, 40]
WHOLE = text_of(ROWS).encode()
RECORD = 8 + 2 * 4 * 6


class Killed(BaseException):
    """The process ends here."""


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Let the process end at a later change of a folder: a file is renamed or removed."""

    def ending(act):
        def change(*arguments, **options):
            nonlocal steps
            steps -= 1
            if steps < 0:
                raise Killed
            return act(*arguments, **options)

        return change

    patch.setattr(os, "replace", ending(os.replace))
    patch.setattr(Path, "unlink", ending(Path.unlink))


class Writers(RuleBasedStateMachine):
    """One log, which one process, shards and processes of torchrun write, stopped at any point."""

    @initialize(count=st.integers(1, 9), step=st.integers(1, 3))
    def begin(self, count, step):
        self.folder = Path(tempfile.mkdtemp())
        self.log = self.folder / "log.tsv"
        self.examples = range(0, count * step, step)
        self.written: set[int] = set()

    def teardown(self):
        if not hasattr(self, "folder"):
            return
        gather(self.log, SETTINGS)
        write_rows(self.log, self.examples, examples=self.examples)
        finish_images(self.log, SHAPE)
        assert sorted(self.log.read_text().splitlines()[1:]) == sorted(map(line_of, self.examples))
        assert_images(read_examples(examples_path(self.log)), list(self.examples))
        assert not spool_path(self.log).exists() and not shard_folder(self.log).exists()
        shutil.rmtree(self.folder)

    def add(self, path: Path, examples, number: int, **changes) -> None:
        with open_log(path, examples=examples, **changes) as log:
            assert log.rows.keys() == self.rows_in(path)
            for index in [index for index in examples if index not in log.rows][:number]:
                log.append(row_of(index), images_of(index))
                self.written.add(index)

    def add_to_shard(self, shard: Shard, examples, number: int) -> None:
        settings = {**SETTINGS, "shard": shard.record(self.examples)}
        self.add(shard.path(self.log), shard.of(examples), number, settings=settings)

    @staticmethod
    def rows_in(path: Path) -> set[int]:
        """The examples whose rows are whole in a file, each as it must be."""
        lines = path.read_text().split("\n")[1:-1] if path.exists() else []
        assert all(line == line_of(int(line.split("\t")[0])) for line in lines)
        return {int(line.split("\t")[0]) for line in lines}

    def unmerged(self) -> list[Path]:
        return [path for path in shards_of(self.log) if not is_merged(path, self.log)]

    @invariant()
    def no_row_is_lost(self):
        if hasattr(self, "folder"):
            found = set().union(*map(self.rows_in, [self.log, *shards_of(self.log)]))
            assert found == self.written

    @precondition(lambda self: not self.unmerged())
    @rule(number=st.integers(0, 4))
    def one_process(self, number):
        self.add(self.log, self.examples, number)

    @precondition(lambda self: not self.log.exists())
    @rule(index=st.integers(0, 2), number=st.integers(0, 4))
    def shard_of_three(self, index, number):
        assume(all("-of-3" in path.name for path in shards_of(self.log)))
        self.add_to_shard(Shard(index, 3), self.examples, number)

    @rule(numbers=st.lists(st.integers(0, 4), min_size=1, max_size=4))
    def processes_of_torchrun(self, numbers):
        """They end before the first one has gathered their shards."""
        gather(self.log, SETTINGS)
        done = self.rows_in(self.log)
        missing = [index for index in self.examples if index not in done] if done else self.examples
        for rank, number in enumerate(numbers):
            if missing:
                self.add_to_shard(Shard(rank, len(numbers)), missing, number)

    @rule(steps=st.integers(0, 12))
    def gathering_that_is_killed(self, steps):
        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            stop_after(patch, steps)
            gather(self.log, SETTINGS)

    @precondition(lambda self: shards_of(self.log))
    @rule(steps=st.integers(0, 12))
    def merging_that_is_killed(self, steps):
        """Only finished shards of one division are merged."""
        with pytest.MonkeyPatch.context() as patch, suppress(UserError, Killed):
            stop_after(patch, steps)
            merge(self.log, shards_of(self.log), overwrite=True)

    @rule(which=st.integers(0, 9), length=st.integers(1, 40))
    def power_fails(self, which, length):
        """Half a row and half an image are left at the end of a file."""
        paths = [path for path in (self.log, *shards_of(self.log)) if path.exists()]
        if paths:
            path = paths[which % len(paths)]
            with path.open("ab") as file:
                file.write(line_of(7).encode()[:length])
            if spool_path(path).exists():
                with spool_path(path).open("ab") as file:
                    file.write(bytes(length))


Writers.TestCase.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestWriters = Writers.TestCase


@pytest.mark.parametrize("second", range(6))
def test_a_merge_that_is_killed_twice_leaves_no_row_without_its_images(second):
    for first in range(6):
        writers = Writers()
        writers.begin(2, 1)
        writers.add_to_shard(Shard(0, 1), writers.examples, 2)
        writers.merging_that_is_killed(first)
        writers.merging_that_is_killed(second)
        writers.teardown()


# One log


def refusal(path: Path, existing: str = "resume", **changes) -> str:
    """The message with which opening is refused; no file changes."""
    before = snapshot(path.parent)
    message = refusals.refusal(open_log, path, names=path, existing=existing, **changes)
    assert snapshot(path.parent) == before
    return message


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "log.tsv"
    write_rows(path, ROWS)
    return path


def test_each_row_and_image_is_on_the_disk_before_the_next(tmp_path):
    path = tmp_path / "new" / "log.tsv"
    with open_log(path, "refuse") as log:
        assert not spool_path(path).exists()
        for number, index in enumerate(ROWS, start=1):
            log.append({**row_of(index), "another column": 1}, images_of(index))
            assert path.read_bytes() == b"".join(WHOLE.splitlines(keepends=True)[: number + 1])
            assert spool_path(path).stat().st_size == number * RECORD
            assert log.rows.keys() == set(ROWS[:number])


@pytest.mark.parametrize("length", [*range(0, 140, 3), len(WHOLE) - 1, len(WHOLE)])
def test_log_cut_at_any_byte_is_resumed_to_the_whole_log(log, length):
    log.write_bytes(WHOLE[:length])
    complete = max(0, WHOLE[:length].count(b"\n") - 1)
    with open_log(log) as resumed:
        assert resumed.rows.keys() == set(ROWS[:complete])
    write_rows(log, ROWS)
    assert log.read_bytes() == WHOLE
    finish_images(log, SHAPE)
    assert_images(read_examples(examples_path(log)), ROWS)


def test_manifest_lists_each_run_that_added_rows_or_chose_others(log):
    for device in ("idle", "another"):
        with open_log(log, run={**RUN, "device": device}) as resumed:
            if device != "idle":
                resumed.append(row_of(50), images_of(50))
    with open_log(log, run={**RUN, "max": 9}):
        pass
    manifest = json.loads(manifest_path(log).read_text())
    first, another = {"first_row": 0, **RUN}, {"first_row": 4, **RUN, "device": "another"}
    assert manifest["runs"] == [first, another, {"first_row": 5, **RUN, "max": 9}]


@pytest.mark.parametrize("packed", [False, True])
def test_overwriting_starts_anew_and_forgets_images(log, packed):
    if packed:
        finish_images(log, SHAPE)
    write_rows(log, [40], "overwrite", settings={**SETTINGS, "sigma": 1.0})
    assert log.read_text() == text_of([40]) and not examples_path(log).exists()
    assert json.loads(manifest_path(log).read_text())["settings"]["sigma"] == 1.0
    finish_images(log, SHAPE)
    assert_images(read_examples(examples_path(log)), [40])


def test_no_other_archive_is_removed(tmp_path):
    """A file of images may have the name of a log."""
    (tmp_path / "log.npz").write_bytes(b"mine")
    plain = {"settings": {"sigma": 1}, "image_shape": None}
    for existing in ("resume", "overwrite"):
        write_rows(tmp_path / "log.tsv", ROWS, existing, **plain)
    assert (tmp_path / "log.npz").read_bytes() == b"mine"


def test_log_of_another_kind_is_named_as_such(log):
    message = refusal(log, columns=CERTIFICATION_COLUMNS, settings={"sigma": 1})
    assert message == f"{log} is a prediction log: name another file"


@pytest.mark.parametrize("existing", ["refuse", "resume", "overwrite"])
def test_folder_is_refused(tmp_path, existing):
    assert "is a folder" in refusal(tmp_path, existing)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"sigma": 0.5}, "sigma was 0.25, now 0.5"),
        ({"alpha": 0.01}, "alpha was None, now 0.01"),
        ({"attack": {"name": "DDN"}}, "attack.name was 'PGD', now 'DDN'"),
        ({"noise_kernel": "Triton 9"}, "noise_kernel was None, now 'Triton 9'"),
    ],
)
def test_other_settings_are_refused_with_both_values_and_only_those(log, change, words):
    message = refusal(log, settings={**SETTINGS, **change})
    assert words in message and message.count(" was ") == 1 and "--overwrite" in message


@pytest.mark.parametrize("content", [None, b"", b'{"settings": {"sig', b"[]", b"{}", b"\xff\xfe"])
def test_log_without_a_readable_manifest_cannot_be_resumed(log, content):
    manifest_path(log).unlink() if content is None else manifest_path(log).write_bytes(content)
    message = refusal(log)
    assert str(manifest_path(log)) in message and "--overwrite" in message


ODD_LINES = {
    "a field less": b"10\t1\t-1\t1\t0\t0:00:01\t0.25\t0.5",
    "a field more": line_of(10).encode() + b"\t1",
    "nothing": b"",
    "an idx that is no number": b"x" + line_of(10).encode(),
    "a negative idx": b"-" + line_of(10).encode(),
    "an idx with a fraction": line_of(10).encode().replace(b"10", b"1.5", 1),
    "an idx that only looks like a digit": line_of(10).replace("10", "²", 1).encode(),
    "bytes that are no text": b"\xff\xfe\x00",
    "an example that was there already": line_of(3).encode(),
}


OF_COLUMNS = f"expected '{' '.join(COLUMNS)}'"
# The content of the log, the examples that are selected, and the words of the refusal.
UNFIT_ROWS = {
    **{
        what: (WHOLE.replace(line_of(10).encode(), line), None, "line 3")
        for what, line in ODD_LINES.items()
    },
    "few columns": (b"idx\tlabel\n", None, OF_COLUMNS),
    "no header": (b"0\t3\t0.5\n", None, OF_COLUMNS),
    "text": (b"something else\n", None, "its columns are 'something else'"),
    "certificates": (
        "\t".join(CERTIFICATION_COLUMNS).encode() + b"\n",
        None,
        "is a certification log: name another file",
    ),
    "an example that is not selected": (
        WHOLE,
        [3, 10, 40],
        "it holds example 11, which the present options",
    ),
}


@pytest.mark.parametrize("what", UNFIT_ROWS)
def test_rows_that_do_not_fit_are_refused_and_kept(log, what):
    content, examples, words = UNFIT_ROWS[what]
    log.write_bytes(content)
    assert words in refusal(log, examples=examples)


@pytest.mark.parametrize("existing", ["resume", "overwrite"])
def test_second_writer_is_refused_while_the_first_one_writes(log, existing):
    with open_log(log) as first:
        assert "another process" in refusal(log, existing)
        first.append(row_of(50), images_of(50))
    with open_log(log, existing):
        pass


def test_rows_that_another_process_wrote_before_the_lock_are_kept(tmp_path, monkeypatch):
    path, own = tmp_path / "log.tsv", writer.lock

    def lock_after_another(file, name):
        monkeypatch.setattr(writer, "lock", own)
        with open_log(path) as other:
            other.append(row_of(3), images_of(3))
        own(file, name)

    monkeypatch.setattr(writer, "lock", lock_after_another)
    with open_log(path) as log:
        assert log.rows.keys() == {3}


def replace(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"idx\tlabel\tradius\n")


@pytest.mark.parametrize("amended", [False, True])
@pytest.mark.parametrize("happens", [Path.unlink, replace, lambda path: shutil.rmtree(path.parent)])
def test_log_that_is_gone_is_noticed_at_the_next_row(log, happens, amended):
    with open_log(log) as resumed:
        happens(log)
        before = snapshot(log.parents[1])
        write = resumed.amend if amended else resumed.append
        given = [{"batch": 1}] if amended else [row_of(50), images_of(50)]
        refusals.refusal(write, *given, names="was deleted, moved or replaced while it was written")
        assert snapshot(log.parents[1]) == before


def test_full_disk_names_the_file_and_leaves_what_can_be_continued(log, monkeypatch):
    """The image may be whole or not: its row was not written, so it is made again."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_log(log) as resumed:
        resumed.append(row_of(50), images_of(50))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            for path, write, *given in (
                (spool_path(log), resumed.append, row_of(51), images_of(51)),
                (examples_path(log), finish_images, log, SHAPE),
            ):
                with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
                    write(*given)
    assert log.read_text() == text_of([*ROWS, 50]) and not examples_path(log).exists()
    write_rows(log, [51])
    finish_images(log, SHAPE)
    assert_images(read_examples(examples_path(log)), [*ROWS, 50, 51])


# Images


def test_archive_has_every_row_and_needs_no_reader_of_ours(log):
    finish_images(log, SHAPE)
    with np.load(log.with_name("log.npz"), allow_pickle=False) as archive:
        assert_images(dict(archive), ROWS)
        columns = {"idx", "label", "predict", "epsilon", "attack_norm"}
        assert set(archive) == {"image", "adversarial", *columns}
        assert archive["image"].shape == (4, *SHAPE) and archive["image"].dtype == np.float32
    before = snapshot(log.parent)
    assert sorted(before) == ["log.npz", "log.tsv", "log.tsv.manifest.json"]
    finish_images(log, SHAPE)
    assert snapshot(log.parent) == before, "again, for nothing"


SPOOLS = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "text": lambda content: b"idx\tlabel\n0\t1\n",
    "last torn": lambda content: content[:-1],
    "a record less": lambda content: content[:-RECORD],
    "of zeros": lambda content: bytes(len(content)),
    "shifted": lambda content: b"0" + content,
}


@pytest.mark.parametrize("damage", SPOOLS.values(), ids=SPOOLS)
def test_rows_without_their_images_are_refused(log, damage):
    content = damage(spool_path(log).read_bytes())
    spool_path(log).unlink() if content is None else spool_path(log).write_bytes(content)
    assert "--overwrite" in refusal(log)
    before = snapshot(log.parent)
    assert "--overwrite" in refusals.refusal(finish_images, log, SHAPE)
    assert snapshot(log.parent) == before


def archive_bytes(*array: np.ndarray, **arrays: np.ndarray) -> bytes:
    """Of named arrays, or of a single one without a name."""
    with tempfile.TemporaryFile() as file:
        np.save(file, *array) if array else np.savez(file, **arrays)
        file.seek(0)
        return file.read()


PICTURES = np.zeros((4, *SHAPE), np.float32)
OTHERS = np.zeros((4, 3, 2, 3), np.float32)
OWN = {"idx": np.array(ROWS), "image": PICTURES, "adversarial": PICTURES}
UNREADABLE = {
    "empty": lambda content: b"",
    "text": lambda content: b"I am a file.\n",
    "start": lambda content: content[:100],
    "end lost": lambda content: content[:-40],
    "zeros inside": lambda content: content[:400] + bytes(60) + content[460:],
    "no images": lambda content: archive_bytes(idx=np.array(ROWS)),
    "pickled": lambda content: archive_bytes(**{**OWN, "image": np.array([{}], dtype=object)}),
    "a single array": lambda content: archive_bytes(PICTURES),
    "fewer images": lambda content: archive_bytes(**{**OWN, "image": PICTURES[:3]}),
    "one index": lambda content: archive_bytes(**{**OWN, "idx": np.array(3)}),
    "words": lambda content: archive_bytes(**{**OWN, "idx": np.array(["a", "b", "c", "d"])}),
}
UNFIT = {
    "fewer": lambda content: archive_bytes(**{name: array[:3] for name, array in OWN.items()}),
    "other indices": lambda content: archive_bytes(**{**OWN, "idx": np.array([3, 10, 11, 41])}),
    "other shape": lambda content: archive_bytes(**{**OWN, "image": OTHERS, "adversarial": OTHERS}),
}


@pytest.mark.parametrize("damage", [*UNREADABLE, *UNFIT])
def test_archive_that_is_something_else_is_one_line(log, damage):
    finish_images(log, SHAPE)
    path = examples_path(log)
    path.write_bytes({**UNREADABLE, **UNFIT}[damage](path.read_bytes()))
    before = snapshot(log.parent)
    if damage in UNREADABLE:
        refusals.refusal(read_examples, path, names="log.npz")
    refusals.refusal(open_log, log, names="log.npz")
    assert snapshot(log.parent) == before
    path.unlink()
    refusals.refusal(finish_images, log, SHAPE, names="log.npz")
    refusals.refusal(read_examples, path, names="log.npz cannot be read")
