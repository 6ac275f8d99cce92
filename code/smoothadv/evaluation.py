"""The resumable loop over test examples that certification, prediction and attacks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from tqdm import tqdm

from smoothadv.datasets.images import ImageDataset
from smoothadv.errors import UserError
from smoothadv.records import ExampleLog
from smoothadv.voting import Poll, Result, VoteCounter


def select_examples(size: int, skip: int, maximum: int | None) -> range:
    """Every ``skip``-th index of a dataset of ``size`` images, at most ``maximum`` of them (None: all)."""
    indices = range(0, size, skip)
    return indices if maximum is None else indices[:maximum]


@dataclass(frozen=True)
class Part:
    """Examples and the log that gets their rows."""

    log: ExampleLog
    indices: range


@dataclass(frozen=True)
class _Tag:
    log: ExampleLog
    index: int
    label: int


class Tally:
    """The progress bar: examples done of ``total``, a share ``title`` of them, draws per second.

    ``scores`` says of a row whether it counts; ``report`` is told how many examples were done and says how many
    all processes have done. Nothing is shown where ``quiet`` or where standard error is no terminal.
    """

    def __init__(
        self,
        description: str,
        total: int,
        title: str,
        scores: Callable[[dict[str, Any]], bool],
        report: Callable[[int], int] | None = None,
        quiet: bool = False,
    ) -> None:
        self._bar = tqdm(total=total, desc=description, unit="example", disable=True if quiet else None)
        self._title, self._scores, self._report = title, scores, report
        self._own = self._hits = self._draws = self._skipped = 0

    def skip(self, done: int) -> None:
        """Examples that an earlier run left."""
        self._skipped += done
        self._advance(done)

    def add(self, row: dict[str, Any]) -> None:
        self._own += 1
        self._hits += self._scores(row)
        self._advance(1)

    def batch(self, draws: int) -> None:
        self._draws += draws
        elapsed = self._bar.format_dict["elapsed"]
        share = f"{self._title} {self._hits / self._own:.1%}, " if self._own else ""
        self._bar.set_postfix_str(f"{share}{self._draws / max(elapsed, 1e-9):,.0f} draws/s", refresh=False)
        self._bar.update(0)

    def _advance(self, examples: int) -> None:
        done = self._report(examples) if self._report else self._skipped + self._own
        if examples and self._own == 0:
            # What was there before says nothing about how fast the rest will go.
            self._bar.initial = done
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def evaluate_examples(
    dataset: ImageDataset,
    parts: Iterable[Part],
    counter: VoteCounter,
    poll: Callable[[int, torch.Tensor, int], Poll],
    tally: Tally,
) -> None:
    """Append a row to the log of each part for every index that it lacks, in the order of the indices.

    ``poll(index, image [C, H, W], label)`` puts an image to the vote; what its voting returns are the row's columns
    but for idx, label, correct and time, which are the same for everyone: ``correct`` is 1 where ``predict`` equals
    the label, ``time`` this example's share of the wall-clock time as H:MM:SS.ffffff. Images are packed into
    batches together, also those of different parts, which are asked for when there is room. Each row is on the disk
    before the next is written.
    """
    logs: list[ExampleLog] = []

    def polls() -> Iterator[Poll]:
        for part in parts:
            logs.append(part.log)
            tally.skip(len(part.log.done))
            for index in part.indices:
                if index not in part.log.done:
                    image, label = dataset[index]
                    yield replace(poll(index, image, label), tag=_Tag(part.log, index, label))

    counter.on_batch = tally.batch
    counter.on_smaller_batch = lambda batch: [log.amend({"batch": batch}) for log in logs]
    try:
        for result in counter.run(polls()):
            while logs[0] is not result.tag.log:
                logs.pop(0).close()
            tally.add(_append(result))
    finally:
        for log in logs:
            log.close()
        tally.close()


def _append(result: Result) -> dict[str, Any]:
    tag, columns = result.tag, result.outcome
    row = {
        "idx": tag.index,
        "label": tag.label,
        "correct": int(columns["predict"] == tag.label),
        "time": timedelta(seconds=result.seconds),
        **columns,
    }
    tag.log.append(row)
    return row


def check_logged_examples(log: ExampleLog, indices: range) -> None:
    """UserError if a resumed log holds examples that the present --skip and --max do not select."""
    foreign = log.done.difference(indices)
    if foreign:
        raise UserError(
            f"cannot resume {log.path}: it holds example {min(foreign)}, which this --skip and --max leave out"
        )
