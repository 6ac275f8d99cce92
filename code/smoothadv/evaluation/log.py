"""Writes the log of an evaluation: whole, one shard of it, or the share of one of torchrun's
processes.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smoothadv.base.devices import to_host
from smoothadv.base.errors import UserError, counted
from smoothadv.base.files import reserved
from smoothadv.base.progress import Progress
from smoothadv.evaluation.setup import Evaluation
from smoothadv.evaluation.shards import Shard, check_siblings, gather, is_merged, remove_shards
from smoothadv.noise.scale import with_exact_levels
from smoothadv.records.logs import IMAGES, differing_settings, shard_folder, shards_of
from smoothadv.records.writer import (
    LogWriter,
    MemoryLog,
    Row,
    WrittenLog,
    check_path,
    finish_images,
    forget_images,
    read_existing,
    read_rows,
)
from smoothadv.voting.counter import Poll, VoteCounter, check_integers

if TYPE_CHECKING:
    from smoothadv.attacks import StagedAttack

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
class LogContent:
    """How a log is made: its columns, and how examples become rows.

    ``make_polls`` makes one poll for each of some examples. The outcome of a poll is a dict with
    the ``columns`` of the row, except idx, label, correct and time: ``correct`` is 1 where
    ``predict`` equals the label, ``time`` is this example's share of the wall-clock time as
    H:MM:SS.ffffff. ``settings`` are added to those of the evaluation. ``activity``, ``title`` and
    ``scores`` are those of the progress bar. ``attack`` is the attack in ``make_polls``, if
    there is one. ``keeps_images`` saves the images on which the votes are counted, by
    ``counter`` (None: the evaluation's).
    """

    columns: tuple[str, ...]
    settings: dict[str, Any]
    make_polls: Callable[[list[Example]], Iterable[Poll]]
    activity: str
    title: str = "correct"
    scores: Callable[[Row], bool] = lambda row: bool(row["correct"])
    attack: "StagedAttack | None" = None
    keeps_images: bool = False
    counter: VoteCounter | None = None


def write_log(evaluation: Evaluation, content: LogContent) -> WrittenLog:
    """Write the missing rows of an evaluation's log, or of this process's share of it; without a
    path, keep them in memory.

    UserError where what was asked for cannot be carried out; the log keeps the rows written so far.
    """
    checked_log(evaluation, content)
    evaluation = evaluation.probed()
    path, settings, examples, _ = checked_log(evaluation, content)  # now by the logits, too
    log, shard = evaluation.log, evaluation.spec.shard
    if log is None or path is None:
        rows = _write_rows(evaluation, content, MemoryLog(content.columns), examples)
    elif evaluation.processes.size > 1:
        rows = _write_by_all_processes(evaluation, content, settings, log)
    else:
        if shard is None and evaluation.spec.existing == "overwrite":
            remove_shards(log)  # all of them are merged
        writer = _open_log(evaluation, content, settings, path, examples, evaluation.spec.existing)
        rows = _write_rows(evaluation, content, writer, examples)
    is_whole = log is None or (shard is None and evaluation.processes.is_first)
    if log is not None:
        if content.keeps_images and is_whole:
            finish_images(log, evaluation.dataset.description.image_shape)
        evaluation.processes.wait()
    attack_batch = None if content.attack is None else content.attack.batch
    return WrittenLog(
        log or Path(), content.columns, rows, is_whole, evaluation.batch, attack_batch
    )


def checked_log(
    evaluation: Evaluation, content: LogContent
) -> tuple[Path | None, dict[str, Any], Sequence[int], set[int]]:
    """This process's log, or shard; its settings; its examples, and those that are done. No pass of
    the model is made.

    UserError where the log could not be written, also where it was started as a whole and is now
    asked for in shards, or the reverse.
    """
    settings = {**evaluation.settings, **content.settings}
    settings |= {IMAGES: True} if content.keeps_images else {}
    log, examples, done = evaluation.log, evaluation.indices, set[int]()
    existing, shard = evaluation.spec.existing, evaluation.spec.shard
    is_alone = evaluation.processes.size == 1
    if log is None:
        return log, settings, examples, done
    if shard is not None:
        settings = {**settings, "shard": shard.record(examples)}
        if existing != "overwrite":
            if log.exists():
                raise UserError(f"{log} exists already, as a whole: name another log, or remove it")
            check_siblings(log, settings)
        log, examples = shard.path(log), shard.of(examples)
    elif not is_alone:
        done = check_siblings(log, settings) if existing == "resume" else done
    elif shards := [path for path in shards_of(log) if not is_merged(path, log)]:
        raise UserError(
            f"{shard_folder(log)} holds {counted(len(shards), 'shard')} of this log: finish them "
            "as they were started and merge them, continue with several processes of torchrun, or "
            "remove that folder"
        )
    if (is_alone or existing == "resume") and check_path(log, existing):
        done.update(read_existing(log, content.columns, settings, examples)[2])
    return log, settings, examples, done


def _write_by_all_processes(
    evaluation: Evaluation, content: LogContent, settings: dict[str, Any], log: Path
) -> dict[int, str]:
    """Write the log together: each process a shard of the examples that the log lacks, which the
    first process then moves into the log. Returns its rows to all of them.

    So does it first with the shards of an earlier run, of any number of processes.
    """
    processes, examples = evaluation.processes, evaluation.indices
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
                _open_log(evaluation, content, settings, log, examples, "resume").close()
    done = read_rows(log.read_bytes(), f"{log} is damaged")[1] if log.exists() else {}
    missing = [index for index in examples if index not in done] if done else examples
    if missing:
        shard = Shard(processes.rank, processes.size)
        # Where the log has rows already, shards without these are not to be merged as if complete.
        own, share = {**settings, "shard": shard.record(examples)}, shard.of(missing)
        writer = _open_log(evaluation, content, own, shard.path(log), share, "overwrite")
        _write_rows(evaluation, content, writer, share)
    processes.wait()
    if processes.is_first:
        gather(log, settings)
    processes.wait()
    return read_rows(log.read_bytes(), f"{log} is damaged")[1]


def _begin_anew(log: Path, existing: str) -> None:
    """Remove a log and its shards; UserError where they exist and must not be overwritten."""
    for path in (log, *shards_of(log)):
        check_path(path, existing)
    with reserved(log):
        forget_images(log)
        log.unlink(missing_ok=True)
        remove_shards(log)


def _open_log(
    evaluation: Evaluation,
    content: LogContent,
    settings: dict[str, Any],
    path: Path,
    examples: Sequence[int],
    existing: str,
) -> LogWriter:
    run = {**evaluation.run_record, "images": len(evaluation.dataset), "batch": evaluation.batch}
    run |= {} if content.attack is None else {"attack_batch": content.attack.batch}
    shape = evaluation.dataset.description.image_shape if content.keeps_images else None
    return LogWriter(path, content.columns, settings, run, existing, examples, shape)


def _write_rows(
    evaluation: Evaluation, content: LogContent, log: MemoryLog, examples: Sequence[int]
) -> dict[int, str]:
    """Append the missing rows to a log, in the order of ``examples``, and close it; returns all of
    its rows.

    The draws of several images share a batch. Each row is on the disk before the next is written.
    The first of several processes shows its progress, the others show nothing.
    """
    counter = content.counter or evaluation.counter()
    bar = Progress(
        total=len(examples),
        initial=len(log.rows),
        desc=content.activity,
        unit="example",
        quiet=not evaluation.processes.is_first,
    )
    rows = hits = draws = 0

    def say_how_fast(counted: int) -> None:
        nonlocal draws
        draws += counted
        share = f"{content.title} {hits / rows:.1%}, " if rows else ""
        rate = draws / max(bar.format_dict["elapsed"], 1e-9)
        bar.set_postfix_str(f"{share}{rate:,.0f} draws/s", refresh=False)
        bar.update(0)

    def vote_in_smaller_batches(batch: int) -> None:
        log.amend({"batch": batch})
        for stage, voter in enumerate(evaluation.voters):  # other kernels may be chosen for them
            voter.form.use_fast_form(partial(check_integers, counter, stage=stage))

    counter.on_batch, counter.on_smaller_batch = say_how_fast, vote_in_smaller_batches
    if content.attack is not None:  # it may have to halve its batch, too
        content.attack.watch(lambda batch: log.amend({"attack_batch": batch}))
    missing = (index for index in examples if index not in log.rows)
    with contextlib.closing(log), contextlib.closing(bar):
        for result in counter.run(_polls(evaluation, content, missing)):
            example, adversarial = result.tag
            row = {
                "idx": example.index,
                "label": example.label,
                "correct": int(result.outcome["predict"] == example.label),
                "time": timedelta(seconds=result.seconds),
                **result.outcome,
            }
            images = (
                () if adversarial is None else (example.image.cpu().numpy(), adversarial().numpy())
            )
            log.append(row, images)
            rows, hits = rows + 1, hits + content.scores(row)
            bar.update(1)
    return log.rows


def _polls(evaluation: Evaluation, content: LogContent, missing: Iterator[int]) -> Iterator[Poll]:
    """The polls of the examples with these indices, each with its example and its image as tag."""
    # An image's index decides its place in a pass. With one pass's worth of images, places collide,
    # and a third of them stays empty.
    group = 1 if content.attack is None else content.attack.examples_per_pass
    group = group * _PASSES if group > 1 else group
    while indices := list(itertools.islice(missing, group)):
        examples = [
            Example(index, with_exact_levels(image), label)
            for index in indices
            for image, label in [evaluation.dataset[index]]
        ]
        for example, poll in zip(examples, content.make_polls(examples)):
            image = to_host(poll.image) if content.keeps_images else None
            yield replace(poll, tag=(example, image))
