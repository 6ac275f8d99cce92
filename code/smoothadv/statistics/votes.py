"""Certificates of any randomized classifier, from votes that the caller draws: of text, graphs,
policies or models in other frameworks.

The guarantee is that of the procedure (docs/guarantee.md). It needs votes of fresh, independent
draws from one distribution. What a radius means is decided by the noise: with Gaussian noise it is
Cohen et al.'s l2 radius; else only the bound on the class's probability is meant.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, TypeVar

import numpy as np

from smoothadv.statistics import Certificate, Draws, Procedure
from smoothadv.statistics.prediction import predict

Answer = TypeVar("Answer")
Asking = Generator[int, Any, Answer]
"""Yields how many votes it needs, receives their counts [K], and returns the answer."""
NO_LABEL = -1


def certify_votes(
    draw: Callable[[int], Any],
    procedure: Procedure,
    *,
    label: int = NO_LABEL,
    batch: int | None = None,
) -> Certificate:
    """The certificate of one input by a procedure, such as ``PROCEDURES["exact"](Smoothing(...))``.

    ``draw(count)`` returns the votes of ``count`` >= 1 fresh draws: how many of them are of each of
    the K >= 2 classes, whole numbers [K]. It is asked for at most ``batch`` >= 1 draws at a time;
    counting stops after a batch with which an abstention is certain. Class and radius are those
    that the package finds of the same votes; only the counts of an abstention depend on the batch.
    ``label`` is the true class, where the procedure reads it. ValueError on counts that are none.
    """
    return _answered(_asking(procedure.votes(label), batch), draw)


def predict_votes(
    draw: Callable[[int], Any],
    n: int,
    alpha: float,
    *,
    top_k: int = 1,
    batch: int | None = None,
) -> list[int]:
    """The ``top_k`` most probable classes of one input by ``n`` votes, none if abstaining: see
    ``prediction.predict``, and ``certify_votes`` for ``draw`` and ``batch``.
    """
    return _answered(_asking(predict(n, alpha, top_k), batch), draw)


async def certify_inputs(
    draw: Callable[[list[tuple[int, int]]], Awaitable[Sequence[Any]]],
    inputs: int,
    procedure: Procedure,
    *,
    labels: Sequence[int] | None = None,
    batch: int = 1000,
    in_flight: int = 2,
) -> list[Certificate]:
    """The certificates of ``inputs`` inputs, of draws that are packed into batches.

    ``await draw([(input, count), ...])`` returns the votes [K] of ``count`` fresh draws for each of
    the inputs, which are numbered from 0; together at most ``batch`` draws. At most ``in_flight``
    batches are awaited at a time, each input in one of them. Otherwise as ``certify_votes``.
    """
    import asyncio  # which takes a third of the time to import this package

    for name, value in (("batch", batch), ("in_flight", in_flight)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    found: dict[int, Certificate] = {}
    asking: dict[int, Asking[Certificate]] = {}
    ready: deque[tuple[int, int]] = deque()
    waiting: set[asyncio.Task[list[tuple[int, Any]]]] = set()
    coming = iter(range(inputs))

    def proceed(index: int, votes: Any) -> None:
        try:
            ready.append((index, asking[index].send(votes)))
        except StopIteration as end:
            found[index] = end.value
            del asking[index]

    def packed() -> list[tuple[int, int]]:
        """Requests of at most ``batch`` draws; begins further inputs where there is room."""
        requests: list[tuple[int, int]] = []
        room = batch
        while room > 0:
            if not ready:
                if (index := next(coming, None)) is None:
                    break
                label = NO_LABEL if labels is None else int(labels[index])
                asking[index] = _asking(procedure.votes(label), batch)
                proceed(index, None)
                continue
            if ready[0][1] > room:
                break
            requests.append(ready.popleft())
            room -= requests[-1][1]
        return requests

    async def answered(requests: list[tuple[int, int]]) -> list[tuple[int, Any]]:
        votes = list(await draw(requests))
        if len(votes) != len(requests):
            raise ValueError(f"draw was asked for {len(requests)} inputs and returned {len(votes)}")
        return [(index, some) for (index, _), some in zip(requests, votes)]

    try:
        while True:
            while len(waiting) < in_flight and (requests := packed()):
                waiting.add(asyncio.create_task(answered(requests)))
            if not waiting:
                return [found[index] for index in range(inputs)]
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                for index, votes in task.result():
                    proceed(index, votes)
    finally:
        for task in waiting:
            task.cancel()


def _answered(asking: Asking[Answer], draw: Callable[[int], Any]) -> Answer:
    votes = None
    while True:
        try:
            votes = draw(asking.send(votes))
        except StopIteration as end:
            return end.value


def _asking(voting: Generator[Draws, np.ndarray, Answer], batch: int | None) -> Asking[Answer]:
    """What a procedure asks for, in batches, and its answer."""
    if batch is not None and batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    classes, request = 0, next(voting)
    while True:
        if request.stage:
            raise ValueError("the procedure is of several classifiers, and draw of one")
        counts = np.zeros(classes, np.int64)
        missing = request.count
        while missing > 0:
            asked = min(missing, batch or missing)
            votes = _checked((yield asked), asked, classes)
            classes = len(votes)
            counts = votes if not len(counts) else counts + votes
            missing -= asked
            if request.is_settled is not None and request.is_settled(counts):
                break
        try:
            request = voting.send(counts)
        except StopIteration as end:
            return end.value


def _checked(votes: Any, asked: int, classes: int) -> np.ndarray:
    """Votes as int64 [K]; ValueError unless they are those of so many draws, for as many classes as
    before.
    """
    counts = np.asarray(votes)
    if counts.ndim != 1 or len(counts) < 2 or (classes and len(counts) != classes):
        expected = f"[{classes}], as before" if classes else "[K], with K of at least 2"
        raise ValueError(
            f"draw({asked}) returned counts of shape {list(counts.shape)}: expected {expected}"
        )
    for value in counts.tolist():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= asked and value == int(value)):
            raise ValueError(
                f"draw({asked}) returned {value!r}: expected whole numbers from 0 to {asked}"
            )
    whole = counts.astype(np.int64)
    if (total := int(whole.sum())) != asked:
        raise ValueError(f"draw({asked}) returned {total} votes: expected {asked}")
    return whole
