"""Votes of several classifiers: those of a slow counter, in the order of the polls."""

import numpy as np
import pytest
import torch

from smoothadv.noise import GaussianNoise
from smoothadv.statistics import Draws
from smoothadv.voting.counter import Poll
from smoothadv.voting.stages import StagedCounter, StagedPoll
from support.slow_votes import CLASSES, WholeNumbers, counter_of, image_of, votes_one_by_one

SIGMAS = (0.25, 0.5, 1.0)
CLASSIFIERS = [WholeNumbers(seed=seed) for seed in range(3)]


def requests_of(number: int) -> list[Draws]:
    """Those of one image: stages in several orders, twice the same one, nothing at all."""
    generator = np.random.default_rng(number)
    sizes = [Draws(int(generator.integers(1, 30)), stage=int(stage)) for stage in (0, 0, 1, 2, 1)]
    return sizes[: number % 6]


def ask(requests):
    answers = []
    for request in requests:
        answers.append((request.stage, (yield request).tolist()))
    return answers


def streams(number: int) -> tuple:
    return tuple(GaussianNoise(sigma, 7).stream(number, "cpu") for sigma in SIGMAS)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_outcomes_are_those_of_a_slow_counter_in_the_order_of_the_polls(batch):
    numbers = [number for number in range(150) if requests_of(number)]
    polls = (
        StagedPoll(image_of(number), streams(number), ask(requests_of(number)), number)
        for number in numbers
    )
    counter = StagedCounter([counter_of(each, batch) for each in CLASSIFIERS])
    results = list(counter.run(polls))
    assert [result.tag for result in results] == numbers and len(numbers) > 100
    for result in results[::10]:
        expected, own = [], streams(result.tag)
        for request in requests_of(result.tag):
            poll = Poll(image_of(result.tag), own[request.stage], ask([]))
            votes, _ = votes_one_by_one(CLASSIFIERS[request.stage], poll, request)
            expected.append((request.stage, votes.tolist()))
        assert result.outcome == expected and result.seconds > 0


def test_settled_requests_end_with_the_vote_that_decides():
    def settled(counts: np.ndarray) -> bool:
        return bool(counts.max() >= 5)

    def voting():
        first = yield Draws(100, settled, stage=1)
        second = yield Draws(10, stage=0)
        return int(first.max()), int(second.sum())

    counter = StagedCounter([counter_of(each, 64) for each in CLASSIFIERS])
    (result,) = counter.run([StagedPoll(image_of(1), streams(1), voting())])
    assert result.outcome == (5, 10)


def test_all_stages_go_on_with_the_smaller_batch_and_are_watched():
    def failing(images: torch.Tensor) -> torch.Tensor:
        if len(images) > 16:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return CLASSIFIERS[1](images)

    drawn, batches = [], []
    counter = StagedCounter([counter_of(CLASSIFIERS[0], 64), counter_of(failing, 64)])
    counter.watch(drawn.append, batches.append)
    requests = [Draws(20, stage=1), Draws(20, stage=0)]
    (result,) = counter.run([StagedPoll(image_of(1), streams(1)[:2], ask(requests))])
    assert [sum(votes) for _, votes in result.outcome] == [20, 20] and sum(drawn) == 40
    assert batches == [32, 16] and {each.batch for each in counter.counters} == {16}
    assert all(len(votes) == CLASSES for _, votes in result.outcome)
