"""File names, TSV columns and manifests, which no other module defines; writes every log. No torch.

Each row of a log is on the disk before the next row is written. When a log is resumed, a last row
that a crash left incomplete is dropped. Beside each log lies a manifest that records how the log
was made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from decimal import ROUND_DOWN, Context, Decimal
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError, warn
from smoothadv.base.files import append_whole, lock, read_json, refuse_to_replace, write_json
from smoothadv.records.manifests import images_of, manifest_fault

CHECKPOINT = "checkpoint.pth.tar"
TRAINING_LOG = "log.txt"
ARGUMENTS = "args.json"
FALSIFICATION_LOG = "against.tsv"
LOG = ("log", b"idx\t")
"""What ``files.refuse_to_replace`` takes for a log of examples."""

EXAMPLE_COLUMNS = ("idx", "label", "predict", "correct")
"""The columns of every log with a row per example, also of the released logs."""
COUNT_COLUMNS = (
    "successes",
    "trials",
)  # successes of trials estimation draws voted for the selected class
CERTIFICATION_COLUMNS = ("idx", "label", "predict", "radius", "correct", "time", *COUNT_COLUMNS)
"""The first six are the columns of released logs. The procedure's columns follow these."""
PREDICTION_COLUMNS = ("idx", "label", "predict", "basePredict", "correct", "time")


CLASS = "class_"


def class_columns(top_k: int) -> tuple[str, ...]:
    """The columns of a prediction log for the k classes of a top-k prediction: none where there is
    one class.
    """
    return tuple(f"{CLASS}{number}" for number in range(1, top_k + 1)) if top_k > 1 else ()


def numbered(columns: Collection[str], prefix: str) -> list[str]:
    """Those of the ``columns`` that are named ``prefix`` and 1, 2, and so on, without a gap."""
    return list(
        takewhile(lambda name: name in columns, (f"{prefix}{number}" for number in count(1)))
    )


ATTACK_COLUMNS = (*PREDICTION_COLUMNS, "attack_norm", "epsilon", "abstain")
"""attack_norm is the l2 norm of the perturbation, epsilon its largest allowed l2 norm; abstain is 1
or 0. For targeted attacks ``TARGET_COLUMN`` follows, the class at which the attack aimed."""
TARGET_COLUMN = "target"
FALSIFICATION_COLUMNS = (*ATTACK_COLUMNS, "certified", "radius", "flipped")
"""certified is the class certified within radius; flipped is 1 where PREDICT returned another class
there.
"""
REAL_COLUMNS = frozenset({"radius", "attack_norm", "epsilon"})
"""The columns above that hold real numbers; the others, except time, hold whole numbers."""
TRAINING_COLUMNS = (
    *(
        "epoch",
        "time",
        "lr",
        "epsilon",
        "train_loss",
        "train_accuracy",
        "train_unattacked_accuracy",
    ),
    *(
        "test_loss",
        "test_accuracy",
        "test_clean_accuracy",
        "test_adversarial_accuracy",
        "test_images",
    ),
    "images_per_second",
)
"""epoch counts from 0; time is in seconds. Accuracies are fractions of noisy copies that are
classified correctly. train_accuracy is measured after the attack, train_unattacked_accuracy before
it, in eval mode. On test_images test images, test_accuracy is measured without an attack,
test_clean_accuracy also without noise, test_adversarial_accuracy under the attack of the training
at its full epsilon. nan where there is no attack or the epoch was not evaluated."""

LOGITS = "logits_sha256"
"""The setting that names the function which votes: a digest of the classifier's logits for a fixed
batch of images.
"""
CLASSIFIER = "classifier_sha256"
"""The setting that keys the noise, with dataset, sigma and seed."""

DENOISER = "denoiser"
"""The setting, of logs with a denoiser before the classifier, that says which; a run says where it
lies.
"""

_OTHER_PLACE = "another processor, instruction set, library or way to run the classifier"
_MANIFEST, _SHARDS = ".manifest.json", ".shards"
_SELECTION = ("images", "skip", "max")


def _beside(log: Path, *, ending: str, instead_of: str = "") -> Path:
    """The path beside a log that has the log's name with this ``ending``."""
    return log.with_name(log.name.removesuffix(instead_of) + ending)


manifest_path = partial(_beside, ending=_MANIFEST)
"""The path of a log's manifest."""
examples_path = partial(_beside, ending=".npz", instead_of=".tsv")
"""The path of the adversarial examples of a finished log."""
spool_path = partial(_beside, ending=".examples")
"""The path of the adversarial examples while their log is written."""
pictures_folder = partial(_beside, ending=".pictures", instead_of=".tsv")
"""The folder of the pictures of a log's adversarial examples."""
shard_folder = partial(_beside, ending=_SHARDS)
"""The folder of a log's shards until they are merged."""


