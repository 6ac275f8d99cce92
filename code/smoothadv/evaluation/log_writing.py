"""From a smoothing job to its log: in one process, in a shard, or among those that torchrun started; and merging."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.commands.smoothing import SmoothingJob

from smoothadv.commands.options.components import warn
from smoothadv.commands.runner import Parser, run
from smoothadv.errors import UserError
from smoothadv.evaluation.loop import Example, HasBatch, Part, Tally, check_logged_examples, evaluate_examples
from smoothadv.evaluation.saved_examples import Spool, pack
from smoothadv.evaluation.shards import Shard, check_siblings, is_merged, merge, shard_count, shards_of
from smoothadv.evaluation.workers import Workers
from smoothadv.records import ExampleLog, examples_path, manifest_path, recorded_settings, shard_folder, spool_path
from smoothadv.smoothing.voting import Poll, VoteCounter

_IMAGES = "images_saved"


@dataclass(frozen=True)
class Evaluation:
    """What becomes of an example: its row's ``columns`` from its ``ballots``, see ``evaluate_examples``.

    ``settings`` joins those of the job, ``run`` what is said of this process; ``description``, ``title`` and ``scores``
    are the progress bar's. ``group`` examples are asked for at a time. ``keeps_images`` keeps what is put to the vote.
    """

    columns: tuple[str, ...]
    settings: dict[str, Any]
    ballots: Callable[[list[Example]], Iterable[Poll]]
    description: str
    title: str
    scores: Callable[[dict[str, Any]], bool]
    run: Callable[[], dict[str, Any]] = dict
    group: int = 1
    attack_memory: HasBatch | None = None
    keeps_images: bool = False


def evaluate(options: argparse.Namespace, job: SmoothingJob, evaluation: Evaluation) -> bool:
    """Bring the log of ``options.outfile``, or this process's share of it, to its end; whether OUTFILE is whole now."""
    settings = {**job.settings, **evaluation.settings, **({_IMAGES: True} if evaluation.keeps_images else {})}
    workers, counter = job.workers, job.counter()
    _refuse_other_way(options, job, settings)
    work = _Work(options, job, evaluation, settings, counter)
    indices = job.indices if options.shard is None else options.shard.of(job.indices)
    tally = Tally(
        evaluation.description,
        len(indices),
        evaluation.title,
        evaluation.scores,
        report=workers.report if workers else None,
        quiet=workers is not None and workers.rank > 0,
    )
    evaluate_examples(
        job.dataset, work.parts(), counter, evaluation.ballots, tally, evaluation.group, evaluation.attack_memory
    )
    if workers is None:
        if options.shard is None:
            _pack(options.outfile, [options.outfile], evaluation)
        return options.shard is None
    workers.wait_for_all()
    if workers.rank == 0:
        _merge_own_shards(options, len(job.indices), evaluation)
    return workers.rank == 0


def _pack(log: Path, written_as: list[Path], evaluation: Evaluation) -> None:
    """Make the archive of the images of a whole log; UserError where they should be there and are not."""
    if evaluation.keeps_images and pack(log, written_as) is None:
        raise UserError(f"the adversarial examples of {log} are missing; --overwrite starts anew")


class _Work:
    """The logs to be written and their examples, opened when they are reached."""

    def __init__(
        self,
        options: argparse.Namespace,
        job: SmoothingJob,
        evaluation: Evaluation,
        settings: dict[str, Any],
        counter: VoteCounter,
    ) -> None:
        self.options, self.job, self.evaluation = options, job, evaluation
        self.settings, self.counter = settings, counter

    def parts(self) -> Iterator[Part]:
        options, job = self.options, self.job
        if job.workers is not None:
            yield from self._claimed(job.workers)
        elif options.shard is not None:
            yield self._shard(options.shard, options.existing)
        else:
            yield self._part(options.outfile, job.indices, self.settings, options.existing)

    def _claimed(self, workers: Workers) -> Iterator[Part]:
        """Shards that no other process has; or a log that one process began, which the first one continues."""
        anew = self.options.existing == "overwrite"
        if not anew and self.options.outfile.exists():
            if workers.rank == 0:
                begun = self._part(self.options.outfile, self.job.indices, self.settings, "resume")
                if missing := len(set(begun.indices) - begun.log.done):
                    warn(f"{begun.log.path} was begun by one process: one continues it, with {missing} examples")
                yield begun
            return
        if anew and not workers.restarted:
            if workers.rank == 0:
                shutil.rmtree(shard_folder(self.options.outfile), ignore_errors=True)
            workers.agree("removed", 1)  # nobody begins before the first process has said so
        count = shard_count(len(self.job.indices))
        for index in workers.claims(count):
            yield self._shard(Shard(index, count), "resume" if workers.restarted else self.options.existing)

    def _shard(self, shard: Shard, existing: str) -> Part:
        settings = {**self.settings, "shard": shard.record(self.job.indices)}
        return self._part(shard.path(self.options.outfile), shard.of(self.job.indices), settings, existing)

    def _part(self, path: Path, indices: Sequence[int], settings: dict[str, Any], existing: str) -> Part:
        # Batches are smaller than those of the settings once memory has run out.
        run = {
            **self.job.run,
            "images": len(self.job.dataset),
            "batch": self.counter.batch,
            **self.evaluation.run(),
        }
        had_images = existing == "overwrite" and recorded_settings(path).get(_IMAGES)
        log = ExampleLog(path, self.evaluation.columns, settings, run, existing)
        if had_images:  # and now this process has the log for itself
            examples_path(path).unlink(missing_ok=True)
            spool_path(path).unlink(missing_ok=True)
        check_logged_examples(log, indices)
        return Part(log, indices, self._spool(path, log) if self.evaluation.keeps_images else None)

    def _spool(self, path: Path, log: ExampleLog) -> Spool:
        if log.done and not spool_path(path).exists():
            # Those of a log that was merged by a run that did not get further.
            pack(path, shards_of(path))
        return Spool(path, self.job.dataset.description.image_shape, log.done)


