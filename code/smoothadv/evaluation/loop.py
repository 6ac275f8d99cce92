"""The resumable loop over test examples that certification, prediction and attacks share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
from tqdm import tqdm

from smoothadv.datasets.images import ImageDataset
from smoothadv.errors import UserError
from smoothadv.evaluation.saved_examples import Spool
from smoothadv.records import ExampleLog
from smoothadv.smoothing.voting import Poll, Result, VoteCounter


def select_examples(size: int, skip: int, maximum: int | None) -> range:
    """Every ``skip``-th index of a dataset of ``size`` images, at most ``maximum`` of them (None: all)."""
    indices = range(0, size, skip)
    return indices if maximum is None else indices[:maximum]


@dataclass(frozen=True)
class Part:
    """Examples and the log that gets their rows; a spool where the images put to the vote are to be kept as well."""

    log: ExampleLog
    indices: Sequence[int]
    spool: Spool | None = None

    def close(self) -> None:
        self.log.close()
        if self.spool is not None:
            self.spool.close()


@dataclass(frozen=True)
class Example:
    """An image [C, H, W] of a dataset, its index there and its label."""

    index: int
    image: torch.Tensor
    label: int


@dataclass(frozen=True)
class _Tag:
    part: Part
    example: Example
    voted_on: torch.Tensor


class ProgressBar:
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
    ballots: Callable[[list[Example]], Iterable[Poll]],
    bar: ProgressBar,
    group: int = 1,
    attack_memory: HasBatch | None = None,
) -> None:
    """Append a row to the log of each part for every index that it lacks, in the order of the indices.

    ``ballots`` puts up to ``group`` examples to the vote, one poll each; what its voting returns are the row's columns
    but for idx, label, correct and time, which are the same for everyone: ``correct`` is 1 where ``predict`` equals
    the label, ``time`` this example's share of the wall-clock time as H:MM:SS.ffffff. Images are packed into
    batches together, also those of different parts, which are asked for when there is room. Each row is on the disk
    before the next is written. ``attack_memory`` is whatever else may have to go on with a smaller batch.
    """
    open_parts: list[Part] = []

    def polls() -> Iterator[Poll]:
        for waiting in _in_groups(_lacking(dataset, parts, open_parts, bar), group):
            for (part, example), poll in zip(waiting, ballots([example for _, example in waiting])):
                yield replace(poll, tag=_Tag(part, example, poll.image))

    def amend(**run: int) -> None:
        for part in open_parts:
            part.log.amend(run)

    counter.on_batch = bar.batch
    counter.on_smaller_batch = lambda batch: amend(batch=batch)
    if attack_memory is not None:
        attack_memory.on_smaller_batch = lambda batch: amend(attack_batch=batch)
    try:
        for result in counter.run(polls()):
            while open_parts[0] is not result.tag.part:
                open_parts.pop(0).close()
            bar.add(_append(result))
    finally:
        for part in open_parts:
            part.close()
        bar.close()


class HasBatch(Protocol):
    """What works in batches and halves them where memory runs out."""

    on_smaller_batch: Callable[[int], None]


def _lacking(
    dataset: ImageDataset, parts: Iterable[Part], open_parts: list[Part], bar: ProgressBar
) -> Iterator[tuple[Part, Example]]:
    """The examples that the parts' logs lack; a part is entered in ``open_parts`` when it is reached."""
    for part in parts:
        open_parts.append(part)
        bar.skip(len(part.log.done))
        for index in part.indices:
            if index not in part.log.done:
                image, label = dataset[index]
                yield part, Example(index, image, label)


def _in_groups(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := list(itertools.islice(items, size)):
        yield group


def _append(result: Result) -> dict[str, Any]:
    tag, columns = result.tag, result.outcome
    part, example = tag.part, tag.example
    row = {
        "idx": example.index,
        "label": example.label,
        "correct": int(columns["predict"] == example.label),
        "time": timedelta(seconds=result.seconds),
        **columns,
    }
    if part.spool is not None:
        # Before the row: an image without its row is made again, a row without its image would be a loss.
        part.spool.append(example.index, example.image.numpy(), tag.voted_on.cpu().numpy())
    part.log.append(row)
    return row


def check_logged_examples(log: ExampleLog, indices: Collection[int]) -> None:
    """UserError if a resumed log holds examples that the present options do not select."""
    foreign = log.done.difference(indices)
    if foreign:
        raise UserError(
            f"cannot resume {log.path}: it holds example {min(foreign)}, which the present options leave out"
        )
