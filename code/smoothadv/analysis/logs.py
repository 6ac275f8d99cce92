"""Finding certification logs: files, folders and globs become tables with short names."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from smoothadv.errors import UserError
from smoothadv.records import has_rows, is_certification_log, is_manifest, read_certification_log


@dataclass(frozen=True)
class CertificationLog:
    """A log's ``table`` (see ``records.read_certification_log``) and a ``name`` that is short yet unique."""

    name: str
    table: pd.DataFrame


def read_logs(arguments: Sequence[str], warn: Callable[[str], None] = lambda message: None) -> list[CertificationLog]:
    """The certification logs that files, folders (searched throughout) and globs name, in that order.

    In folders and globs a log that holds only a header is left out, which ``warn`` is told. UserError if
    an argument leads to no log, or a log is not what it should be.
    """
    paths = [path for argument in arguments for path in _find(argument, warn) if not is_manifest(path)]
    if not paths:
        raise UserError(f"{' '.join(arguments)}: only manifests, no certification log")
    paths = list(dict.fromkeys(paths))
    return [CertificationLog(name, read_certification_log(path)) for name, path in zip(_short_names(paths), paths)]


def _find(argument: str, warn: Callable[[str], None]) -> list[Path]:
    if os.path.isfile(argument):
        return [Path(argument)]
    if os.path.isdir(argument):
        found = [path for path in sorted(Path(argument).rglob("*")) if path.is_file()]
        logs = _with_rows(found, warn)
        if not logs:
            raise UserError(
                f"{argument} holds no certification log (a file that starts with idx, label, predict, radius)"
            )
        return logs
    matches = sorted(glob.glob(argument, recursive=True))
    if not matches:
        raise UserError(f"{argument} is no file, no folder and matches nothing")
    # As in a folder, what is no log is passed over; but if nothing is, the first file's fault should be told.
    files = [path for match in matches for path in _find(match, warn)]
    return _with_rows(files, warn) or files


def _with_rows(paths: list[Path], warn: Callable[[str], None]) -> list[Path]:
    """The certification logs among ``paths`` that hold more than a header; of the others, ``warn`` is told."""
    logs = [path for path in paths if is_certification_log(path)]
    for path in logs:
        if not has_rows(path):
            warn(f"{path} holds no rows yet and is left out")
    return [path for path in logs if has_rows(path)]


def _short_names(paths: list[Path]) -> list[str]:
    """Each path without the part that all share and without .tsv; the file's name if there is just one."""
    if len(paths) == 1:
        return [paths[0].name.removesuffix(".tsv")]
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    return [path.absolute().relative_to(shared).as_posix().removesuffix(".tsv") for path in paths]