def _merge_own_shards(options: argparse.Namespace, examples: int, evaluation: Evaluation) -> None:
    """Merge the shards that torchrun's processes made, unless an earlier run did, and remove what is in the log now."""
    anew = options.existing == "overwrite"
    if anew or not options.outfile.exists():
        count = shard_count(examples)
        merge(options.outfile, [Shard(index, count).path(options.outfile) for index in range(count)], overwrite=anew)
    _pack(options.outfile, [options.outfile, *shards_of(options.outfile)], evaluation)
    for path in shards_of(options.outfile):
        if is_merged(path, options.outfile):
            path.unlink()
            manifest_path(path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or somebody keeps other files in it
        shard_folder(options.outfile).rmdir()


def _refuse_other_way(options: argparse.Namespace, job: SmoothingJob, settings: dict[str, Any]) -> None:
    """UserError, before any work, where a log was begun in another way: alone, in shards, in other shards."""
    anew = options.existing == "overwrite"
    shards = [path for path in shards_of(options.outfile) if not is_merged(path, options.outfile)]
    if options.shard is None and job.workers is None:
        if shards:
            raise UserError(
                f"{shard_folder(options.outfile)} holds {len(shards)} shards of this log: finish them as they were "
                "begun and merge them, or remove that folder"
            )
        return
    if options.outfile.exists() and not anew and (shards or options.shard is not None):
        raise UserError(
            f"{options.outfile} exists already{' beside its shards' if shards else ', without shards'}: name another "
            f"log, or remove {'one of them' if shards else 'it'}"
        )
    if not anew:
        shard = options.shard or Shard(0, shard_count(len(job.indices)))
        check_siblings(options.outfile, {**settings, "shard": shard.record(job.indices)})


def told_of_shard(options: argparse.Namespace, command: str) -> str:
    """What to say at the end of a shard."""
    return (
        f"shard {options.shard} is done: {options.shard.path(options.outfile)}; when all are, "
        f"`python code/{command}.py merge {options.outfile}` joins them, and then this command without --shard tells "
        "what they say"
    )


def merge_main(command: str, arguments: list[str] | None) -> int:
    """``certify merge``, ``predict merge`` and ``attack merge``."""
    parser = Parser(
        prog=f"{command} merge",
        description="Join the shards of a log. Refuses gaps, overlaps, unfinished shards and mixed settings.",
        epilog=f"examples:\n  python code/{command}.py merge logs/cifar10.tsv\n"
        f"  python code/{command}.py merge logs/cifar10.tsv node1/*.tsv node2/*.tsv\n",
    )
    parser.add_argument(
        "outfile", metavar="OUTFILE", type=Path, help="log to write; it is the one the shards were made for"
    )
    parser.add_argument(
        "shards",
        metavar="SHARD",
        type=Path,
        nargs="*",
        default=[],
        help="shard logs (default: those in OUTFILE.shards)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUTFILE if it exists")
    return run(parser, _merge, arguments)


def _merge(options: argparse.Namespace) -> None:
    shards = options.shards or shards_of(options.outfile)
    rows = merge(options.outfile, shards, options.overwrite)
    pack(options.outfile, shards)
    print(f"{options.outfile}: {rows} examples from {len(shards)} shards, which can be removed now")
