"""Finds and reads logs: files, folders, globs and named groups become tables with names and
hyper-parameters.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from smoothadv.analysis.shared.hyper_parameters import Parameters, ParameterValue, parameters_of
from smoothadv.analysis.shared.plausibility import check_certificates
from smoothadv.analysis.shared.procedure import (
    is_on_grid,
    prediction_names,
    procedure_names,
    with_method,
)
from smoothadv.analysis.shared.table_formats import Label
from smoothadv.base.errors import UserError, shown
from smoothadv.base.progress import Progress
from smoothadv.records.logs import images_selected, is_manifest, is_shard_folder
from smoothadv.records.readers import READERS, DataFrame, kind_of_log, resembles_log

Warn = Callable[[str], None]
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
_READ_BY = {
    "prediction": "; for predictions there are empirical and compare",
    "training": "; for training plot_training",
}


@dataclass(frozen=True)
class Log:
    """A log's ``table`` (see ``readers``), a ``name`` that is short yet unique, and its
    hyper-parameters.

    ``group`` is the name given on the command line (NAME=LOG: it is ``grouped``), else the folder
    or glob in which the log was found, "" for a log that was named itself. ``notes`` are sentences
    that a reader of its numbers should know. ``images`` is what people call the images that it is
    about, "" where all logs that were read are about the same ones; likewise ``procedure``, of a
    prediction log only whether it is of the k most probable classes.
    """

    name: str
    path: Path
    group: str
    table: DataFrame
    parameters: Parameters = field(default_factory=Parameters)
    notes: tuple[str, ...] = ()
    images: str = ""
    procedure: str = ""
    grouped: bool = False

    @property
    def is_on_grid(self) -> bool:
        """Whether its radii are the largest of a grid that were certified, not the largest that
        could have been.
        """
        return is_on_grid(self.table, self.parameters)

    @property
    def selected(self) -> int | None:
        """The number of images that were selected for it; None where no manifest says so."""
        return images_selected(self.parameters.runs[-1]) if self.parameters.runs else None

    @property
    def progress(self) -> str:
        """ "36 of 180, unfinished" if it is known to lack images that were selected for it, else
        "".
        """
        done, selected = len(self.table), self.selected
        return (
            "" if selected is None or done >= selected else f"{done:,} of {selected:,}, unfinished"
        )

    @property
    def label(self) -> Label:
        """Its name; people also see its progress, its images and its procedure."""
        return self.labelled(self.name)

    def labelled(self, words: str) -> Label:
        """Its label, in which people see ``words`` in place of its name."""
        label = Label(self.name)
        label.full = str(self.path)
        words += f" ({self.progress})" * bool(self.progress)
        label.shown = ", ".join(filter(None, (words, self.images, self.procedure)))
        return label


@dataclass(frozen=True)
class Logs:
    """The logs of each kind, in the order in which they were named, the reasons why some were
    ``left_out``, and the kinds of all ``others``."""

    certification: list[Log] = field(default_factory=list)
    prediction: list[Log] = field(default_factory=list)
    training: list[Log] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def by(self, fact: str) -> dict[str, Logs]:
        """The certification and prediction logs of the same ``images``, or the same ``procedure``,
        by its name.
        """
        parts: dict[str, Logs] = {}
        for kind in ("certification", "prediction"):
            for log in getattr(self, kind):
                getattr(parts.setdefault(getattr(log, fact), Logs()), kind).append(log)
        return parts


def grouped(logs: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The logs, or pairs with one, by their ``key``, in the order in which the keys occur first."""
    groups: dict[Key, list[Item]] = {}
    for log in logs:
        groups.setdefault(key(log), []).append(log)
    return groups


def sizes_of(logs: Iterable[Log]) -> str:
    """How many examples the logs have, like "180" or "36 to 180"."""
    sizes = {len(log.table) for log in logs}
    return " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))


@dataclass(frozen=True)
class _Found:
    path: Path
    group: str
    named: bool  # by the user: it is a fault if it is no log; a file that a search found is skipped
    grouped: bool  # by the user, as NAME=LOG


