"""From a smoothing job to its log: in one process, in a shard, or among those that torchrun started; and merging."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from smoothadv.commands.runner import Parser, run
from smoothadv.commands.smoothing import SmoothingJob
from smoothadv.errors import UserError
from smoothadv.evaluation import Part, Tally, check_logged_examples, evaluate_examples
from smoothadv.records import ExampleLog, shard_folder
from smoothadv.shards import Shard, merge, shard_count, shards_of
from smoothadv.voting import Poll
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
    work = _Work(options, job, columns, settings)
    _refuse_other_way(options, job)
    indices = job.indices if options.shard is None else options.shard.of(job.indices)
    workers = job.workers
    tally = Tally(
        description,
        len(indices),
        title,
        scores,
        report=workers.report if workers else None,
        quiet=workers is not None and workers.rank > 0,
    )
    if options.compile and (workers is None or workers.rank == 0):
        print("compiling the classifier first, which may take a minute", file=sys.stderr)
    evaluate_examples(job.dataset, work.parts(), job.counter(), poll, tally)
    if workers is None:
        return options.shard is None
    workers.wait_for_all()
    if workers.rank == 0:
        anew = options.existing == "overwrite"
        if anew or not options.outfile.exists():
            merge(options.outfile, shards_of(options.outfile), overwrite=anew)
        shutil.rmtree(shard_folder(options.outfile), ignore_errors=True)
    return workers.rank == 0


class _Work:
    """The logs to be written and their examples, opened when they are reached."""

    def __init__(
        self, options: argparse.Namespace, job: SmoothingJob, columns: tuple[str, ...], settings: dict[str, Any]
    ) -> None:
        self.options, self.job, self.columns, self.settings = options, job, columns, settings

    def parts(self) -> Iterator[Part]:
        options, job = self.options, self.job
        if job.workers is not None:
            if options.existing != "overwrite" and options.outfile.exists():
                if job.workers.rank == 0:
                    yield self._part(options.outfile, job.indices, self.settings, "resume")
                return
            if options.existing == "overwrite" and not job.workers.restarted:
                self._remove_old_shards(job.workers)
            count = shard_count(len(job.indices))
            for index in job.workers.claims(count):
                yield self._shard(Shard(index, count))
        elif options.shard is not None:
            yield self._shard(options.shard)
        else:
            yield self._part(options.outfile, job.indices, self.settings, options.existing)

    def _remove_old_shards(self, workers: Workers) -> None:
        if workers.rank == 0:
            shutil.rmtree(shard_folder(self.options.outfile), ignore_errors=True)
        workers.agree("removed", 1)  # nobody begins before the first process has said so

    def _shard(self, shard: Shard) -> Part:
        settings = {**self.settings, "shard": shard.record(self.job.indices)}
        restarted = self.job.workers is not None and self.job.workers.restarted
        existing = "resume" if restarted else self.options.existing
        return self._part(shard.path(self.options.outfile), shard.of(self.job.indices), settings, existing)

    def _part(self, path: Path, indices: range, settings: dict[str, Any], existing: str) -> Part:
        log = ExampleLog(path, self.columns, settings, self.job.run, existing)
        check_logged_examples(log, indices)
        return Part(log, indices)


def _refuse_other_way(options: argparse.Namespace, job: SmoothingJob) -> None:
    """UserError where a log was begun in one process and is to be continued in shards, or the other way round."""
    shards = shards_of(options.outfile)
    if options.shard is None and job.workers is None and shards:
        raise UserError(
            f"{shard_folder(options.outfile)} holds {len(shards)} shards of this log: finish them as they were begun "
            f"and merge them, or remove that folder"
        )
    if options.shard is not None and options.outfile.exists() and options.existing != "overwrite":
        raise UserError(f"{options.outfile} exists already, without shards: name another log, or remove this one")


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
        "shards", metavar="SHARD", type=Path, nargs="*", help="shard logs (default: those in OUTFILE.shards)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUTFILE if it exists")
    return run(parser, _merge, arguments)


def _merge(options: argparse.Namespace) -> None:
    shards = options.shards or shards_of(options.outfile)
    rows = merge(options.outfile, shards, options.overwrite)
    print(f"{options.outfile}: {rows} examples from {len(shards)} shards, which can be removed now")
