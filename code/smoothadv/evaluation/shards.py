"""Shards: logs with a share of the examples of one evaluation, and how they are merged into one
log.

Shard K of N has every N-th of the selected examples, from the K-th on (K from 0): neighbouring
examples, which often cost the same, are spread over all shards. No torch.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.base.files import read_regular, refuse_to_replace, reserved, write_json, write_text
from smoothadv.records import logs as records

_SHARD_NAME = re.compile(r"\d+-of-\d+\.tsv")
_EXAMPLES_PER_SHARD, _MOST_SHARDS = 8, 256


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
        selection: Any = {"only": list(examples)}
        if isinstance(examples, range):
            selection = [examples.start, examples.stop, examples.step]
        return {"index": self.index, "count": self.count, "examples": selection}


@dataclass(frozen=True)
class WrittenLog:
    """A log and the batches that made it; ``is_whole`` is False where this process has written only
    a share of it.
    """

    path: Path
    is_whole: bool
    batch: int
    attack_batch: int | None


def shard_count(examples: int) -> int:
    """The number of shards for processes that share the work: small shards, so that a slow process
    takes fewer.

    It depends on the number of examples only, so that another number of processes can continue the
    work.
    """
    return max(1, min(_MOST_SHARDS, -(-examples // _EXAMPLES_PER_SHARD)))


def shards_of(log: Path) -> list[Path]:
    """The existing shards of ``log``, in their order."""
    folder = records.shard_folder(log)
    found = (
        [path for path in folder.iterdir() if _SHARD_NAME.fullmatch(path.name)]
        if folder.is_dir()
        else []
    )
    return sorted(found)


def check_siblings(log: Path, settings: dict[str, Any]) -> None:
    """UserError where an existing shard of ``log`` could not be merged with a shard of these
    ``settings``.
    """
    ours, others = _without_index(settings), []
    for path in shards_of(log):
        theirs = records.recorded_settings(path)
        if not isinstance(theirs.get("shard"), dict):
            continue
        if difference := records.differing_settings(_without_index(theirs), ours):
            raise UserError(
                f"{path} was made with other settings: {difference}; give the same ones, or remove "
                f"{path.parent}"
            )
        others.append(theirs)
    records.warn_of_other_logits(records.shard_folder(log), ours, *others)


def is_merged(shard: Path, log: Path) -> bool:
    """Whether ``log`` exists and contains all rows of a shard."""
    try:
        return set(read_regular(shard).splitlines()) <= set(read_regular(log).splitlines())
    except FileNotFoundError:
        return False


def _without_index(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that all shards share."""
    return {
        **settings,
        "shard": {name: value for name, value in settings["shard"].items() if name != "index"},
    }


def merge(log: Path, shards: Sequence[Path], overwrite: bool = False) -> int:
    """Merge ``shards`` into ``log``, with rows in the order of the examples; returns the number of
    rows.

    UserError, and nothing is written, if a shard is missing or unfinished, or if shards overlap or
    have other settings.
    """
    if not shards:
        raise UserError(
            f"there are no shards of {log} in {records.shard_folder(log)}: name them, or make them "
            "with --shard K/N"
        )
    missing = [str(path) for path in shards if not path.is_file()]
    if missing:
        raise UserError(f"shard {missing[0]} does not exist")
    refuse_to_replace(log, *records.LOG)
    manifests = [records.read_manifest_file(path) for path in shards]
    settings = _common_settings(shards, manifests)
    _check_complete(shards, manifests)
    header, rows = _joined_rows(shards, manifests)
    runs = [
        {"shard": manifest["settings"]["shard"]["index"], **run}
        for manifest in manifests
        for run in manifest["runs"]
    ]
    with reserved(log, overwrite):
        # In this order, so that a kill at any point leaves no rows beside another log's manifest,
        # and merging works again.
        log.unlink(missing_ok=True)
        write_json(records.manifest_path(log), {"settings": settings, "runs": runs})
        write_text(log, "\n".join([header, *(rows[idx] for idx in sorted(rows))]) + "\n")
    return len(rows)


