"""The resumable loop over test examples that certification, prediction and attacks share."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from tqdm import tqdm

from smoothadv.attacks import SmoothedAttack
from smoothadv.datasets.images import ImageDataset
from smoothadv.errors import shown
from smoothadv.evaluation.saved_examples import Spool
from smoothadv.records import ExampleLog
from smoothadv.smoothing.voting import Poll, Result, VoteCounter


def select_examples(size: int, skip: int, maximum: int | None) -> range:
    """Every ``skip``-th index of a dataset of ``size`` images, at most ``maximum`` of them (None: all)."""
    indices = range(0, size, skip)
    return indices if maximum is None else indices[:maximum]


@dataclass(frozen=True)
class Part:
    """A log and the indices of its examples; a spool where the images of the polls are saved as well."""

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


class ProgressBar:
    """The progress bar: examples done of ``total``, a share ``title`` of them, draws per second.

    ``scores`` decides whether a row counts for the share. ``report`` gets the number of examples that this process has
    finished since its last call, and returns the number that all processes have finished. Nothing is shown if
    ``quiet`` or if standard error is no terminal.
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
        self._bar = tqdm(total=total, desc=shown(description, 80), unit="example", disable=True if quiet else None)
        self._title, self._scores, self._report = title, scores, report
        self._done_here = self._hits = self._draws = self._skipped = 0

    def skip(self, done: int) -> None:
        """Count ``done`` examples that an earlier run finished."""
        self._skipped += done
        self._advance(done)

    def add(self, row: dict[str, Any]) -> None:
        self._done_here += 1
        self._hits += self._scores(row)
        self._advance(1)

    def batch(self, draws: int) -> None:
        self._draws += draws
        elapsed = self._bar.format_dict["elapsed"]
        share = f"{self._title} {self._hits / self._done_here:.1%}, " if self._done_here else ""
        self._bar.set_postfix_str(f"{share}{self._draws / max(elapsed, 1e-9):,.0f} draws/s", refresh=False)
        self._bar.update(0)

    def _advance(self, examples: int) -> None:
        done = self._report(examples) if self._report else self._skipped + self._done_here
        if examples and self._done_here == 0:
            # The rows of earlier runs must not count in the estimate of the remaining time.
            self._bar.initial = done
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def evaluate_examples(
    dataset: ImageDataset,
    parts: Iterable[Part],
    counter: VoteCounter,
    make_polls: Callable[[list[Example]], Iterable[Poll]],
    bar: ProgressBar,
    group: int = 1,
    attack: SmoothedAttack | None = None,
) -> None:
    """Append the missing rows to the log of each part, in the order of the part's indices.

    ``make_polls`` makes one poll for each of up to ``group`` examples. The outcome of a poll is a dict with the columns
    of the row, except idx, label, correct and time, which this function adds: ``correct`` is 1 where ``predict`` equals
    the label, ``time`` is this example's share of the wall-clock time as H:MM:SS.ffffff. The draws of several images,
    also of different parts, share a batch; the next part is opened when a batch has room for its draws. Each row is on
    the disk before the next is written. ``attack`` may have to halve its batch too.
    """
    open_parts: list[Part] = []

    def polls() -> Iterator[Poll]:
        lacking = _lacking(dataset, parts, open_parts, bar)
        while waiting := list(itertools.islice(lacking, group)):
            for (part, example), poll in zip(waiting, make_polls([example for _, example in waiting])):
                yield replace(poll, tag=(part, example, poll.image))

    def amend(**run: int) -> None:
        for part in open_parts:
            part.log.amend(run)

    counter.on_batch = bar.batch
    counter.on_smaller_batch = lambda batch: amend(batch=batch)
    if attack is not None:
        attack.on_smaller_batch = lambda batch: amend(attack_batch=batch)
    try:
        for result in counter.run(polls()):
            while open_parts[0] is not result.tag[0]:
                open_parts.pop(0).close()
            bar.add(_append(result))
    finally:
        for part in open_parts:
            part.close()
        bar.close()


def _lacking(
    dataset: ImageDataset, parts: Iterable[Part], open_parts: list[Part], bar: ProgressBar
) -> Iterator[tuple[Part, Example]]:
    """The examples without a row in the logs; a part is added to ``open_parts`` when the iteration reaches it."""
    for part in parts:
        open_parts.append(part)
        bar.skip(len(part.log.done))
        for index in part.indices:
            if index not in part.log.done:
                image, label = dataset[index]
                yield part, Example(index, image, label)


def _append(result: Result) -> dict[str, Any]:
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
        part.spool.append(example.index, example.image.numpy(), voted_on.cpu().numpy())
    part.log.append(row)
    return row
