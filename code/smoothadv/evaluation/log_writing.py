"""Writes the log of a smoothing job: whole, one shard of it, or together with the other processes of torchrun."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from smoothadv.attacks import SmoothedAttack
from smoothadv.devices import to_host
from smoothadv.errors import UserError, warn
from smoothadv.evaluation.attacked_images import examples_at_a_time
from smoothadv.evaluation.image_loop import Example, Part, ProgressBar, Row
from smoothadv.evaluation.requests import EvaluationRequest
from smoothadv.evaluation.saved_examples import Spool, pack
from smoothadv.evaluation.shards import Shard, check_siblings, is_merged, merge, shard_count, shards_of
from smoothadv.evaluation.smoothing_job import SmoothingJob
from smoothadv.evaluation.used_seeds import record_seed, used_seeds
from smoothadv.evaluation.workers import Workers
from smoothadv.records import ExampleLog, examples_path, manifest_path, recorded_settings, shard_folder, spool_path
from smoothadv.smoothing.voting import Poll, Result

_IMAGES = "images_saved"


@dataclass(frozen=True)
class LogPlan:
    """How a log that a ``request`` asks for is made: its path, its columns, and how examples become rows.

    ``make_polls`` makes one poll for each of some examples. The outcome of a poll is a dict with the ``columns`` of the
    row, except idx, label, correct and time: ``correct`` is 1 where ``predict`` equals the label, ``time`` is this
    example's share of the wall-clock time as H:MM:SS.ffffff. ``settings`` are added to those of the job.
    ``description``, ``title`` and ``scores`` are those of the progress bar. ``attack`` is the attack in ``make_polls``,
    if there is one. ``keeps_images`` saves the images on which the votes are counted.
    """

    request: EvaluationRequest
    path: Path
    columns: tuple[str, ...]
    settings: dict[str, Any]
    make_polls: Callable[[list[Example]], Iterable[Poll]]
    description: str
    title: str = "correct"
    scores: Callable[[Row], bool] = lambda row: bool(row["correct"])
    attack: SmoothedAttack | None = None
    keeps_images: bool = False


def write_log(job: SmoothingJob, plan: LogPlan) -> bool:
    """Write the missing rows of a log, or of this process's share of it; True if the whole log is now written."""
    settings = {**job.settings, **plan.settings, **({_IMAGES: True} if plan.keeps_images else {})}
    workers = job.workers
    _refuse_other_way(plan, job, settings)
    if job.noise.key is None and (workers is None or workers.rank == 0):
        warn(f"{plan.path} was begun with noise that depends on --seed alone, and is continued with it")
    _Writer(plan, job, settings).run()
    if workers is None:
        if plan.request.shard is None:
            _pack(plan, [plan.path])
        return plan.request.shard is None
    workers.wait_for_all("shards")
    if workers.rank == 0:
        _merge_shards_of_workers(plan, len(job.indices))
    workers.wait_for_all("log")  # then every process can read it
    return workers.rank == 0


def _pack(plan: LogPlan, parts: list[Path]) -> None:
    """Make the archive of a whole log's adversarial examples, if the plan keeps them; UserError if they are missing."""
    if plan.keeps_images and pack(plan.path, parts) is None:
        raise UserError(f"the adversarial examples of {plan.path} are missing; --overwrite starts anew")


