"""Certification procedures without a classifier: votes from a list written beforehand."""

from bisect import bisect_left
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from smoothadv.statistics import Certificate, Draws, Procedure

CLASSES = 4


class ListedVotes:
    """Answers requests from a list of classes, one draw after the other, as a counter with early
    stop must.
    """

    def __init__(self, classes: np.ndarray) -> None:
        self.classes, self.used = classes, 0

    def answer(self, request: Draws) -> np.ndarray:
        votes = self.classes[self.used : self.used + request.count]
        assert len(votes) == request.count, "more draws were asked for than the list holds"
        if request.is_settled is not None:
            of_class = (votes[:, None] == np.arange(CLASSES)).cumsum(axis=0)  # [draws, K]
            # Once settled, a request stays settled.
            last = bisect_left(
                range(len(votes) - 1), True, key=lambda k: bool(request.is_settled(of_class[k]))
            )
            votes = votes[: last + 1]
        self.used += len(votes)
        return np.bincount(votes, minlength=CLASSES)


def more_misses(candidate: int, misses: int) -> Callable[[np.ndarray], bool]:
    """Whether more than ``misses`` votes went to other classes than ``candidate``."""
    return lambda counts: bool(counts.sum() - counts[candidate] > misses)


def outcome(voting: Generator, answer: Callable[[Draws], np.ndarray]) -> Any:
    """What a voting returns in the end when its requests get these answers."""
    request = next(voting)
    while True:
        try:
            request = voting.send(answer(request))
        except StopIteration as end:
            return end.value


def stated(
    procedure: Procedure, answer: Callable[[Draws], np.ndarray], label: int = 0
) -> Certificate:
    """What the procedure states when it gets these answers."""
    return outcome(procedure.run(label), answer)


def certify(procedure: Procedure, votes: ListedVotes, label: int = 2) -> Certificate:
    """What the procedure states when it gets these votes."""
    return stated(procedure, votes.answer, label)


def answered(
    procedure: Procedure,
    shares: list[list[float]],
    selection: list[list[float]] | None = None,
    asked: list[Draws] | None = None,
) -> Certificate:
    """The certificate where each request is answered in these shares of votes, by classifier, and
    those of the ``selection`` in others. The requests are added to ``asked``.
    """
    requests = [] if asked is None else asked

    def answer(request: Draws) -> np.ndarray:
        requests.append(request)
        selects = request.count == procedure.smoothing.n0
        given = selection if selects and selection is not None else shares
        votes = np.round(np.array(given[request.stage]) * request.count).astype(int)
        votes[0] += request.count - votes.sum()
        return votes

    return stated(procedure, answer)


def listed(p: float, draws: int, generator: np.random.Generator) -> np.ndarray:
    """Classes of ``draws`` draws, class 2 with probability ``p``, the others equally often."""
    return np.where(generator.random(draws) < p, 2, generator.choice([0, 1, 3], draws))
