"""Finding certification logs: files, folders and globs become tables with short names."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from smoothadv.errors import UserError
from smoothadv.records import is_certification_log, is_manifest, read_certification_log


@dataclass(frozen=True)
class CertificationLog:
    """A log's ``table`` (see ``records.read_certification_log``) and a ``name`` that is short yet unique."""

    name: str
    table: pd.DataFrame


def read_logs(arguments: Sequence[str]) -> list[CertificationLog]:
    """The certification logs that files, folders (searched throughout) and globs name, in that order.

    UserError if an argument leads to no log, or a log is not what it should be.
    """
    paths = [path for argument in arguments for path in _find(argument) if not is_manifest(path)]
    if not paths:
        raise UserError(f"{' '.join(arguments)}: only manifests, no certification log")
    paths = list(dict.fromkeys(paths))
    return [CertificationLog(name, read_certification_log(path)) for name, path in zip(_short_names(paths), paths)]


def _find(argument: str) -> list[Path]:
    if os.path.isfile(argument):
        return [Path(argument)]
    if os.path.isdir(argument):
        found = [path for path in sorted(Path(argument).rglob("*")) if path.is_file() and is_certification_log(path)]
        if not found:
            raise UserError(
                f"{argument} holds no certification log (a file that starts with idx, label, predict, radius)"
            )
        return found
    matches = sorted(glob.glob(argument, recursive=True))
    if not matches:
        raise UserError(f"{argument} is no file, no folder and matches nothing")
    # As in a folder, what is no log is passed over; but if nothing is, the first file's fault should be told.
    files = [path for match in matches for path in _find(match)]
    return [path for path in files if is_certification_log(path)] or files


def _short_names(paths: list[Path]) -> list[str]:
    """Each path without the part that all share and without .tsv; the file's name if there is just one."""
    if len(paths) == 1:
        return [paths[0].name.removesuffix(".tsv")]
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    return [path.absolute().relative_to(shared).as_posix().removesuffix(".tsv") for path in paths]