def read_logs(
    arguments: Sequence[str],
    kinds: Iterable[str] = ("certification",),
    stated: Mapping[str, ParameterValue] | None = None,
    warn: Warn = lambda message: None,
) -> Logs:
    """The logs of the given ``kinds`` that files, folders (searched throughout) and globs name.

    ``NAME=LOG`` puts the logs that LOG names into the group NAME. ``stated`` hyper-parameters win
    over all others. A log that is damaged or cannot be true is left out; ``warn`` gets the reason.
    UserError if no log is left.
    """
    found: dict[tuple[str, str | None], _Found] = {}
    logs, left_out = Logs(), list[str]()
    for argument in arguments:
        for entry in _find(argument, left_out):
            # A log may belong to several named groups, but is read once where it was merely named
            # twice.
            found.setdefault(
                (os.path.realpath(entry.path), entry.group if entry.grouped else None), entry
            )
    for entry in Progress(found.values(), "reading logs", unit="log", delay=1):
        try:
            _read_one(entry, set(kinds), stated or {}, logs)
        except UserError as error:
            left_out.append(str(error))
    if not (logs.certification or logs.prediction or logs.training):
        raise _nothing_left(" ".join(arguments), kinds, left_out, logs.others, warn)
    logs = _without_training_images(logs, left_out)
    for reason in left_out:
        warn(f"{reason}; it is left out")
    both = [*_with_names(logs.certification), *_with_names(logs.prediction)]
    count, facts = len(logs.certification), [(log.table, log.parameters) for log in both]
    procedures = [*procedure_names(facts[:count]), *prediction_names(facts[count:], facts[:count])]
    names = zip(both, _image_set_names(both), procedures)
    named = [replace(log, images=images, procedure=procedure) for log, images, procedure in names]
    return Logs(named[:count], named[count:], _with_names(logs.training), left_out)


def _nothing_left(
    where: str, kinds: Iterable[str], left_out: list[str], others: list[str], warn: Warn
) -> UserError:
    if len(left_out) == 1:
        return UserError(left_out[0])
    for reason in left_out:
        warn(reason)
    if left_out:
        return UserError(f"{where}: none of {len(left_out)} logs can be used")
    counts = [
        f"{others.count(kind):,} {kind}{_READ_BY.get(kind, '')}" for kind in sorted({*others})
    ]
    found = (
        ", but others: " + ", ".join(counts)
        if counts
        else " (a file that starts with idx, label, predict, ...)"
    )
    return UserError(f"{where}: holds no {' or '.join(kinds)} log{found}")


def _find(argument: str, left_out: list[str]) -> list[_Found]:
    """What an argument names; ``left_out`` gets the reasons why folders cannot be listed."""
    group, equals, place = argument.partition("=")
    if not equals or not group or os.path.exists(argument) or glob.glob(argument, recursive=True):
        group, place = "", argument
    grouped = bool(group)
    if os.path.isfile(place):
        return [_Found(Path(place), group, True, grouped)]
    if os.path.isdir(place):
        files = [] if is_shard_folder(Path(place).name) else _files_below(Path(place), left_out)
        name = group or place.rstrip("/").removeprefix("./") or place
        return [_Found(path, name, False, grouped) for path in files]
    matches = sorted(glob.glob(place, recursive=True))
    if not matches:
        raise UserError(f"{place} is no file, no folder and matches nothing")
    found = []
    for match in map(Path, matches):
        if not any(map(is_shard_folder, match.parts)):
            files = _files_below(match, left_out) if match.is_dir() else [match]
            found += [
                _Found(path, group or place, False, grouped)
                for path in files
                if not is_manifest(path)
            ]
    # Other files are skipped; but if no match is a log, the fault of the first one must be
    # reported.
    if not any(kind_of_log(entry.path) or resembles_log(entry.path) for entry in found):
        found = [replace(entry, named=True) for entry in found[:1]]
    return found


def _files_below(folder: Path, left_out: list[str]) -> list[Path]:
    """All files that are not hidden, also behind links, each folder once; without shards, which are
    no logs yet.
    """
    files, visited, refused = [], set(), list[OSError]()
    found = os.walk(folder, followlinks=True, onerror=refused.append)
    for place, folders, names in Progress(
        found, f"searching {shown(str(folder), 80)}", unit="folder", delay=1
    ):
        real = os.path.realpath(place)
        searched = [
            name for name in folders if not name.startswith(".") and not is_shard_folder(name)
        ]
        folders[:] = [] if real in visited else searched
        if real not in visited:
            files += [Path(place, name) for name in names if not name.startswith(".")]
        visited.add(real)
    left_out += [f"{error.filename} cannot be listed: {error.strerror}" for error in refused]
    # What cannot be found out about is kept: reading it gives the reason.
    files = [path for path in files if os.path.isfile(path) or not os.path.exists(path)]
    return sorted(path for path in files if not is_manifest(path))


