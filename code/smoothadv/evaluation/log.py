"""Writes the log of a smoothing job: whole, one shard of it, or together with the other processes
of torchrun.
"""

import contextlib
import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from smoothadv.attacks import SmoothedAttack
from smoothadv.base.devices import to_host
from smoothadv.base.digests import digest
from smoothadv.base.errors import UserError, shown, warn
from smoothadv.base.files import cached_names, write_cached
from smoothadv.base.progress import Progress
from smoothadv.evaluation.saved_examples import Spool, pack
from smoothadv.evaluation.setup import SmoothingJob
from smoothadv.evaluation.shards import (
    Shard,
    WrittenLog,
    check_siblings,
    is_merged,
    merge,
    shard_count,
    shards_of,
)
from smoothadv.evaluation.workers import Workers
from smoothadv.noise import NoiseKey
from smoothadv.records.logs import (
    ExampleLog,
    examples_path,
    manifest_path,
    recorded_settings,
    shard_folder,
    spool_path,
)
from smoothadv.voting.counter import Poll, Result

Row = dict[str, Any]
"""The columns of an example in a log."""
_IMAGES = "images_saved"
# An attack takes up to this many passes' worth of images at a time, so that few places of its last
# passes stay empty.
_PASSES = 4
# Where processes share the work, each should get images at least this many times.
_TURNS = 4


@dataclass(frozen=True)
class Example:
    """An image [C, H, W] of a dataset, its index there and its label."""

    index: int
    image: torch.Tensor
    label: int


@dataclass(frozen=True)
class LogPlan:
    """How a log is made: its columns, and how examples become rows.

    ``make_polls`` makes one poll for each of some examples. The outcome of a poll is a dict with
    the ``columns`` of the row, except idx, label, correct and time: ``correct`` is 1 where
    ``predict`` equals the label, ``time`` is this example's share of the wall-clock time as
    H:MM:SS.ffffff. ``settings`` are added to those of the job. ``description``, ``title`` and
    ``scores`` are those of the progress bar. ``attack`` is the attack in ``make_polls``, if there
    is one. ``keeps_images`` saves the images on which the votes are counted.
    """

    columns: tuple[str, ...]
    settings: dict[str, Any]
    make_polls: Callable[[list[Example]], Iterable[Poll]]
    description: str
    title: str = "correct"
    scores: Callable[[Row], bool] = lambda row: bool(row["correct"])
    attack: SmoothedAttack | None = None
    keeps_images: bool = False


@dataclass(frozen=True)
class Part:
    """A log and the indices of its examples; a spool where the images of the polls are saved as
    well.
    """

    log: ExampleLog
    indices: Sequence[int]
    spool: Spool | None = None

    def close(self) -> None:
        self.log.close()
        if self.spool is not None:
            self.spool.close()


class ProgressBar:
    """The progress bar: examples done of ``total``, a share ``title`` of them, draws per second.

    ``scores`` decides whether a row counts for the share. Of ``workers`` the first one shows the
    examples that all have done, the others show nothing.
    """

    def __init__(
        self,
        description: str,
        total: int,
        title: str,
        scores: Callable[[Row], bool],
        workers: Workers | None,
    ) -> None:
        is_quiet = workers is not None and workers.rank > 0
        self._bar = Progress(
            total=total, desc=shown(description, 80), unit="example", quiet=is_quiet
        )
        self._title, self._scores, self._workers = title, scores, workers
        self._done_here = self._hits = self._draws = self._skipped = 0

    def skip(self, done: int) -> None:
        """Count ``done`` examples that an earlier run finished."""
        self._skipped += done
        self._advance(done)

    def add(self, row: Row) -> None:
        self._done_here += 1
        self._hits += self._scores(row)
        self._advance(1)

    def batch(self, draws: int) -> None:
        self._draws += draws
        elapsed = self._bar.format_dict["elapsed"]
        share = f"{self._title} {self._hits / self._done_here:.1%}, " if self._done_here else ""
        self._bar.set_postfix_str(
            f"{share}{self._draws / max(elapsed, 1e-9):,.0f} draws/s", refresh=False
        )
        self._bar.update(0)

    def _advance(self, examples: int) -> None:
        done = self._workers.report(examples) if self._workers else self._skipped + self._done_here
        if examples and self._done_here == 0:
            # The rows of earlier runs must not count in the estimate of the remaining time.
            self._bar.initial = done
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def write_log(job: SmoothingJob, plan: LogPlan) -> WrittenLog:
    """Write the missing rows of a job's log, or of this process's share of it.

    UserError where what was asked for cannot be carried out; the log keeps the rows written so far.
    """
    settings = {**job.settings, **plan.settings, **({_IMAGES: True} if plan.keeps_images else {})}
    workers, is_share = job.workers, job.request.shard is not None
    is_first = workers is None or workers.rank == 0
    _refuse_other_way(job, settings)
    _Writer(job, plan, settings).run()
    if workers is not None:
        workers.wait_for_all("shards")
        if is_first:
            _merge_shards_of_workers(job, plan)
        workers.wait_for_all("log")  # then every process can read it
    elif not is_share:
        _pack(job, plan, [job.log])
    attack_batch = None if plan.attack is None else plan.attack.batch
    return WrittenLog(job.log, is_first and not is_share, job.batch, attack_batch)