class _Writer:
    """Appends the missing rows to the parts of a log that this process writes, in the order of each part's indices.

    The draws of several images, also of different parts, share a batch; the next part is opened when a batch has room
    for its draws. Each row is on the disk before the next is written.
    """

    def __init__(self, plan: LogPlan, job: SmoothingJob, settings: dict[str, Any]) -> None:
        self.plan, self.job, self.settings, self.counter = plan, job, settings, job.counter()
        self.open_parts: list[Part] = []
        total = len(job.indices if plan.request.shard is None else plan.request.shard.of(job.indices))
        self.bar = ProgressBar(plan.description, total, plan.title, plan.scores, job.workers)

    def run(self) -> None:
        """Write all rows; the parts are closed in any case."""
        self.counter.on_batch = self.bar.batch
        self.counter.on_smaller_batch = lambda batch: self._amend(batch=batch)
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

    def _amend(self, **run: int) -> None:
        for part in self.open_parts:
            part.log.amend(run)

    def _polls(self) -> Iterator[Poll]:
        lacking, group = self._lacking(), examples_at_a_time(self.plan.attack, self.job)
        while waiting := list(itertools.islice(lacking, group)):
            for (part, example), poll in zip(waiting, self.plan.make_polls([example for _, example in waiting])):
                image = None if part.spool is None else to_host(poll.image)
                yield replace(poll, tag=(part, example, image))

    def _lacking(self) -> Iterator[tuple[Part, Example]]:
        """The examples without a row in the logs; a part is among the open ones when the iteration reaches it."""
        for part in self._parts():
            self.open_parts.append(part)
            self.bar.skip(len(part.log.done))
            for index in part.indices:
                if index not in part.log.done:
                    image, label = self.job.dataset[index]
                    yield part, Example(index, image, label)

    def _parts(self) -> Iterator[Part]:
        """The parts; each is opened only when the iteration reaches it."""
        request = self.plan.request
        if self.job.workers is not None:
            yield from self._claimed(self.job.workers)
        elif request.shard is not None:
            yield self._shard(request.shard, request.existing)
        else:
            yield self._part(self.plan.path, self.job.indices, self.settings, request.existing)

    def _claimed(self, workers: Workers) -> Iterator[Part]:
        """Shards that no other process has, or the log, if begun without torchrun: the first process continues it."""
        anew = self.plan.request.existing == "overwrite"
        if not anew and self.plan.path.exists():
            if workers.rank == 0:
                begun = self._part(self.plan.path, self.job.indices, self.settings, "resume")
                if missing := len(set(begun.indices) - begun.log.done):
                    warn(f"{begun.log.path} was begun by one process: one continues it, with {missing} examples")
                yield begun
            return
        if anew and not workers.restarted:
            if workers.rank == 0:
                shutil.rmtree(shard_folder(self.plan.path), ignore_errors=True)
            workers.agree("removed", 1)  # every process waits here until the first one has removed the old shards
        count = shard_count(len(self.job.indices))
        for index in workers.claims(count):
            yield self._shard(Shard(index, count), "resume" if workers.restarted else self.plan.request.existing)

    def _shard(self, shard: Shard, existing: str) -> Part:
        settings = {**self.settings, "shard": shard.record(self.job.indices)}
        return self._part(shard.path(self.plan.path), shard.of(self.job.indices), settings, existing)

    def _part(self, path: Path, indices: Sequence[int], settings: dict[str, Any], existing: str) -> Part:
        # After memory has run out, batches are smaller than those in the settings.
        run = {**self.job.run, "images": len(self.job.dataset), "batch": self.counter.batch}
        if self.plan.attack is not None:
            run["attack_batch"] = self.plan.attack.batch
        key = self.job.noise.key
        if key is not None:
            run["seeds"] = used_seeds(key)
        had_images = existing == "overwrite" and recorded_settings(path).get(_IMAGES)
        log = ExampleLog(path, self.plan.columns, settings, run, existing)
        if key is not None:
            record_seed(key)
        if had_images:  # only now, when this process has locked the log
            examples_path(path).unlink(missing_ok=True)
            spool_path(path).unlink(missing_ok=True)
        try:
            if foreign := log.done.difference(indices):
                raise UserError(
                    f"cannot resume {path}: it holds example {min(foreign)}, which the present options leave out"
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
            # An earlier run merged the shards of this log, but was stopped before it packed their images.
            pack(path, shards_of(path))
        return Spool(path, self.job.dataset.description.image_shape, log.done)


def _append(result: Result) -> Row:
    (part, example, voted_on), columns = result.tag, result.outcome
    row = {
        "idx": example.index,
        "label": example.label,
        "correct": int(columns["predict"] == example.label),
        "time": timedelta(seconds=result.seconds),
        **columns,
    }
    if part.spool is not None:
        # Before the row: an image without a row is computed again, but a row without its image could not be completed.
        part.spool.append(example.index, example.image.numpy(), voted_on().numpy())
    part.log.append(row)
    return row


def _merge_shards_of_workers(plan: LogPlan, examples: int) -> None:
    """Merge the shards of torchrun's processes, unless an earlier run did; remove the shards that are in the log."""
    anew = plan.request.existing == "overwrite"
    if anew or not plan.path.exists():
        count = shard_count(examples)
        merge(plan.path, [Shard(index, count).path(plan.path) for index in range(count)], overwrite=anew)
    _pack(plan, [plan.path, *shards_of(plan.path)])
    for path in shards_of(plan.path):
        if is_merged(path, plan.path):
            path.unlink()
            manifest_path(path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder does not exist, or contains other files
        shard_folder(plan.path).rmdir()


def _refuse_other_way(plan: LogPlan, job: SmoothingJob, settings: dict[str, Any]) -> None:
    """UserError, before any work, where a log was begun as a whole and is now asked for in shards, or the reverse."""
    anew = plan.request.existing == "overwrite"
    shards = [path for path in shards_of(plan.path) if not is_merged(path, plan.path)]
    if plan.request.shard is None and job.workers is None:
        if shards:
            raise UserError(
                f"{shard_folder(plan.path)} holds {len(shards)} shards of this log: finish them as they were "
                "begun and merge them, or remove that folder"
            )
        return
    if plan.path.exists() and not anew and (shards or plan.request.shard is not None):
        raise UserError(
            f"{plan.path} exists already{' beside its shards' if shards else ', without shards'}: name another "
            f"log, or remove {'one of them' if shards else 'it'}"
        )
    if not anew:
        shard = plan.request.shard or Shard(0, shard_count(len(job.indices)))
        check_siblings(plan.path, {**settings, "shard": shard.record(job.indices)})
