"""What the loop over test examples is made of: which examples, the parts of a log, and the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from smoothadv.errors import shown
from smoothadv.evaluation.saved_examples import Spool
from smoothadv.evaluation.workers import Workers
from smoothadv.records import ExampleLog

Row = dict[str, Any]
"""The columns of an example in a log."""


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

    ``scores`` decides whether a row counts for the share. Of ``workers`` the first one shows the examples that all have
    done, the others show nothing; nor does it where standard error is no terminal.
    """

    def __init__(
        self, description: str, total: int, title: str, scores: Callable[[Row], bool], workers: Workers | None
    ) -> None:
        is_quiet = workers is not None and workers.rank > 0
        self._bar = tqdm(total=total, desc=shown(description, 80), unit="example", disable=True if is_quiet else None)
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
        self._bar.set_postfix_str(f"{share}{self._draws / max(elapsed, 1e-9):,.0f} draws/s", refresh=False)
        self._bar.update(0)

    def _advance(self, examples: int) -> None:
        done = self._workers.report(examples) if self._workers else self._skipped + self._done_here
        if examples and self._done_here == 0:
            # The rows of earlier runs must not count in the estimate of the remaining time.
            self._bar.initial = done
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()
