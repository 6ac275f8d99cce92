"""Shards: logs with a share of the examples of one evaluation, and how they become one log.

Shard K of N has every N-th of the selected examples, from the K-th on (K from 0): neighbouring
examples, which often cost the same, are spread over all shards. No torch.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.base.files import (
    lock,
    refuse_to_replace,
    reserved,
    write_json,
    write_text,
)
from smoothadv.records import logs as records
from smoothadv.records.writer import (
    finish_images,
    forget_images,
    read_rows,
    saved_images,
    write_images,
)


@dataclass(frozen=True)
class Shard:
    """Share ``index`` of ``count``, 0 <= index < count."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, examples: Sequence[int]) -> Sequence[int]:
        """The examples of this shard."""
        return examples[self.index :: self.count]

    def path(self, log: Path) -> Path:
        """The path of this shard of ``log``."""
        width = len(str(self.count - 1))
        return records.shard_folder(log) / f"{self.index:0{width}d}-of-{self.count}.tsv"

    def record(self, examples: Sequence[int]) -> dict[str, Any]:
        """What the manifest of a shard records in addition to the settings that all shards
        share.
        """
        selection = records.selection_of(examples)
        return {"index": self.index, "count": self.count, "examples": selection}


def is_merged(shard: Path, log: Path) -> bool:
    """Whether ``log`` exists and contains all rows of a shard."""
    try:
        return set(shard.read_bytes().splitlines()) <= set(log.read_bytes().splitlines())
    except FileNotFoundError:
        return False


def remove_shards(log: Path) -> None:
    """Remove the shards of a log that is to be replaced; UserError where another process writes
    one.
    """
    shards = records.shards_of(log)
    with _locked(shards):
        if shards:
            shutil.rmtree(records.shard_folder(log))


@contextlib.contextmanager
def _locked(shards: Sequence[Path]) -> Iterator[None]:
    """A context in which no other process writes shards; UserError where one does."""
    with contextlib.ExitStack() as opened:
        for path in shards:
            lock(opened.enter_context(path.open("rb")), path)
        yield


def check_siblings(log: Path, settings: dict[str, Any]) -> set[int]:
    """The examples of all rows in existing shards of ``log``; UserError where one could not be
    merged with a shard of these ``settings``.
    """
    folder = records.shard_folder(log)
    siblings = [_read_part(path) for path in records.shards_of(log) if _has_rows(path)]
    _check_settings(siblings, settings, f"give the same ones, or remove {folder}")
    return {index for part in siblings for index in part.rows}


def merge(log: Path, shards: Sequence[Path], overwrite: bool = False) -> int:
    """Merge finished ``shards`` into ``log``, with rows in the order of the examples; returns the
    number of rows.

    UserError, and nothing is written, if a shard is missing or unfinished, or if shards overlap or
    have other settings. The shards stay where they are.
    """
    if not shards:
        raise UserError(
            f"there are no shards of {log} in {records.shard_folder(log)}: name them, or make them "
            "with --shard K/N"
        )
    refuse_to_replace(log, *records.LOG)
    parts = [_read_part(path) for path in shards]
    for part in parts:
        if not {"index", "count", "examples"} <= part.settings.get("shard", {}).keys():
            raise UserError(f"{part.path} is no shard: its manifest does not say which one")
    _check_settings(parts, parts[0].settings, f"{shards[0]} has these")
    _check_complete(parts)
    images, shape = _joined_images(parts)
    with reserved(log, overwrite):
        # In this order, so that a kill at any point leaves no rows without their images or beside
        # another log's manifest, and merging works again.
        log.unlink(missing_ok=True)
        forget_images(log)
        rows = _write(log, parts, images)
    if images:
        finish_images(log, shape)
    return rows


def gather(log: Path, settings: dict[str, Any]) -> None:
    """Move the finished rows of all shards of ``log``, which may be unfinished, into the log, and
    remove the shards.

    UserError, and nothing is written, where they or the log have other ``settings``, or another
    process writes them. A kill at any point loses no row: what is there twice is equal.
    """
    folder, shards = records.shard_folder(log), records.shards_of(log)
    if not folder.exists():
        return
    with _locked(shards), reserved(log):
        parts = [_read_part(path) for path in (log, *shards) if path.exists() and _has_rows(path)]
        _check_settings(parts, settings, "--overwrite starts anew")
        if parts:
            _write(log, parts, _joined_images(parts)[0])
        for path in sorted(folder.iterdir()):
            if records.SHARD_NAME.match(path.name):
                path.unlink()
    with contextlib.suppress(OSError):  # the folder contains other files
        folder.rmdir()