def _common_settings(shards: Sequence[Path], manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all shards share; UserError naming the first difference."""
    shared = []
    for path, manifest in zip(shards, manifests):
        if not _is_record(manifest["settings"].get("shard")):
            raise UserError(f"{path} is no shard: its manifest does not say which one")
        shared.append(_without_index(manifest["settings"]))
        difference = records.differing_settings(shared[0], shared[-1])
        if difference:
            raise UserError(
                f"cannot merge {path} with {shards[0]}, made with other settings: {difference}"
            )
    records.warn_of_other_logits(shards[0].parent, *shared)
    return {name: value for name, value in manifests[0]["settings"].items() if name != "shard"}


def _is_record(value: Any) -> bool:
    """Whether it is what ``Shard.record`` returns; a manifest may hold anything."""
    if not isinstance(value, dict) or not {"index", "count", "examples"} <= value.keys():
        return False
    examples = value["examples"]
    numbers = examples.get("only") if isinstance(examples, dict) else examples
    if not isinstance(numbers, list) or (
        numbers is examples and (len(numbers) != 3 or numbers[2] == 0)
    ):
        return False
    whole = [
        type(number) is int and abs(number) < 2**61
        for number in (value["index"], value["count"], *numbers)
    ]
    return all(whole) and 0 <= value["index"] < value["count"]


def _check_complete(shards: Sequence[Path], manifests: Sequence[dict[str, Any]]) -> None:
    """UserError unless there is exactly one log for each shard."""
    owners: dict[int, Path] = {}
    for path, manifest in zip(shards, manifests):
        index = manifest["settings"]["shard"]["index"]
        if index in owners:
            raise UserError(f"cannot merge {path} and {owners[index]}: both are shard {index}")
        owners[index] = path
    count = manifests[0]["settings"]["shard"]["count"]
    number = count - len(owners)
    if number:
        # Not all of them: a manifest can claim any count.
        missing = [
            str(index)
            for index in itertools.islice((i for i in range(count) if i not in owners), 8)
        ]
        raise UserError(
            f"cannot merge: of {count} shards {number} are missing, {', '.join(missing)}"
            f"{', ...' if number > 8 else ''}; make them with --shard {missing[0]}/{count}"
        )


def _joined_rows(
    shards: Sequence[Path], manifests: Sequence[dict[str, Any]]
) -> tuple[str, dict[int, str]]:
    """The header and the rows of all shards by example; UserError if a shard has other rows than it
    should have.
    """
    header, rows = "", {}
    for path, manifest in zip(shards, manifests):
        record = manifest["settings"]["shard"]
        examples = (
            record["examples"]["only"]
            if "only" in record["examples"]
            else range(*record["examples"])
        )
        share = Shard(record["index"], record["count"]).of(examples)
        expected = (
            share if isinstance(share, range) else set(share)
        )  # a manifest can claim a range of any length
        try:
            text = read_regular(path).decode()
        except UnicodeDecodeError as error:
            raise UserError(f"cannot merge {path}: it is no text ({error.reason})") from error
        first, *lines = text.splitlines() or [""]
        found = {
            int(line.partition("\t")[0]): line for line in lines if re.match("[0-9]{1,18}\t", line)
        }
        torn = bool(text) and not text.endswith("\n")
        foreign = sorted(index for index in found if index not in expected)
        if torn or foreign or not len(expected) == len(found) == len(lines):
            reason = f"it has {len(lines)} rows of {len(expected)}"
            if torn or foreign:
                reason = (
                    "its last row is torn"
                    if torn
                    else f"{reason}, and example {foreign[0]} does not belong to it"
                )
            raise UserError(
                f"cannot merge {path}: {reason}; finish it with --shard "
                f"{record['index']}/{record['count']}"
            )
        if header and first != header:
            raise UserError(
                f"cannot merge {path}: its columns are '{first}', those of {shards[0]} '{header}'"
            )
        header = first
        rows.update(found)
    return header, rows
