"""The stages of a job and how far each has come, judged by the files on the disk alone.

A stage is one command. A training is complete when its log has a row for every epoch, an evaluation
when its logs have a row for every selected image. Files that were made with other settings than the
stage's never count as its result.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smoothadv.base.digests import digest as digest_of
from smoothadv.base.errors import UserError
from smoothadv.base.files import read_json, read_regular, write_text
from smoothadv.base.members import Members
from smoothadv.records import logs as records


@dataclass(frozen=True)
class StageProgress:
    """``done`` of ``total`` ``units``; total is None while unknown. ``conflict`` says why the stage
    cannot continue.
    """

    done: int
    total: int | None
    units: str
    conflict: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.conflict and self.done == self.total

    def __str__(self) -> str:
        return f"{self.done} of {'?' if self.total is None else self.total} {self.units}"


@dataclass(frozen=True)
class TrainingStage:
    """Trains a model in ``folder`` for ``epochs`` epochs.

    ``words`` are those of the command after ``smoothadv``, ``title`` is for people. The files that
    the stage ``needs`` must exist before it can start; other jobs or people make them. ``recipe``
    has those fields of the training's recorded recipe that are known before it starts, ``digests``
    the files of whose contents further fields tell.
    """

    words: tuple[str, ...]
    folder: Path
    epochs: int
    recipe: Mapping[str, Any]
    needs: tuple[Path, ...] = ()
    digests: Mapping[str, Path] = field(default_factory=dict)
    title: str = "train"

    @property
    def checkpoint(self) -> Path:
        return self.folder / records.CHECKPOINT

    def progress(self) -> StageProgress:
        nothing = StageProgress(0, self.epochs, "epochs")
        if not self.checkpoint.exists():
            return nothing
        try:
            recorded = read_json(self.folder / records.ARGUMENTS)["recipe"]
            there = {
                name: digest(path) for name, path in self.digests.items() if path.exists()
            }  # else not comparable
            wanted = {
                "pretrained": None,
                "optimizer": None,
                **self.recipe,
                **there,
            }  # of some recipes only
            difference = _difference(recorded, wanted)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # The command itself decides whether it can continue this run.
            return nothing
        if difference:
            return replace(
                nothing, conflict=f"{self.folder} holds a model of another recipe: {difference}"
            )
        done = len(_rows(self.folder / records.TRAINING_LOG) or ())
        if done > self.epochs:
            conflict = (
                f"{self.folder} holds a model of {done} epochs, more than the {self.epochs} asked "
                "for"
            )
            return replace(nothing, done=self.epochs, conflict=conflict)
        return replace(nothing, done=done)


@dataclass(frozen=True)
class EvaluationStage:
    """Writes ``logs`` about ``classifier``; ``words``, ``title`` and ``needs`` as in
    ``TrainingStage``.

    ``settings`` has, for each log, those settings of its manifest that are known before it is
    written. ``selection`` has ``skip`` and ``max``. ``members`` are the trainings, in other jobs,
    of an ensemble; ``denoiser`` as in requests.
    """

    words: tuple[str, ...]
    title: str
    classifier: Members
    logs: tuple[Path, ...]
    settings: tuple[Mapping[str, Any], ...]
    selection: Mapping[str, Any]
    needs: tuple[Path, ...] = ()
    members: tuple[TrainingStage, ...] = ()
    denoiser: str | None = None

    def prepare(self) -> None:
        """Write the file that describes the classifier if it is an ensemble."""
        if self.classifier.mean:
            write_text(self.classifier.name, self.classifier.described())

    def progress(self) -> StageProgress:
        parts = [self._one(log, settings) for log, settings in zip(self.logs, self.settings)]
        of_members = (
            member.progress() for member in self.members
        )  # another recipe's model must not stand for theirs
        conflict = next((part.conflict for part in (*parts, *of_members) if part.conflict), "")
        totals = [part.total for part in parts]
        total = None if None in totals else sum(filter(None, totals))
        return StageProgress(sum(part.done for part in parts), total, "images", conflict)

    def _one(self, log: Path, settings: Mapping[str, Any]) -> StageProgress:
        nothing = StageProgress(0, None, "images")
        rows = _rows(log)
        if rows is None and (log.exists() or not records.manifest_path(log).exists()):
            return nothing  # the command, too, starts anew in this case
        try:
            manifest = records.read_manifest_file(log)
        except UserError as error:
            return replace(nothing, conflict=str(error))
        difference = _difference(manifest["settings"], settings)
        if difference:
            return replace(nothing, conflict=f"{log} was made with other settings: {difference}")
        members = self.classifier.paths
        if gone := [path for path in members if not path.exists()]:
            conflict = (
                f"{gone[0]}, from which {log} was made, is gone: put it back, or remove the log"
            )
            return replace(nothing, conflict=conflict)
        digests, mean = [digest(path) for path in members], self.classifier.mean
        if manifest["settings"].get("checkpoint_sha256") != (
            {mean: digests} if mean else digests[0]
        ):
            now = " or ".join(map(str, members))
            return replace(
                nothing, conflict=f"{log} was made from another model than {now} holds now"
            )
        before, there = (
            manifest["settings"].get(records.DENOISER, {}).get("sha256"),
            Path(self.denoiser or ""),
        )
        if (
            before != digest(there)
            if there.is_file()
            else (before is None) != (self.denoiser is None)
        ):
            return replace(
                nothing,
                conflict=f"{log} was made with another denoiser than {self.denoiser or 'none'}",
            )
        indices = (int(first) for row in rows or () if (first := row.partition(b"\t")[0]).isdigit())
        selected = range(0, sys.maxsize, self.selection["skip"])[: self.selection["max"]]
        if (
            foreign := next((index for index in indices if index not in selected), None)
        ) is not None:
            return replace(
                nothing, conflict=f"{log} has image {foreign}, which is not selected here"
            )
        # Of the dataset that the last run saw; unknown if it did not record the dataset's size.
        total = (
            records.images_selected({**manifest["runs"][-1], **self.selection})
            if manifest["runs"]
            else None
        )
        return StageProgress(len(rows or ()), total, "images")


Stage = TrainingStage | EvaluationStage


def unmet_need(path: Path) -> str:
    """Why a stage cannot use a file yet: it is missing, or its training is unfinished. "" if the
    stage can use it.
    """
    if not path.exists():
        return f"needs {path}"
    try:
        epochs = read_json(path.parent / records.ARGUMENTS)["runs"][-1]["epochs"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""  # the folder was not made by a training command
    done = len(_rows(path.parent / records.TRAINING_LOG) or ())
    is_unfinished = path.name == records.CHECKPOINT and done < epochs
    return f"needs {path}, which has {done} of {epochs} epochs" if is_unfinished else ""


def _difference(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The ``wanted`` fields in which a record differs, as a text for people; "" if there are
    none.
    """
    return records.differing_fields({name: recorded.get(name) for name in wanted}, dict(wanted))


def _rows(log: Path) -> list[bytes] | None:
    """The whole rows that a log has below its header; None if it is empty or there is no log."""
    try:
        content = read_regular(log)
    except OSError:
        return None
    return content.split(b"\n")[1:-1] if content else None


_digests: dict[tuple[Path, int, int], str] = {}


def digest(path: Path) -> str | None:
    """The SHA-256 of a file, None if it cannot be read; computed again only after the file has
    changed.
    """
    try:
        stat = path.stat()
        key = (path.resolve(), stat.st_size, stat.st_mtime_ns)
        if key not in _digests:
            _digests[key] = digest_of([read_regular(path)])
        return _digests[key]
    except OSError:
        return None