def _pack(job: SmoothingJob, plan: LogPlan, parts: list[Path]) -> None:
    """Make the archive of a whole log's adversarial examples, if the plan keeps them; UserError if
    they are missing.
    """
    if plan.keeps_images and pack(job.log, parts) is None:
        raise UserError(
            f"the adversarial examples of {job.log} are missing; --overwrite starts anew"
        )


def examples_at_a_time(attack: SmoothedAttack | None, job: SmoothingJob) -> int:
    """How many images of a job are attacked together; one without an attack."""
    if attack is None:
        return 1
    group = attack.examples_per_pass
    if group > 1:
        # An image's index decides its place in a pass. In one pass's worth of images, several have
        # the same place, and other places have no image: a third of the pass would be computed for
        # nothing.
        group *= _PASSES
    if job.workers is not None:  # if one process took many images, others might get none
        group = max(1, min(group, len(job.indices) // (_TURNS * job.workers.size)))
    return group


class _Writer:
    """Appends the missing rows to the parts of a log that this process writes, in the order of each
    part's indices.

    The draws of several images, also of different parts, share a batch; the next part is opened
    when a batch has room for its draws. Each row is on the disk before the next is written.
    """

    def __init__(self, job: SmoothingJob, plan: LogPlan, settings: dict[str, Any]) -> None:
        self.job, self.plan, self.settings, self.counter = job, plan, settings, job.counter()
        self.open_parts: list[Part] = []
        total = len(job.indices if job.request.shard is None else job.request.shard.of(job.indices))
        self.bar = ProgressBar(plan.description, total, plan.title, plan.scores, job.workers)

    def run(self) -> None:
        """Write all rows; the parts are closed in any case."""
        self.counter.on_batch = self.bar.batch
        self.counter.on_smaller_batch = self._vote_in
        if self.plan.attack is not None:  # it may have to halve its batch, too
            self.plan.attack.on_smaller_batch = lambda batch: self._amend(attack_batch=batch)
        try:
            for result in self.counter.run(self._polls()):
                while self.open_parts[0] is not result.tag[0]:
                    self.open_parts.pop(0).close()
                self.bar.add(_append(result))
        finally:
            for part in self.open_parts:
                part.close()
            self.bar.close()

    def _vote_in(self, batch: int) -> None:
        """Record a smaller batch, for which other kernels may be chosen."""
        self._amend(batch=batch)
        self.job.check_integers(self.counter)

    def _amend(self, **run: int) -> None:
        for part in self.open_parts:
            part.log.amend(run)

    def _polls(self) -> Iterator[Poll]:
        lacking, group = self._lacking(), examples_at_a_time(self.plan.attack, self.job)
        while waiting := list(itertools.islice(lacking, group)):
            for (part, example), poll in zip(
                waiting, self.plan.make_polls([example for _, example in waiting])
            ):
                image = None if part.spool is None else to_host(poll.image)
                yield replace(poll, tag=(part, example, image))

    def _lacking(self) -> Iterator[tuple[Part, Example]]:
        """The examples without a row in the logs; a part is among the open ones when the iteration
        reaches it.
        """
        for part in self._parts():
            self.open_parts.append(part)
            self.bar.skip(len(part.log.done))
            for index in part.indices:
                if index not in part.log.done:
                    image, label = self.job.dataset[index]
                    yield part, Example(index, image, label)

    def _parts(self) -> Iterator[Part]:
        """The parts; each is opened only when the iteration reaches it."""
        request = self.job.request
        if self.job.workers is not None:
            yield from self._claimed(self.job.workers)
        elif request.shard is not None:
            yield self._shard(request.shard, request.existing)
        else:
            yield self._part(self.job.log, self.job.indices, self.settings, request.existing)

    def _claimed(self, workers: Workers) -> Iterator[Part]:
        """Shards that no other process has, or the log, if begun without torchrun: the first
        process continues it.
        """
        anew = self.job.request.existing == "overwrite"
        if not anew and self.job.log.exists():
            if workers.rank == 0:
                begun = self._part(self.job.log, self.job.indices, self.settings, "resume")
                if missing := len(set(begun.indices) - begun.log.done):
                    warn(
                        f"{begun.log.path} was begun by one process: one continues it, with "
                        f"{missing} examples"
                    )
                yield begun
            return
        if anew and not workers.restarted:
            if workers.rank == 0:
                shutil.rmtree(shard_folder(self.job.log), ignore_errors=True)
            workers.agree(
                "removed", 1
            )  # every process waits here until the first one has removed the old shards
        count = shard_count(len(self.job.indices))
        for index in workers.claims(count):
            yield self._shard(
                Shard(index, count), "resume" if workers.restarted else self.job.request.existing
            )

    def _shard(self, shard: Shard, existing: str) -> Part:
        settings = {**self.settings, "shard": shard.record(self.job.indices)}
        return self._part(shard.path(self.job.log), shard.of(self.job.indices), settings, existing)

    def _part(
        self, path: Path, indices: Sequence[int], settings: dict[str, Any], existing: str
    ) -> Part:
        # After memory has run out, batches are smaller than those in the settings.
        run = {**self.job.run, "images": len(self.job.dataset), "batch": self.counter.batch}
        if self.plan.attack is not None:
            run["attack_batch"] = self.plan.attack.batch
        run["seeds"] = _used_seeds(self.job.key)
        had_images = existing == "overwrite" and recorded_settings(path).get(_IMAGES)
        log = ExampleLog(path, self.plan.columns, settings, run, existing)
        # A file of its own: several processes may do so at once.
        write_cached(f"{_seeds_of(self.job.key)}/{self.job.key.seed}", b"")
        if had_images:  # only now, when this process has locked the log
            examples_path(path).unlink(missing_ok=True)
            spool_path(path).unlink(missing_ok=True)
        try:
            if foreign := log.done.difference(indices):
                raise UserError(
                    f"cannot resume {path}: it holds example {min(foreign)}, which the present "
                    "options leave out"
                )
            part = Part(log, indices, self._spool(path, log) if self.plan.keeps_images else None)
            if part.spool is None:  # else the images may still prove to be lost
                log.record_selection()
            return part
        except BaseException:
            log.close()  # else the lock would stay as long as this process
            raise

    def _spool(self, path: Path, log: ExampleLog) -> Spool:
        if log.done and not spool_path(path).exists():
            # An earlier run merged the shards of this log, but was stopped before it packed their
            # images.
            pack(path, shards_of(path))
        return Spool(path, self.job.dataset.description.image_shape, log.done)


def _used_seeds(key: NoiseKey) -> list[int]:
    """The seeds under which this user has made logs of a classifier, as far as the cache folder
    knows, and ``key``'s.

    Whoever tries many seeds and reports the best log reports more than the guarantee covers.
    """
    return sorted(
        {
            key.seed,
            *(int(name) for name in cached_names(_seeds_of(key)) if re.fullmatch("[0-9]+", name)),
        }
    )


def _seeds_of(key: NoiseKey) -> str:
    return f"seeds/{digest([repr(replace(key, seed=0))])[:32]}"


def _append(result: Result) -> Row:
    (part, example, voted_on), columns = result.tag, result.outcome
    row = {
        "idx": example.index,
        "label": example.label,
        "correct": int(columns["predict"] == example.label),
    }
    row |= {"time": timedelta(seconds=result.seconds), **columns}
    if part.spool is not None:
        # Before the row: an image without a row is computed again, but a row without its image
        # could not be completed.
        part.spool.append(example.index, example.image.numpy(), voted_on().numpy())
    part.log.append(row)
    return row


def _merge_shards_of_workers(job: SmoothingJob, plan: LogPlan) -> None:
    """Merge the shards of torchrun's processes, unless an earlier run did; remove the shards that
    are in the log.
    """
    log, anew = job.log, job.request.existing == "overwrite"
    if anew or not log.exists():
        count = shard_count(len(job.indices))
        merge(log, [Shard(index, count).path(log) for index in range(count)], overwrite=anew)
    _pack(job, plan, [log, *shards_of(log)])
    for path in shards_of(log):
        if is_merged(path, log):
            path.unlink()
            manifest_path(path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder does not exist, or contains other files
        shard_folder(log).rmdir()


def _refuse_other_way(job: SmoothingJob, settings: dict[str, Any]) -> None:
    """UserError, before any work, where a log was begun as a whole and is now asked for in shards,
    or the reverse.
    """
    log, shard = job.log, job.request.shard
    shards = [path for path in shards_of(log) if not is_merged(path, log)]
    if shard is None and job.workers is None:
        if shards:
            raise UserError(
                f"{shard_folder(log)} holds {len(shards)} shards of this log: finish them as they "
                "were begun and merge them, or remove that folder"
            )
    elif job.request.existing != "overwrite":
        if log.exists() and (shards or shard is not None):
            raise UserError(
                f"{log} exists already{' beside its shards' if shards else ', without shards'}: "
                f"name another log, or remove {'one of them' if shards else 'it'}"
            )
        shard = shard or Shard(0, shard_count(len(job.indices)))
        check_siblings(log, {**settings, "shard": shard.record(job.indices)})