@dataclass(frozen=True)
class _Part:
    """A log whose rows go into another log: its manifest, its header and its rows by example."""

    path: Path
    settings: dict[str, Any]
    runs: list[dict[str, Any]]
    header: str
    rows: dict[int, str]


def _read_part(path: Path) -> _Part:
    """A part without a last row that is torn; UserError where it has a line that is no row."""
    if not path.exists():
        raise UserError(f"cannot merge {path}: it does not exist")
    manifest = records.read_manifest_file(path)
    header, rows = read_rows(path.read_bytes(), f"cannot merge {path}")
    return _Part(path, manifest["settings"], manifest["runs"], header, rows)


def _has_rows(path: Path) -> bool:
    """Whether a log has more than a part of its header."""
    return b"\n" in path.read_bytes()


def _check_settings(parts: Sequence[_Part], settings: dict[str, Any], way: str) -> None:
    """UserError, which says the ``way`` on, where a part has other settings than these, or other
    columns than the first part.

    Of shards, all have the same number of shards and examples, unless these settings have none.
    """
    others = [_without_index(part.settings, "shard" in settings) for part in parts]
    expected = _without_index(settings)
    for part, other in zip(parts, others):
        if difference := records.differing_settings(other, expected):
            raise UserError(f"{part.path} was made with other settings: {difference}; {way}")
        if part.header != parts[0].header:
            raise UserError(
                f"cannot merge {part.path}: its columns are '{part.header}', those of "
                f"{parts[0].path} '{parts[0].header}'"
            )
    if parts:
        records.warn_of_other_logits(parts[-1].path.parent, expected, *others)


def _without_index(settings: dict[str, Any], keeps_shard: bool = True) -> dict[str, Any]:
    """The settings that all shards share."""
    common = {name: value for name, value in settings.items() if name != "shard"}
    if keeps_shard and "shard" in settings:
        common["shard"] = {**settings["shard"], "index": None}
    return common


def _check_complete(parts: Sequence[_Part]) -> None:
    """UserError unless the shards together have each of the examples once."""
    record, owners = parts[0].settings["shard"], dict[int, Path]()
    chosen, count = record["examples"], record["count"]
    examples = chosen["only"] if isinstance(chosen, dict) else range(*chosen)
    known = set(examples)
    for part in parts:
        for index in part.rows:
            if index in owners or index not in known:
                other = (
                    f"is in {owners[index]}, too" if index in owners else "does not belong to it"
                )
                raise UserError(f"cannot merge {part.path}: example {index} {other}")
            owners[index] = part.path
    shards = sorted({place % count for place, index in enumerate(examples) if index not in owners})
    if shards:
        raise UserError(
            f"cannot merge: there are {len(owners)} rows of {len(examples)}, and shards "
            f"{', '.join(map(str, shards))} lack some; finish them with --shard {shards[0]}/{count}"
        )


def _write(log: Path, parts: Sequence[_Part], images: dict[int, Any]) -> int:
    """Write the log that has the rows of all parts; returns their number."""
    rows: dict[int, str] = {}
    runs = []
    for part in parts:
        rows = {**part.rows, **rows}
        shard = {"shard": part.settings["shard"]["index"]} if "shard" in part.settings else {}
        runs += [{**shard, **run} for run in part.runs]
    if images:
        write_images(log, images)
    settings = _without_index(parts[0].settings, keeps_shard=False)
    write_json(records.manifest_path(log), {"settings": settings, "runs": runs})
    lines = [parts[0].header, *(rows[index] for index in sorted(rows))]
    write_text(log, "\n".join(lines) + "\n")
    return len(rows)


def _joined_images(parts: Sequence[_Part]) -> tuple[dict[int, Any], Sequence[int]]:
    """The saved images of all rows, in the order of the examples, and the shape of each; none if
    the parts have none.
    """
    images: dict[int, Any] = {}
    runs = (run for part in parts for run in part.runs)
    shape = next((run["image_shape"] for run in runs if "image_shape" in run), ())
    for part in parts:
        if part.settings.get(records.IMAGES):
            images |= saved_images(part.path, shape, part.rows)
    return dict(sorted(images.items())), shape