def _read_one(
    entry: _Found, kinds: set[str], stated: Mapping[str, ParameterValue], logs: Logs
) -> None:
    """Add the log to those of its kind, and skip other kinds; UserError if it is damaged or cannot
    be true.
    """
    if is_manifest(entry.path):  # no search finds these
        raise UserError(f"{entry.path} is a manifest, no log")
    kind = kind_of_log(entry.path)
    if kind is None and not entry.named and not resembles_log(entry.path):
        return
    if kind is not None and kind not in kinds:
        if entry.named:
            needed = f"what is needed here is a {' or '.join(sorted(kinds))} log"
            raise UserError(f"{entry.path} is a {kind} log; {needed}{_READ_BY.get(kind, '')}")
        logs.others.append(kind)
        return
    kind = (
        kind or "certification"
    )  # of a file that only looks like a log the reader reports the fault
    table = READERS[kind](entry.path)
    parameters, notes = Parameters(), table.attrs["notes"]
    if kind != "training":
        parameters = parameters_of(kind, entry.path, stated)
    if kind == "certification":
        parameters, notes = check_certificates(entry.path, table, with_method(table, parameters))
    elif kind == "prediction" and parameters.manifest is None and parameters.get("attack") is None:
        notes = [*notes, "its path names no attack: it is treated as predictions on clean images"]
    log = Log("", entry.path, entry.group, table, parameters, tuple(notes), grouped=entry.grouped)
    getattr(logs, kind).append(log)


def _without_training_images(logs: Logs, left_out: list[str]) -> Logs:
    """Leaves out certificates of training images unless there are no others: they must not look
    like test accuracy.
    """
    others = [log for log in logs.certification if log.parameters.get("split") != "train"]
    if not others:
        return logs
    training = [log for log in logs.certification if log.parameters.get("split") == "train"]
    left_out += [f"{log.path} certifies training images, the others do not" for log in training]
    return replace(logs, certification=others)


def _with_names(logs: list[Log]) -> list[Log]:
    """The logs with their names: paths without .tsv and without folders that all share; of one log,
    the file's name.
    """
    whole = [Path(shown(str(log.path.absolute()), None)).parts for log in logs]
    brief = [(*parts[:-1], parts[-1].removesuffix(".tsv")) for parts in whole]
    shared = (
        set.intersection(*map(set, brief)) if len(logs) > 1 else set(brief[0][:-1] if brief else ())
    )
    start = len(os.path.commonprefix(whole)) if len(logs) > 1 else 0
    attempts = (
        ["/".join(part for part in parts if part not in shared) for parts in brief],
        ["/".join(parts[start:]) for parts in brief],
        ["/".join(parts[start:]) for parts in whole],
        [shown(f"{log.group}: {log.path}", None) for log in logs],  # one log in several groups
    )
    names = next(
        (names for names in attempts if len(set(names)) == len(names) and all(names)), attempts[-1]
    )
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
    keys = [_image_set(log.parameters, own) for log, own in zip(logs, indices)]
    stated = {(key[0], key[-1]): key for key in keys if len(key) > 1}
    keys = [
        key if len(key) > 1 else stated.get((key[0], own), key) for key, own in zip(keys, indices)
    ]
    names: dict[tuple[Any, ...], str] = {}
    for key in dict.fromkeys(keys):
        name = (
            f"{key[0] or 'unknown dataset'}, "
            f"{sizes_of(log for log, its in zip(logs, keys) if its == key)} images"
        )
        alike = sum(other.partition(" (")[0] == name for other in names.values())
        names[key] = name if not alike else f"{name} (set {alike + 1})"
    return [names[key] if len(names) > 1 else "" for key in keys]


def _image_set(parameters: Parameters, indices: bytes) -> tuple[Any, ...]:
    settings, dataset = parameters.settings, parameters.get("dataset")
    if dataset is None or not settings.get("dataset"):
        return (dataset,)
    return dataset, parameters.get("split"), str(settings.get("dataset_fingerprint")), indices
