"""Writes the log of an evaluation: whole, one shard of it, or the share of one of torchrun's
processes.
"""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from smoothadv.attacks import SmoothedAttack
from smoothadv.base.devices import to_host
from smoothadv.base.errors import UserError, escape
from smoothadv.base.files import refuse_to_replace, reserved
from smoothadv.base.progress import Progress
from smoothadv.evaluation.setup import Evaluation
from smoothadv.evaluation.shards import Shard, check_siblings, gather, is_merged, shards_of
from smoothadv.records.images import finish_images, forget_images
from smoothadv.records.logs import IMAGES, LOG, differing_settings, shard_folder
from smoothadv.records.writer import LogWriter, MemoryLog, Row, WrittenLog, read_rows
from smoothadv.voting.counter import Poll

# An attack takes up to this many passes' worth of images at a time, so that few places of its last
# passes stay empty.
_PASSES = 4


@dataclass(frozen=True)
class Example:
    """An image [C, H, W] of a dataset, its index there and its label."""

    index: int
    image: torch.Tensor
    label: int


@dataclass(frozen=True)
class LogSpec:
    """How a log is made: its columns, and how examples become rows.

    ``make_polls`` makes one poll for each of some examples. The outcome of a poll is a dict with
    the ``columns`` of the row, except idx, label, correct and time: ``correct`` is 1 where
    ``predict`` equals the label, ``time`` is this example's share of the wall-clock time as
    H:MM:SS.ffffff. ``settings`` are added to those of the evaluation. ``description``, ``title``
    and ``scores`` are those of the progress bar. ``attack`` is the attack in ``make_polls``, if
    there is one. ``keeps_images`` saves the images on which the votes are counted.
    """

    columns: tuple[str, ...]
    settings: dict[str, Any]
    make_polls: Callable[[list[Example]], Iterable[Poll]]
    description: str
    title: str = "correct"
    scores: Callable[[Row], bool] = lambda row: bool(row["correct"])
    attack: SmoothedAttack | None = None
    keeps_images: bool = False


class ProgressBar:
    """The progress bar: examples done of ``total``, a share ``title`` of them, draws per second.

    ``done`` examples are those of earlier runs. The first of several processes shows its share, the
    others show nothing.
    """

    def __init__(self, wanted: LogSpec, total: int, done: int, quiet: bool) -> None:
        name = escape(wanted.description, 80)
        self._bar = Progress(total=total, initial=done, desc=name, unit="example", quiet=quiet)
        self._wanted = wanted
        self._done = self._hits = self._draws = 0

    def add(self, row: Row) -> None:
        self._done += 1
        self._hits += self._wanted.scores(row)
        self._bar.update(1)

    def batch(self, draws: int) -> None:
        self._draws += draws
        elapsed = self._bar.format_dict["elapsed"]
        share = f"{self._wanted.title} {self._hits / self._done:.1%}, " if self._done else ""
        rate = self._draws / max(elapsed, 1e-9)
        self._bar.set_postfix_str(f"{share}{rate:,.0f} draws/s", refresh=False)
        self._bar.update(0)

    def close(self) -> None:
        self._bar.close()


def write_log(evaluation: Evaluation, wanted: LogSpec) -> WrittenLog:
    """Write the missing rows of an evaluation's log, or of this process's share of it; without a
    path, keep them in memory.

    UserError where what was asked for cannot be carried out; the log keeps the rows written so far.
    """
    settings = {
        **evaluation.settings,
        **wanted.settings,
        **({IMAGES: True} if wanted.keeps_images else {}),
    }
    attack_batch = None if wanted.attack is None else wanted.attack.batch
    if evaluation.log is None:
        memory = MemoryLog(wanted.columns)
        _write_rows(evaluation, wanted, memory, evaluation.indices)
        return WrittenLog(Path(), True, evaluation.batch, attack_batch, memory.rows)
    if evaluation.processes.size > 1:
        _write_by_all_processes(evaluation, wanted, settings, evaluation.log)
    else:
        shard, existing = evaluation.spec.shard, evaluation.spec.existing
        _refuse_other_way(evaluation.log, shard, existing, settings, evaluation.indices)
        _write_share(
            evaluation, wanted, settings, evaluation.log, shard, evaluation.indices, existing
        )
    is_whole = evaluation.spec.shard is None and evaluation.processes.is_first
    if wanted.keeps_images and is_whole:
        finish_images(evaluation.log, evaluation.dataset.description.image_shape)
    evaluation.processes.wait()  # then every process can read the log
    return WrittenLog(evaluation.log, is_whole, evaluation.batch, attack_batch)


def _write_by_all_processes(
    evaluation: Evaluation, wanted: LogSpec, settings: dict[str, Any], log: Path
) -> None:
    """Write the log together: each process a shard of the examples that the log lacks, which the
    first process then moves into the log.

    So does it first with the shards of an earlier run, of any number of processes.
    """
    processes = evaluation.processes
    if difference := differing_settings(processes.received(settings), settings):
        raise UserError(
            f"process {processes.rank} would write rows that cannot join those of process 0: "
            f"{difference}"
        )
    processes.wait()  # before there is a shard, by which others would judge
    with processes.first_goes_first():
        if processes.is_first:
            if evaluation.spec.existing != "resume" and processes.is_new(f"log {log}"):
                _begin_anew(log, evaluation.spec.existing)
            gather(log, settings)
            if log.exists():
                _open_log(evaluation, wanted, settings, log, evaluation.indices, "resume").close()
    done = read_rows(log.read_bytes())[1] if log.exists() else {}
    missing = (
        [index for index in evaluation.indices if index not in done] if done else evaluation.indices
    )
    if missing:
        shard = Shard(processes.rank, processes.size)
        _write_share(evaluation, wanted, settings, log, shard, missing, "overwrite")
    processes.wait()
    if processes.is_first:
        gather(log, settings)


