"""Counts votes of several classifiers for the same images: a request names the one that votes."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from smoothadv.noise import NoiseStream
from smoothadv.statistics import Draws
from smoothadv.voting.counter import Poll, Result, VoteCounter

_AT_ONCE = 64
"""So many images are open at a time: the draws that each wants of a stage share batches."""


@dataclass(frozen=True)
class StagedPoll:
    """As ``Poll``, with a stream for each stage."""

    image: torch.Tensor
    streams: tuple[NoiseStream, ...]
    voting: Generator[Draws, np.ndarray, Any]
    tag: Any = None


class _OpenPoll:
    """A poll, its current request, or its outcome."""

    def __init__(self, poll: StagedPoll) -> None:
        self.poll, self.seconds = poll, 0.0
        self.request: Draws | None = next(poll.voting)
        self.outcome: Any = None

    def at_stage(self, stage: int) -> Generator[Draws, np.ndarray, None]:
        """Its requests as long as they are for one stage."""
        while self.request is not None and self.request.stage == stage:
            votes = yield self.request
            try:
                self.request = self.poll.voting.send(votes)
            except StopIteration as end:
                self.request, self.outcome = None, end.value


class StagedCounter:
    """A ``VoteCounter`` for several classifiers: ``counters`` has that of each stage."""

    def __init__(self, counters: Sequence[VoteCounter]) -> None:
        self.counters = counters

    def watch(self, on_batch: Callable[[int], None], on_smaller: Callable[[int], None]) -> None:
        """As ``VoteCounter.watch``; all stages go on with the smaller batch."""

        def halved(batch: int) -> None:
            for counter in self.counters:
                counter.batch = min(batch, counter.batch)
            on_smaller(batch)

        for counter in self.counters:
            counter.watch(on_batch, halved)

    def run(self, polls: Iterable[StagedPoll]) -> Iterator[Result]:
        """The results of ``polls``, in their order."""
        waiting, open_polls = iter(polls), deque[_OpenPoll]()
        while True:
            while len(open_polls) < _AT_ONCE and (poll := next(waiting, None)) is not None:
                open_polls.append(_OpenPoll(poll))
            if not open_polls:
                return
            if (request := open_polls[0].request) is None:
                done = open_polls.popleft()
                yield Result(done.poll.tag, done.outcome, done.seconds)
                continue
            stage = request.stage
            here = [
                Poll(each.poll.image, each.poll.streams[stage], each.at_stage(stage), each)
                for each in open_polls
                if each.request is not None and each.request.stage == stage
            ]
            for result in self.counters[stage].run(here):
                result.tag.seconds += result.seconds
