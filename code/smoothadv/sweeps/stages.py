"""The stages of a job and how far each has come, by what is on the disk alone.

A stage is one command, and complete when its artefacts say so: a training when its log has a row for every epoch, an
evaluation when its logs have a row for every image that was selected. What was made otherwise than the stage would make
it is never taken for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smoothadv.errors import UserError
from smoothadv.records import (
    ARGUMENTS,
    CHECKPOINT,
    TRAINING_LOG,
    differing_fields,
    manifest_path,
    read_manifest_file,
)


@dataclass(frozen=True)
class StageProgress:
    """``done`` of ``total`` ``units``, total None while nothing tells; ``conflict`` says why the stage cannot go on."""

    done: int
    total: int | None
    units: str
    conflict: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.conflict and self.done == self.total

    def __str__(self) -> str:
        return f"{self.done} of {'?' if self.total is None else self.total} {self.units}"


class Stage(Protocol):
    """One command of a job: the words after ``smoothadv``, what people call it, and what it needs."""

    words: tuple[str, ...]

    @property
    def title(self) -> str: ...

    @property
    def needs(self) -> tuple[Path, ...]:
        """Files that others must have made before."""
        ...

    def progress(self) -> StageProgress: ...


@dataclass(frozen=True)
class TrainingStage:
    """Trains a model in ``folder`` for ``epochs`` epochs; ``recipe`` is what is known of the recorded one before.

    ``started_from`` is the checkpoint of other weights to start from.
    """

    words: tuple[str, ...]
    folder: Path
    epochs: int
    recipe: Mapping[str, Any]
    needs: tuple[Path, ...] = ()
    started_from: Path | None = None
    title: str = "train"

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    def progress(self) -> StageProgress:
        nothing = StageProgress(0, self.epochs, "epochs")
        if not self.checkpoint.exists():
            return nothing
        try:
            recorded = json.loads((self.folder / ARGUMENTS).read_text())["recipe"]
            difference = _difference(recorded, {**self.recipe, **self._start()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # The command itself will tell whether this is a run that it can continue.
            return nothing
        if difference:
            return StageProgress(
                0, self.epochs, "epochs", f"{self.folder} holds a model of another recipe: {difference}"
            )
        done = _rows(self.folder / TRAINING_LOG)
        if done > self.epochs:
            return StageProgress(
                self.epochs,
                self.epochs,
                "epochs",
                f"{self.folder} holds a model of {done} epochs, more than the {self.epochs} asked for",
            )
        return StageProgress(done, self.epochs, "epochs")

    def _start(self) -> dict[str, Any]:
        """What the recipe says of the weights that were started from, if they still are there to be compared."""
        if self.started_from is None or not self.started_from.exists():
            return {}
        return {"pretrained_sha256": digest(self.started_from)}


@dataclass(frozen=True)
class EvaluationStage:
    """Makes ``logs`` of the model in ``checkpoint``; each log has the ``settings`` that are known beforehand.

    ``selection`` is which images: the options skip and max.
    """

    words: tuple[str, ...]
    title: str
    checkpoint: Path
    logs: tuple[Path, ...]
    settings: tuple[Mapping[str, Any], ...]
    selection: Mapping[str, Any]
    needs: tuple[Path, ...] = ()

    def progress(self) -> StageProgress:
        parts = [self._one(log, settings) for log, settings in zip(self.logs, self.settings)]
        conflict = next((part.conflict for part in parts if part.conflict), "")
        totals = [part.total for part in parts]
        total = None if None in totals else sum(filter(None, totals))
        return StageProgress(sum(part.done for part in parts), total, "images", conflict)

    def _one(self, log: Path, settings: Mapping[str, Any]) -> StageProgress:
        if not _size(log) and (log.exists() or not manifest_path(log).exists()):
            return StageProgress(0, None, "images")  # as the command takes it: nothing was written yet
        try:
            manifest = read_manifest_file(log)
        except UserError as error:
            return StageProgress(0, None, "images", str(error))
        difference = _difference(manifest["settings"], settings)
        if difference:
            return StageProgress(0, None, "images", f"{log} was made with other settings: {difference}")
        if not self.checkpoint.exists():
            gone = f"{self.checkpoint}, from which {log} was made, is gone: put it back, or remove the log"
            return StageProgress(0, None, "images", gone)
        if manifest["settings"].get("checkpoint_sha256") != digest(self.checkpoint):
            return StageProgress(
                0, None, "images", f"{log} was made from another model than {self.checkpoint} holds now"
            )
        foreign = [index for index in _indices(log) if not self._selects(index)]
        if foreign:
            return StageProgress(0, None, "images", f"{log} has image {foreign[0]}, which is not selected here")
        return StageProgress(_rows(log), self._selected(manifest["runs"]), "images")

    def _selects(self, index: int) -> bool:
        """Whether an image is among every skip-th, the first max of them."""
        number, rest = divmod(index, self.selection["skip"])
        most = self.selection["max"]
        return rest == 0 and (most is None or number < most)

    def _selected(self, runs: list[dict[str, Any]]) -> int | None:
        """How many images are selected, of as many as the run that wrote last saw; None if it does not say."""
        images = runs[-1].get("images") if runs else None
        return None if images is None else len(range(0, images, self.selection["skip"])[: self.selection["max"]])


def unmet_need(path: Path) -> str:
    """Why a file that a stage needs cannot be used yet, "" if it can: it is missing, or a training is still at it."""
    if not path.exists():
        return f"needs {path}"
    try:
        epochs = json.loads((path.parent / ARGUMENTS).read_text())["runs"][-1]["epochs"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""  # not a folder of ours
    done = _rows(path.parent / TRAINING_LOG)
    return f"needs {path}, which has {done} of {epochs} epochs" if path.name == CHECKPOINT and done < epochs else ""


def _difference(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """In which of the ``wanted`` fields a record differs, "" if in none."""
    # Through JSON, as the record went.
    wanted = json.loads(json.dumps(wanted))
    return differing_fields({name: recorded.get(name) for name in wanted}, wanted)


def _rows(log: Path) -> int:
    """How many whole rows a log has below its header; 0 where there is none."""
    try:
        return max(log.read_bytes().count(b"\n") - 1, 0)
    except OSError:
        return 0


def _size(path: Path) -> int:
    """The size of a file in bytes; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _indices(log: Path) -> list[int]:
    """The images that a log has whole rows of."""
    try:
        lines = log.read_bytes().split(b"\n")[1:-1]
    except OSError:
        return []
    return [int(first) for line in lines if (first := line.partition(b"\t")[0]).isdigit()]


_digests: dict[tuple[Path, int, int], str] = {}


def digest(path: Path) -> str | None:
    """The SHA-256 of a file, computed anew only where it changed since this process computed it; None without it."""
    try:
        stat = path.stat()
        key = (path.resolve(), stat.st_size, stat.st_mtime_ns)
        if key not in _digests:
            _digests[key] = hashlib.sha256(path.read_bytes()).hexdigest()
        return _digests[key]
    except OSError:
        return None
