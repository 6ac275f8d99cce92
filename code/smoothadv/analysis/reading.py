"""Finds and reads logs: files, folders, globs and named groups become logs with names."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoothadv.analysis.facts import Facts, Value, facts_of
from smoothadv.analysis.logs import Log, Logs, sizes_of
from smoothadv.analysis.plausibility import check_certificates
from smoothadv.base.errors import UserError, escape
from smoothadv.base.progress import Progress
from smoothadv.records.logs import is_manifest, is_shard_folder
from smoothadv.records.readers import READERS, kind_of_log, resembles_log
from smoothadv.statistics.exact import Exact

Warn = Callable[[str], None]
_READ_BY = {
    "prediction": "; for predictions there are empirical and compare",
    "training": "; for training plot_training",
}


@dataclass(frozen=True)
class _Found:
    path: Path
    group: str
    is_named: bool  # it is a fault if it is no log; a file that a search found is skipped
    group_is_named: bool  # as NAME=LOG


def read_logs(
    arguments: Sequence[str],
    kinds: Iterable[str] = ("certification",),
    stated: Mapping[str, Value] | None = None,
    warn: Warn = lambda message: None,
) -> Logs:
    """The logs of the given ``kinds`` that files, folders (searched throughout) and globs name.

    ``NAME=LOG`` puts the logs that LOG names into the group NAME. ``stated`` hyper-parameters win
    over all others. A log that is damaged or cannot be true is left out; ``warn`` gets the reason.
    UserError if no log is left.
    """
    found: dict[tuple[str, str | None], _Found] = {}
    logs, other_kinds = Logs(), list[str]()
    for argument in arguments:
        for entry in _find(argument, logs.left_out):
            # A log may belong to several named groups, but is read once where it was merely named
            # twice.
            group = entry.group if entry.group_is_named else None
            found.setdefault((os.path.realpath(entry.path), group), entry)
    for entry in Progress(found.values(), "reading logs", unit="log", delay=1):
        try:
            kind = _kind_to_read(entry, set(kinds), other_kinds)
            if kind is not None:
                getattr(logs, kind).append(_read(entry, kind, stated or {}))
        except UserError as error:
            logs.left_out.append(str(error))
    if not logs.all:
        raise _nothing_left(" ".join(arguments), kinds, logs.left_out, other_kinds, warn)
    logs = _without_training_images(logs)
    for reason in logs.left_out:
        warn(f"{reason}; it is left out")
    return _named(logs)


def _nothing_left(
    where: str, kinds: Iterable[str], left_out: list[str], other_kinds: list[str], warn: Warn
) -> UserError:
    if len(left_out) == 1:
        return UserError(left_out[0])
    for reason in left_out:
        warn(reason)
    if left_out:
        return UserError(f"{where}: none of {len(left_out)} logs can be used")
    counts = [
        f"{other_kinds.count(kind):,} {kind}{_READ_BY.get(kind, '')}"
        for kind in sorted({*other_kinds})
    ]
    found = " (a file that starts with idx, label, predict, ...)"
    if counts:
        found = ", but others: " + ", ".join(counts)
    return UserError(f"{where}: holds no {' or '.join(kinds)} log{found}")


def _find(argument: str, left_out: list[str]) -> list[_Found]:
    """What an argument names; ``left_out`` gets the reasons why folders cannot be listed."""
    group, equals, place = argument.partition("=")
    if not equals or not group or os.path.exists(argument) or glob.glob(argument, recursive=True):
        group, place = "", argument
    is_grouped = bool(group)
    if os.path.isfile(place):
        return [_Found(Path(place), group, True, is_grouped)]
    if os.path.isdir(place):
        files = [] if is_shard_folder(Path(place).name) else _files_below(Path(place), left_out)
        name = group or place.rstrip("/").removeprefix("./") or place
        return [_Found(path, name, False, is_grouped) for path in files]
    matches = sorted(glob.glob(place, recursive=True))
    if not matches:
        raise UserError(f"{place} is no file, no folder and matches nothing")
    files = []
    for match in map(Path, matches):
        if not any(map(is_shard_folder, match.parts)):
            files += _files_below(match, left_out) if match.is_dir() else [match]
    found = [
        _Found(path, group or place, False, is_grouped) for path in files if not is_manifest(path)
    ]
    # Other files are skipped; but if no match is a log, the fault of the first one must be
    # reported.
    if not any(kind_of_log(entry.path) or resembles_log(entry.path) for entry in found):
        found = [replace(entry, is_named=True) for entry in found[:1]]
    return found


def _files_below(folder: Path, left_out: list[str]) -> list[Path]:
    """All files that are not hidden, also behind links, each folder once; without shards, which are
    no logs yet.
    """
    files, visited, refused = [], set(), list[OSError]()
    found = os.walk(folder, followlinks=True, onerror=refused.append)
    for place, folders, names in Progress(
        found, f"searching {escape(str(folder), 80)}", unit="folder", delay=1
    ):
        real = os.path.realpath(place)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [
            name for name in folders if not name.startswith(".") and not is_shard_folder(name)
        ]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    left_out += [f"{error.filename} cannot be listed: {error.strerror}" for error in refused]
    # A file that cannot be asked what it is stays: reading it gives the reason.
    files = [path for path in files if os.path.isfile(path) or not os.path.exists(path)]
    return sorted(path for path in files if not is_manifest(path))


def _kind_to_read(entry: _Found, kinds: set[str], other_kinds: list[str]) -> str | None:
    """The kind of a log that is to be read, None if it is to be skipped; UserError if it was named
    and is no log of these ``kinds``.
    """
    if is_manifest(entry.path):  # no search finds these
        raise UserError(f"{entry.path} is a manifest, no log")
    kind = kind_of_log(entry.path)
    if kind is None:
        # Of a file that only looks like a log, the reader reports the fault.
        return "certification" if entry.is_named or resembles_log(entry.path) else None
    if kind in kinds:
        return kind
    if entry.is_named:
        needed = f"what is needed here is a {' or '.join(sorted(kinds))} log"
        raise UserError(f"{entry.path} is a {kind} log; {needed}{_READ_BY.get(kind, '')}")
    other_kinds.append(kind)
    return None


def _read(entry: _Found, kind: str, stated: Mapping[str, Value]) -> Log:
    """The log, without its name; UserError if it is damaged or cannot be true."""
    table = READERS[kind](entry.path)
    facts = Facts() if kind == "training" else facts_of(kind, entry.path, stated)
    notes = tuple(table.attrs["notes"])
    log = Log("", entry.path, entry.group, table, facts, notes, group_is_named=entry.group_is_named)
    if kind == "certification":
        return check_certificates(_with_method(log))
    if kind == "prediction" and facts.manifest is None and facts.get("attack") is None:
        note = "its path names no attack: it is treated as predictions on clean images"
        return replace(log, notes=(*notes, note))
    return log


def _with_method(log: Log) -> Log:
    """The log with the name of its procedure as ``method`` among its facts, where it is known."""
    method, source = log.facts.settings.get("method"), "manifest"
    if method is None and log.procedure_type is Exact and not log.is_on_grid:
        method, source = "exact", "assumed"
    return (
        log if method is None else replace(log, facts=log.facts.replaced("method", method, source))
    )


def _without_training_images(logs: Logs) -> Logs:
    """Leaves out certificates of training images unless there are no others: they must not look
    like test accuracy.
    """
    training = [log for log in logs.certification if log.facts.get("split") == "train"]
    if len(training) == len(logs.certification):
        return logs
    left_out = [f"{log.path} certifies training images, the others do not" for log in training]
    others = [log for log in logs.certification if log.facts.get("split") != "train"]
    return replace(logs, certification=others, left_out=[*logs.left_out, *left_out])


def _named(logs: Logs) -> Logs:
    """The logs with their names, and with those of their images and procedures where they
    differ.
    """
    count = len(logs.certification)
    both = [*_with_names(logs.certification), *_with_names(logs.prediction)]
    certified = _if_several(log.procedure_name for log in both[:count])
    top_k = _if_several(f"top-{log.set_size}" for log in [*both[count:], *both[:count]])
    both = [
        replace(log, images=images, procedure=procedure)
        for log, images, procedure in zip(both, _image_set_names(both), [*certified, *top_k])
    ]
    return Logs(both[:count], both[count:], _with_names(logs.training), logs.left_out)


def _if_several(names: Iterable[str]) -> list[str]:
    """The names; each is "" if all are equal."""
    names = [*names]
    return names if len(set(names)) > 1 else [""] * len(names)


def _with_names(logs: list[Log]) -> list[Log]:
    """The logs with their names: paths without .tsv and without folders that all share; of one log,
    the file's name.
    """
    if len(logs) == 1:
        name = escape(logs[0].path.name, None)
        return [replace(logs[0], name=name.removesuffix(".tsv") or name)]
    whole = [Path(escape(str(log.path.absolute()), None)).parts for log in logs]
    brief = [(*parts[:-1], parts[-1].removesuffix(".tsv")) for parts in whole]
    in_all = set.intersection(*map(set, brief)) if logs else set[str]()
    start = len(os.path.commonprefix(whole))
    attempts = (
        ["/".join(part for part in parts if part not in in_all) for parts in brief],
        ["/".join(parts[start:]) for parts in brief],
        ["/".join(parts[start:]) for parts in whole],
        [escape(f"{log.group}: {log.path}", None) for log in logs],  # one log in several groups
    )
    are_unique = (names for names in attempts if len(set(names)) == len(names) and all(names))
    names = next(are_unique, attempts[-1])
    return [replace(log, name=name) for log, name in zip(logs, names)]


def _image_set_names(logs: Sequence[Log]) -> list[str]:
    """What people call the image set of each log, like "digits, 180 images"; "" if all are of one
    set.

    Logs are of one set if dataset, split, fingerprint and indices are equal. A log whose manifest
    states no dataset is of the set that has its dataset and indices; all others of a dataset are
    one set, as the paper pools its logs. Accuracies on other images differ by chance too, so the
    best is chosen per set.
    """
    indices = [log.table["idx"].to_numpy().tobytes() for log in logs]
    keys = [_image_set(log, own) for log, own in zip(logs, indices)]
    stated = {(key[0], key[-1]): key for key in keys if len(key) > 1}
    keys = [
        key if len(key) > 1 else stated.get((key[0], own), key) for key, own in zip(keys, indices)
    ]
    names: dict[tuple[Any, ...], str] = {}
    for key in dict.fromkeys(keys):
        sizes = sizes_of(log for log, its in zip(logs, keys) if its == key)
        name = f"{key[0] or 'unknown dataset'}, {sizes} images"
        alike = sum(other.partition(" (")[0] == name for other in names.values())
        names[key] = f"{name} (set {alike + 1})" if alike else name
    return _if_several(names[key] for key in keys)


def _image_set(log: Log, indices: bytes) -> tuple[Any, ...]:
    settings, dataset = log.facts.settings, log.facts.get("dataset")
    if dataset is None or not settings.get("dataset"):
        return (dataset,)
    return dataset, log.facts.get("split"), str(settings.get("dataset_fingerprint")), indices