def _begin_anew(log: Path, existing: str) -> None:
    """Remove a log and its shards; UserError where they exist and must not be overwritten."""
    if existing == "refuse" and (log.exists() or shards_of(log)):
        raise UserError(
            f"{log} exists already: add --resume to continue it or --overwrite to start it anew"
        )
    refuse_to_replace(log, *LOG)
    with reserved(log):
        forget_images(log)
        log.unlink(missing_ok=True)
        shutil.rmtree(shard_folder(log), ignore_errors=True)


def _write_share(
    evaluation: Evaluation,
    wanted: LogSpec,
    settings: dict[str, Any],
    log: Path,
    shard: Shard | None,
    examples: Sequence[int],
    existing: str,
) -> None:
    """Write the rows of ``examples``, or of a ``shard`` of them into its own log."""
    if shard is not None:
        # Where the log has rows already, shards without these are not to be merged as if complete.
        settings = {**settings, "shard": shard.record(evaluation.indices)}
        log, examples = shard.path(log), shard.of(examples)
    written = _open_log(evaluation, wanted, settings, log, examples, existing)
    _write_rows(evaluation, wanted, written, examples)


def _open_log(
    evaluation: Evaluation,
    wanted: LogSpec,
    settings: dict[str, Any],
    path: Path,
    examples: Sequence[int],
    existing: str,
) -> LogWriter:
    run = {**evaluation.run, "images": len(evaluation.dataset), "batch": evaluation.batch}
    if wanted.attack is not None:
        run["attack_batch"] = wanted.attack.batch
    shape = evaluation.dataset.description.image_shape if wanted.keeps_images else None
    return LogWriter(path, wanted.columns, settings, run, existing, examples, shape)


def _write_rows(
    evaluation: Evaluation, wanted: LogSpec, log: LogWriter | MemoryLog, examples: Sequence[int]
) -> None:
    """Append the missing rows to a log, in the order of ``examples``, and close it.

    The draws of several images share a batch. Each row is on the disk before the next is written.
    """
    counter = evaluation.counter()
    bar = ProgressBar(wanted, len(examples), len(log.done), not evaluation.processes.is_first)

    def vote_in_smaller_batches(batch: int) -> None:
        log.amend({"batch": batch})
        evaluation.check_integers(counter)  # other kernels may be chosen for them

    def polls() -> Iterator[Poll]:
        missing = (index for index in examples if index not in log.done)
        group = examples_at_a_time(wanted.attack)
        while indices := list(itertools.islice(missing, group)):
            group_examples = [Example(index, *evaluation.dataset[index]) for index in indices]
            for example, poll in zip(group_examples, wanted.make_polls(group_examples)):
                image = to_host(poll.image) if wanted.keeps_images else None
                yield replace(poll, tag=(example, image))

    counter.on_batch = bar.batch
    counter.on_smaller_batch = vote_in_smaller_batches
    if wanted.attack is not None:  # it may have to halve its batch, too
        wanted.attack.on_smaller_batch = lambda batch: log.amend({"attack_batch": batch})
    with contextlib.closing(log), contextlib.closing(bar):
        for result in counter.run(polls()):
            example, adversarial = result.tag
            columns = result.outcome
            row = {
                "idx": example.index,
                "label": example.label,
                "correct": int(columns["predict"] == example.label),
                "time": timedelta(seconds=result.seconds),
                **columns,
            }
            images = () if adversarial is None else (example.image.numpy(), adversarial().numpy())
            log.append(row, images)
            bar.add(row)


def examples_at_a_time(attack: SmoothedAttack | None) -> int:
    """How many images are attacked together; one without an attack."""
    if attack is None:
        return 1
    group = attack.examples_per_pass
    # An image's index decides its place in a pass. In one pass's worth of images, several have the
    # same place, and other places have no image: a third of the pass would be computed for nothing.
    return group * _PASSES if group > 1 else group


def _refuse_other_way(
    log: Path,
    shard: Shard | None,
    existing: str,
    settings: dict[str, Any],
    examples: Sequence[int],
) -> None:
    """UserError, before any work, where a log was begun as a whole and is now asked for in shards,
    or the reverse.
    """
    shards = [path for path in shards_of(log) if not is_merged(path, log)]
    if shard is None:
        if shards:
            raise UserError(
                f"{shard_folder(log)} holds {len(shards)} shards of this log: finish them as they "
                "were begun and merge them, continue with several processes of torchrun, or remove "
                "that folder"
            )
        if existing == "overwrite":  # the log that is replaced has all that they hold
            shutil.rmtree(shard_folder(log), ignore_errors=True)
    elif existing != "overwrite":
        if log.exists():
            raise UserError(
                f"{log} exists already{' beside its shards' if shards else ', without shards'}: "
                f"name another log, or remove {'one of them' if shards else 'it'}"
            )
        check_siblings(log, {**settings, "shard": shard.record(examples)})
