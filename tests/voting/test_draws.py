"""Every draw is handed out once: over all requests of every procedure, in all batches, up to
100,000 draws at a time.

The noise here writes down what it is asked for, and each noisy image shows the number of its draw.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smoothadv.noise import Noise, Purpose
from smoothadv.statistics import PROCEDURES, Draws, Smoothing
from smoothadv.voting.counter import Poll, VoteCounter
from support.votes import CLASSES, ListedVotes

MOST = 100_000
CPU = torch.device("cpu")
IMAGE = torch.zeros(1, 1, 2)
some = settings(max_examples=10)
counts = (
    st.integers(1, MOST)
    | st.integers(1, 3)
    | st.sampled_from([499, 500, 501, 2**16 - 1, 2**16, 2**16 + 1, MOST])
)


@dataclass(frozen=True)
class NumberedNoise(Noise):
    """A noisy image shows the number of its draw and its example, exactly; ``filled`` lists all
    that was asked for.
    """

    filled: list[tuple[int, int, int, int]] = field(default_factory=list)

    def distance(self, dimension: int) -> float:
        return 0.0

    def check_image(self, image: torch.Tensor, name: str = "") -> None:
        pass

    def _launch(self, kernels: ModuleType, out: torch.Tensor, plan: torch.Tensor) -> None:
        raise NotImplementedError

    def _fill_plainly(
        self, out: torch.Tensor, image: torch.Tensor, example: int, first: int, purpose: int
    ) -> None:
        self.filled.append((example, purpose, first, len(out)))
        out[:, 0, 0, 0] = torch.arange(first, first + len(out))
        out[:, 0, 0, 1] = example

    def handed_out(self, example: int, purpose: int = Purpose.VOTES) -> np.ndarray:
        """The numbers of all draws of a stream that were asked for."""
        ranges = [
            np.arange(first, first + count)
            for e, p, first, count in self.filled
            if (e, p) == (example, purpose)
        ]
        return np.concatenate(ranges)


def class_of(numbers: torch.Tensor, examples: torch.Tensor | int, rarity: int) -> torch.Tensor:
    """The class that each draw votes for: 0 or 1 for one draw in ``rarity``, else 2."""
    return torch.where((numbers * 7919 + examples) % rarity == 0, numbers // rarity % 2, 2)


def watched(voting: Generator, seen: list[tuple[Draws, np.ndarray]]) -> Generator:
    """The same voting; the requests and their answers are appended to ``seen``."""
    answer = None
    while True:
        try:
            request = voting.send(answer)
        except StopIteration:
            return
        answer = yield request
        seen.append((request, answer))


def check_votings(votings: list[Generator], rarity: int, batch: int) -> None:
    """Count the votes of one poll for each voting, all by one counter.

    No draw may be asked for twice, and each answer holds the votes of the next draws of the poll's
    stream.
    """

    def classifier(images: torch.Tensor) -> torch.Tensor:
        number, of_example = images.long()[:, 0, 0].T
        return (class_of(number, of_example, rarity)[:, None] == torch.arange(CLASSES)).float()

    noise = NumberedNoise(0.25, 0)
    logs: list[list[tuple[Draws, np.ndarray]]] = [[] for _ in votings]
    polls = [
        Poll(IMAGE, (noise.stream(i, CPU),), watched(voting, logs[i]))
        for i, voting in enumerate(votings)
    ]
    assert len(list(VoteCounter([classifier], [CLASSES], batch, CPU).run(polls))) == len(votings)
    for i, log in enumerate(logs):
        times, first = np.bincount(noise.handed_out(i)), 0
        assert times.max() == 1, "a draw was handed out twice"
        for request, answer in log:
            numbers = torch.arange(first, first + request.count)
            assert (
                answer == ListedVotes(class_of(numbers, i, rarity).numpy()).answer(request)
            ).all()
            assert request.is_settled is not None or times[numbers.numpy()].all()
            first += request.count
        assert 0 < len(times) <= first


@some
@given(st.lists(counts, min_size=1, max_size=6))
def test_draws_of_a_stream_are_all_numbers_once(requests):
    stream = NumberedNoise(0.25, 0).stream(3, CPU, Purpose.EVALUATION)
    shown = torch.cat([stream.noisy(count, IMAGE)[:, 0, 0, 0] for count in requests])
    assert torch.equal(shown.long(), torch.arange(sum(requests)))
    assert (stream.noise.handed_out(3, Purpose.EVALUATION) == np.arange(sum(requests))).all()


FEW = {"radii": (0.0,)}  # tables of few rows are built fast
SETTINGS = {"adaptive": FEW, "sequential": FEW, "sequential-cascade": FEW}


# Routers ask two classifiers, each of which has a stream of its own.
@pytest.mark.parametrize("name", [name for name in PROCEDURES if "router" not in name])
@some
@given(
    st.lists(st.tuples(counts, st.sampled_from([10, 2_000])), min_size=1, max_size=2),
    st.integers(2, 2_000),
    st.integers(9_000, 60_000),
)
@example([(501, 5 * MOST)], 2, 50_000)  # looks that are up to 114,800 draws apart
def test_every_procedure_uses_every_draw_once(name, sizes, rarity, batch):
    kind, own = PROCEDURES[name], SETTINGS.get(name, {})
    most = 1_500 if "sequential" in name else 5 * MOST  # the votes are as those of adaptive
    check_votings(
        [kind(Smoothing(0.25, n0, min(n, most), 1e-3), **own).run(2) for n0, n in sizes],
        rarity,
        batch,
    )