def files_of(log: Path) -> tuple[Path, ...]:
    """A log and the files beside it that belong to it, whether they exist or not."""
    return log, manifest_path(log), examples_path(log), spool_path(log)


def is_manifest(path: Path) -> bool:
    """Whether the file's name is that of a manifest."""
    return path.name.endswith(_MANIFEST)


def attacked_log(folder: Path, epsilon: float) -> Path:
    """The log of predictions under an attack of this size."""
    short = f"{epsilon:g}"
    return folder / f"epsilon_{short if float(short) == epsilon else repr(epsilon)}.tsv"


def is_shard_folder(name: str) -> bool:
    """Whether this is the name of a folder of shards: parts of a log, which must not be analysed as
    logs.
    """
    return name.endswith(_SHARDS)


def recorded_settings(log: Path) -> dict[str, Any]:
    """The settings in a log's manifest; empty where there is none that can be read."""
    try:
        return read_manifest_file(log)["settings"]
    except UserError:
        return {}


def read_manifest_file(log: Path) -> dict[str, Any]:
    """The manifest of a log: {"settings": ..., "runs": [...]}. UserError where it is missing or
    cannot be one.
    """
    manifest = manifest_path(log)
    try:
        content = read_json(manifest)
        if not (fault := manifest_fault(content)):
            return content
        reason = f"it {fault}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
    raise UserError(
        f"{log} is left in doubt: its manifest {manifest} is missing or unreadable ({reason}), so "
        "it is unknown how its rows were made"
    )


def manifest_beside(log: Path) -> dict[str, Any] | None:
    """The manifest of a log, None if it has none; UserError as above."""
    return read_manifest_file(log) if manifest_path(log).exists() else None


def images_selected(run: dict[str, Any]) -> int | None:
    """How many images a run selects: every ``skip``-th of ``images``, up to ``max``; None where it
    does not say.
    """
    return len(images_of({}, run)) if {*_SELECTION} <= run.keys() else None


def format_radius(radius: float) -> str:
    """Decimal digits for ``radius`` >= 0 that never exceed it and that float() reads as the same
    number.
    """
    shortest, exact = Decimal(repr(float(radius))), Decimal(radius)
    is_close_below = exact * (1 - Decimal("2e-16")) <= shortest <= exact
    # 20 digits, rounded down, are nearer to this float than to any other.
    digits = (
        shortest if is_close_below else Context(prec=20, rounding=ROUND_DOWN).create_decimal(exact)
    )
    return f"{digits:f}" if radius else "0.0"


