"""The resumable loop over test examples that certification, prediction and attacks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from tqdm import tqdm

from smoothadv.datasets.images import ImageDataset
from smoothadv.errors import UserError
from smoothadv.records import ExampleLog


def select_examples(size: int, skip: int, maximum: int | None) -> range:
    """Every ``skip``-th index of a dataset of ``size`` images, at most ``maximum`` of them (None: all)."""
    indices = range(0, size, skip)
    return indices if maximum is None else indices[:maximum]


def evaluate_examples(
    dataset: ImageDataset,
    indices: Iterable[int],
    evaluate: Callable[[int, torch.Tensor, int], dict[str, Any]],
    log: ExampleLog,
    description: str,
) -> None:
    """Append a row to ``log`` for each index that it lacks.

    ``evaluate(index, image [C, H, W], label)`` returns the row's columns but for idx, label, correct and
    time, which are the same for everyone: ``correct`` is 1 where ``predict`` equals the label, ``time`` the
    wall-clock time as H:MM:SS.ffffff. Each row is on the disk before the next example starts.
    """
    missing = [index for index in indices if index not in log.done]
    with tqdm(missing, description, unit="example", disable=None) as progress:
        correct = 0
        for number, index in enumerate(progress, start=1):
            start = time.perf_counter()
            image, label = dataset[index]
            row = evaluate(index, image, label)
            elapsed = timedelta(seconds=time.perf_counter() - start)
            hit = int(row["predict"] == label)
            log.append({"idx": index, "label": label, "correct": hit, "time": elapsed, **row})
            correct += hit
            progress.set_postfix_str(f"correct {correct / number:.1%}", refresh=False)


def check_logged_examples(log: ExampleLog, indices: range) -> None:
    """UserError if a resumed log holds examples that the present --skip and --max do not select."""
    foreign = log.done.difference(indices)
    if foreign:
        raise UserError(
            f"cannot resume {log.path}: it holds example {min(foreign)}, which this --skip and --max leave out"
        )
