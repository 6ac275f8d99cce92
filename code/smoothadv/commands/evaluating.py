"""From a smoothing job to its log: in one process, in a shard, or among those that torchrun started; and merging."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from smoothadv.commands.components import warn
from smoothadv.commands.runner import Parser, run
from smoothadv.commands.smoothing import SmoothingJob
from smoothadv.errors import UserError
from smoothadv.evaluation import Part, Tally, check_logged_examples, evaluate_examples
from smoothadv.records import ExampleLog, manifest_path, shard_folder
from smoothadv.shards import Shard, check_siblings, is_merged, merge, shard_count, shards_of
from smoothadv.voting import Poll, VoteCounter
from smoothadv.workers import Workers


def evaluate(
    options: argparse.Namespace,
    job: SmoothingJob,
    columns: tuple[str, ...],
    settings: dict[str, Any],
    poll: Callable[[int, torch.Tensor, int], Poll],
    description: str,
    title: str,
    scores: Callable[[dict[str, Any]], bool],
) -> bool:
    """Bring the log of ``options.outfile``, or this process's share of it, to its end; whether OUTFILE is whole now.

    ``settings`` joins those of the job; ``poll`` is that of ``evaluate_examples``; the others are what the progress
    bar says.
    """
    settings = {**job.settings, **settings}
    workers, counter = job.workers, job.counter()
    _refuse_other_way(options, job, settings)
    work = _Work(options, job, columns, settings, counter)
    indices = job.indices if options.shard is None else options.shard.of(job.indices)
    tally = Tally(
        description,
        len(indices),
        title,
        scores,
        report=workers.report if workers else None,
        quiet=workers is not None and workers.rank > 0,
    )
    evaluate_examples(job.dataset, work.parts(), counter, poll, tally)
    if workers is None:
        return options.shard is None
    workers.wait_for_all()
    if workers.rank == 0:
        _merge_own_shards(options, len(job.indices))
    return workers.rank == 0


class _Work:
    """The logs to be written and their examples, opened when they are reached."""

    def __init__(
        self,
        options: argparse.Namespace,
        job: SmoothingJob,
        columns: tuple[str, ...],
        settings: dict[str, Any],
        counter: VoteCounter,
    ) -> None:
        self.options, self.job, self.columns, self.settings, self.counter = options, job, columns, settings, counter

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

    def _part(self, path: Path, indices: range, settings: dict[str, Any], existing: str) -> Part:
        # The counter's batch is smaller than that of the settings once memory has run out.
        log = ExampleLog(path, self.columns, settings, {**self.job.run, "batch": self.counter.batch}, existing)
        check_logged_examples(log, indices)
        return Part(log, indices)


def _merge_own_shards(options: argparse.Namespace, examples: int) -> None:
    """Merge the shards that torchrun's processes made, unless an earlier run did, and remove what is in the log now."""
    anew = options.existing == "overwrite"
    if anew or not options.outfile.exists():
        count = shard_count(examples)
        merge(options.outfile, [Shard(index, count).path(options.outfile) for index in range(count)], overwrite=anew)
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
        f"`python code/{command}.py merge {options.outfile}` joins them"
    )


def merge_main(command: str, arguments: list[str] | None) -> int:
    """``certify merge`` and ``predict merge``."""
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
    print(f"{options.outfile}: {rows} examples from {len(shards)} shards, which can be removed now")