def tsv(columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> str:
    """A header line and a line per row, tab-separated."""
    columns = list(columns)
    lines = ["\t".join(columns)] + [
        "\t".join(str(row[column]) for column in columns) for row in rows
    ]
    return "\n".join(lines) + "\n"


def differing_fields(before: dict[str, Any], now: dict[str, Any]) -> str:
    """ "sigma was 0.25, now 0.5; ..." for the fields in which two records differ, "" if none."""
    # Through JSON, where a tuple is a list, since the earlier record may come from there.
    before, now = (_flat(json.loads(json.dumps(record))) for record in (before, now))
    differing = (field for field in {**before, **now} if before.get(field) != now.get(field))
    return "; ".join(
        f"{field} was {before.get(field)!r}, now {now.get(field)!r}" for field in differing
    )


def differing_settings(before: dict[str, Any], now: dict[str, Any]) -> str:
    """As ``differing_fields``, for the settings of logs: only with --sound do other logits make
    another log.
    """
    if _are_other_logits(before, now) and (before.get("sound") or now.get("sound")):
        return f"{differing_fields(before, now)} (the logits are rounded by {_OTHER_PLACE})"
    return differing_fields({**before, LOGITS: None}, {**now, LOGITS: None})


def warn_of_other_logits(what: Path, before: dict[str, Any], *now: dict[str, Any]) -> None:
    """Warn if the logits behind ``what`` are not those of ``now``: the manifest has the digest of
    each run.
    """
    if any(_are_other_logits(before, each) for each in now):
        warn(
            f"{what} was made where the logits are rounded by {_OTHER_PLACE}: by slightly "
            "different classifiers"
        )


def _are_other_logits(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the digests of the logits differ; None is that of a batch for which memory was too
    small.
    """
    digests = [record.get(LOGITS, "") for record in (before, now)]
    return None not in digests and digests[0] != digests[1]


def settings_and_logits(manifest: dict[str, Any]) -> dict[str, Any]:
    """The settings in a manifest; with the digest of the first run that has one where the settings
    have none.
    """
    digests = ({LOGITS: run[LOGITS]} for run in manifest["runs"] if LOGITS in run)
    return {**next(digests, {}), **manifest["settings"]}


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with keys like ``objective.attack.epsilon``."""
    flat = {}
    for key, value in record.items():
        flat.update(
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


class ExampleLog:
    """A TSV log with one row per example that survives being killed.

    ``settings`` are the facts that decide the rows' numbers: they go into the manifest, and a log
    is resumed only under equal ones. ``run`` describes the process that writes, for the reader
    alone: the manifest lists each run that added rows, from which row on. ``existing`` says what to
    do with a log that is already there: "refuse", "resume" or "overwrite".
    """

    def __init__(
        self,
        path: Path,
        columns: tuple[str, ...],
        settings: dict[str, Any],
        run: dict[str, Any],
        existing: str = "refuse",
    ) -> None:
        self.path, self.columns = path, columns
        self._manifest: dict[str, Any] = {"settings": settings, "runs": []}
        self._unrecorded_run: dict[str, Any] | None = run
        self.done: set[int] = set()
        if path.is_dir():
            raise UserError(f"{path} is a folder: name the log file to write")
        if path.exists() and existing == "refuse":
            raise UserError(
                f"{path} exists already: add --resume to continue it or --overwrite to start it "
                "anew"
            )
        if existing == "overwrite" or not path.is_file():
            refuse_to_replace(path, *LOG)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        try:
            lock(self._file, path)
            if existing == "resume" and path.stat().st_size:
                self._manifest = self._check_manifest({"settings": settings, "runs": [run]})
                self.done = self._recover()
            else:
                self._file.truncate(0)
                self._record_run()
            if not path.stat().st_size:
                self._write(columns)
        except BaseException:
            self.close()
            raise

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, whole, to the disk."""
        self._record_run()
        self._write(str(row[column]) for column in self.columns)
        self.done.add(int(row["idx"]))

    def amend(self, run: dict[str, Any]) -> None:
        """Record in the manifest that ``run`` has changed for this process, from the next row
        on.
        """
        self._record_run()
        last = {
            name: value for name, value in self._manifest["runs"][-1].items() if name != "first_row"
        }
        self._unrecorded_run = {**last, **run}

    def record_selection(self) -> None:
        """Record this run if it selects other images than the last one: how many rows a whole log
        has depends on it.
        """
        if self._unrecorded_run and self._manifest["runs"]:
            now, last = self._unrecorded_run, self._manifest["runs"][-1]
            if any(now.get(name) != last.get(name) for name in _SELECTION):
                self._record_run()

    def _record_run(self) -> None:
        self._check_place()
        if self._unrecorded_run is not None:
            self._manifest["runs"].append({"first_row": len(self.done), **self._unrecorded_run})
            self._unrecorded_run = None
            write_json(manifest_path(self.path), self._manifest)

    def _check_place(self) -> None:
        """UserError if the file that is open is no longer at its path: every further row would be
        lost.
        """
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise UserError(
                f"{self.path} was deleted, moved or replaced while it was written, so nothing more "
                "is written: put it back and add --resume, or start anew"
            )

    def _write(self, fields: Iterable[str]) -> None:
        append_whole(self._file, ("\t".join(fields) + "\n").encode(), self.path)

    def close(self) -> None:
        self._file.close()

    def _check_manifest(self, now: dict[str, Any]) -> dict[str, Any]:
        """The manifest of the earlier runs; UserError unless they had the settings of ``now``, the
        present one.
        """
        try:
            content = read_manifest_file(self.path)
        except UserError as error:
            raise UserError(
                f"cannot resume {self.path}: {error}; --overwrite starts anew"
            ) from error
        compared = content["settings"], now["settings"]
        if difference := differing_settings(*compared):
            raise UserError(
                f"cannot resume {self.path} with other settings: {difference}; --overwrite starts "
                "anew"
            )
        warn_of_other_logits(self.path, *compared)
        return content

    def _recover(self) -> set[int]:
        """Drop a torn last row and return the examples that the log holds."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        lines = whole.decode(errors="replace").splitlines()
        if lines and tuple(lines[0].split("\t")) != self.columns:
            raise UserError(
                f"cannot resume {self.path}: its columns are '{lines[0]}', expected "
                f"'{' '.join(self.columns)}'"
            )
        done: set[int] = set()
        for number, line in enumerate(lines[1:], start=2):
            fields = line.split("\t")
            if (
                len(fields) != len(self.columns)
                or not re.fullmatch("[0-9]{1,18}", fields[0])
                or int(fields[0]) in done
            ):
                raise UserError(
                    f"cannot resume {self.path}: line {number} is no row of this log, or its idx "
                    f"is there twice: '{line[:80]}'"
                )
            done.add(int(fields[0]))
        return done
