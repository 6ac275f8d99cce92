"""The stages of a job, and the progress of each, judged by the files on the disk alone.

A stage is one command. All that a sweep knows of it is which files it will write, and what these
will record. A training is complete when its log has a row for every epoch, an evaluation when its
logs have a row for every selected image. Files that were made with other settings than the stage's
never count as its result.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from smoothadv.base.errors import UserError, counted
from smoothadv.base.files import file_digest
from smoothadv.base.registry import diffusion_model
from smoothadv.base.settings import refuse_any
from smoothadv.models.name import Members, is_on_hub
from smoothadv.records import logs as records
from smoothadv.records.logs import IMAGE_SET, images_of


@dataclass(frozen=True)
class TrainingExpectation:
    """What a training command will do, as far as it is known before it runs.

    ``recipe`` has the fields of its record that are known before any file is read; ``digests`` has
    the checkpoints that it reads, by the field that will have their SHA-256; ``files`` are further
    files that it reads. ``objective`` is a name; ``attack`` has the name of the attack and its
    settings (None: no attack); ``copies`` is the number of noisy copies of an image.
    """

    epochs: int
    recipe: Mapping[str, Any]
    objective: str
    attack: Mapping[str, Any] | None = None
    copies: int = 1
    pseudo_label_weight: float | None = None
    digests: Mapping[str, Path] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class StageProgress:
    """``done`` of ``total``, of which one is a ``unit``; total is None while unknown. ``conflict``
    says why the stage cannot continue.
    """

    done: int
    total: int | None
    unit: str
    conflict: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.conflict and self.done == self.total

    def __str__(self) -> str:
        known = f"? {self.unit}s" if self.total is None else counted(self.total, self.unit)
        return f"{self.done} of {known}"


@dataclass(frozen=True)
class TrainingStage:
    """Trains a model in ``folder``, as ``expected`` of the command with these ``words``, which
    follow "smoothadv".
    """

    words: tuple[str, ...]
    folder: Path
    expected: TrainingExpectation
    title: ClassVar[str] = "train"

    @property
    def checkpoint(self) -> Path:
        return self.folder / records.CHECKPOINT_FILE

    @property
    def logs(self) -> tuple[Path, ...]:
        return (self.folder / records.TRAINING_LOG,)

    @property
    def needs(self) -> tuple[Path, ...]:
        """The files that must exist before it can start; other jobs or people make them."""
        return (*self.expected.digests.values(), *self.expected.files)

    def progress(self) -> StageProgress:
        epochs = self.expected.epochs
        recipe = records.training_record(self.folder)["recipe"]
        if not (self.checkpoint.exists() and recipe):
            # The command itself decides whether it can continue a run without a record.
            return StageProgress(0, epochs, "epoch")
        files = self.expected.digests.items()
        known = {field: digest(path) for field, path in files if path.exists()}
        wanted = {"optimizer": None, **self.expected.recipe, **known}
        done, conflict = len(_rows(*self.logs)), ""
        if difference := _difference(recipe, wanted):
            done, conflict = 0, f"another recipe: {difference}"
        elif done > epochs:
            conflict = f"{counted(done, 'epoch')}, more than the {epochs} asked for"
        return StageProgress(
            done, epochs, "epoch", conflict and f"{self.folder} holds a model of {conflict}"
        )


@dataclass(frozen=True)
class EvaluationStage:
    """Evaluates the model of a job by the command with these ``words``, which follow
    "smoothadv". It writes ``logs``, whose manifests will have ``settings``.

    ``selection`` is what a run says of its images, but for their number. ``classifier`` is the
    model's file, or that of an ensemble, whose members are trained by other jobs; ``trainings``
    make the model, or the members.
    """

    words: tuple[str, ...]
    logs: tuple[Path, ...]
    settings: tuple[Mapping[str, Any], ...]
    selection: Mapping[str, Any]
    denoiser: str | None
    classifier: Members
    trainings: tuple[TrainingStage, ...]

    @property
    def members(self) -> tuple[TrainingStage, ...]:
        """The trainings of the members of an ensemble; none of a single model."""
        return self.trainings if self.classifier.mean else ()

    @property
    def title(self) -> str:
        return f"{self.words[0]} {Path(self.words[4]).name.removesuffix('.tsv')}"

    @property
    def needs(self) -> tuple[Path, ...]:
        """As of a training: the members of an ensemble, and a denoiser that is a file."""
        members = tuple(member.checkpoint for member in self.members)
        denoiser = self.denoiser
        if denoiser is None or is_on_hub(denoiser) or diffusion_model(denoiser) is not None:
            return members
        return (*members, Path(denoiser).absolute())

    def progress(self) -> StageProgress:
        parts = list(map(self._progress_of_log, self.logs, self.settings))
        # The model of another recipe must not stand for that of a member.
        all_parts = [*parts, *(member.progress() for member in self.members)]
        conflict = next((part.conflict for part in all_parts if part.conflict), "")
        totals = [part.total for part in parts if part.total is not None]
        total = sum(totals) if len(totals) == len(parts) else None
        return StageProgress(sum(part.done for part in parts), total, "image", conflict)

    def _progress_of_log(self, log: Path, settings: Mapping[str, Any]) -> StageProgress:
        rows = _rows(log)
        if not rows and not records.manifest_path(log).exists():
            return StageProgress(0, None, "image")
        try:
            manifest = records.read_manifest_file(log)
            self._refuse_other_settings(log, manifest["settings"], settings)
            selected = images_of(manifest["settings"], {"images": sys.maxsize, **self.selection})
            for row in rows:
                index = row.partition(b"\t")[0]
                if index.isdigit() and int(index) not in selected:
                    raise UserError(f"{log} has image {int(index)}, which is not selected here")
        except UserError as error:
            return StageProgress(0, None, "image", str(error))
        # Of the dataset that the last run saw; unknown if it did not record the dataset's size.
        run = {**(manifest["runs"] or [{}])[-1], **self.selection}
        total = len(images_of(manifest["settings"], run)) if "images" in run else None
        return StageProgress(len(rows), total, "image")

    def _refuse_other_settings(
        self, log: Path, recorded: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        """UserError if a log was made with other settings than these, or of other weights than are
        there now, or will be there after more epochs.
        """
        before = recorded.get(records.DENOISER, {}).get("sha256")
        denoiser = self.denoiser
        path = Path(str(denoiser).removeprefix("openai:"))
        now = digest(path) if denoiser and path.is_file() else before
        is_other = now != before or (before is None) != (denoiser is None)
        difference = _difference(recorded, {IMAGE_SET: None, **settings})
        paths, mean = self.classifier.paths, self.classifier.mean
        digests = [digest(path) if path.exists() else None for path in paths]
        model = {mean: digests} if mean else digests[0]
        refuse_any(
            {
                f"{log} was made with another denoiser than {denoiser or 'none'}": is_other,
                f"{log} was made with other settings: {difference}": difference,
                f"{log} was made from another model than "
                f"{' or '.join(map(str, paths))} holds now": (
                    recorded.get("checkpoint_sha256") != model
                ),
            }
        )
        for training in self.trainings:
            epochs, expected = _last_epochs(training.folder), training.expected.epochs
            if epochs is not None and epochs < expected:
                raise UserError(
                    f"{log} is of the model of {counted(epochs, 'epoch')} in {training.folder}, "
                    f"which a training to {expected} would replace"
                )


Stage = TrainingStage | EvaluationStage


def unmet_need(path: Path) -> str:
    """Why a stage cannot use a file yet: it is missing, or its training is unfinished. "" if the
    stage can use it.
    """
    if not path.exists():
        return f"needs {path}"
    epochs = _last_epochs(path.parent) if path.name == records.CHECKPOINT_FILE else None
    done = len(_rows(path.parent / records.TRAINING_LOG))
    if epochs is None or done >= epochs:
        return ""
    return f"needs {path}, which has {done} of {counted(epochs, 'epoch')}"


def _last_epochs(folder: Path) -> int | None:
    """The epochs that the last run of a training in ``folder`` was to reach; None where no record
    says so.
    """
    runs = records.training_record(folder)["runs"] or [{}]
    epochs = runs[-1].get("epochs")
    return epochs if isinstance(epochs, int) else None


def _difference(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The ``wanted`` fields in which a record differs, as a text for people; "" if there are
    none.
    """
    return records.differing_fields({name: recorded.get(name) for name in wanted}, dict(wanted))


def _rows(log: Path) -> list[bytes]:
    """The whole rows that a log has below its header; none if there is no log."""
    try:
        return log.read_bytes().split(b"\n")[1:-1]
    except OSError:
        return []


def logged_seconds(stage: Stage) -> float:
    """The sum of the times in the logs of a complete stage: of epochs, or of images."""
    import pandas as pd

    total = 0.0
    for log in stage.logs:
        times = pd.read_csv(log, sep="\t", usecols=["time"])["time"]
        # An epoch's time is a number of seconds, an image's a text like 0:00:01.5.
        unit = "s" if pd.api.types.is_numeric_dtype(times) else None
        total += pd.to_timedelta(times, unit=unit).dt.total_seconds().sum()
    return total


def digest(path: Path) -> str:
    """The SHA-256 of a file; computed again only after the file has changed."""
    stat = path.stat()
    return _digest_once(path.resolve(), stat.st_size, stat.st_mtime_ns)


@cache
def _digest_once(path: Path, size: int, modified: int) -> str:
    return file_digest(path)
