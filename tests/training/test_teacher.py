"""How many votes of a teacher an image gets, and which: those of a slow count of one draw after the
other.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from smoothadv.base.distributed import Processes
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import InMemoryImages
from smoothadv.noise import GaussianNoise, Purpose
from smoothadv.training.teacher import NoisyVotes, Teacher, VotingTeacher, until_precise

CPU = torch.device("cpu")


def asked(draws: int, *answers: list[int]) -> tuple[list[int], list[int] | None]:
    """The requests until these answers, and the votes where they end."""
    voting = until_precise(draws)
    requests = [next(voting).count]
    try:
        for answer in answers:
            requests.append(voting.send(np.array(answer)).count)
    except StopIteration as end:
        return requests, end.value.tolist()
    return requests, None


@pytest.mark.parametrize(
    ("draws", "answers", "requests", "votes"),
    [
        (10_000, [[283, 0]], [283], [283, 0]),
        (10_000, [[200, 83]], [283, 8339 - 283], None),
        (10_000, [[280, 3], [400, 2]], [283, 685 - 283], [680, 5]),
        (10_000, [[140, 143], [5000, 4716]], [283, 9999 - 283], [5140, 4859]),
        (5, [[3, 2]], [5], [3, 2]),
    ],
)
def test_votes_asked_for_are_those_computed_by_hand(draws, answers, requests, votes):
    """sqrt(80000) = 282.8. With 200 of 283 votes the share is 202/287, and 40000 times 202/287 *
    85/287 is 8338.3; 280 give 684.9, and then 680 of 685 votes 395.6; 140 give 9998.9.
    """
    assert asked(draws, *answers) == (requests, votes)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95, 0.99, 0.999])
def test_shares_have_the_error_that_is_promised(share):
    """The root of the mean square of 2,000 errors, whose own error is below 2 %, is at most that of
    400 votes at a share of 1/2, and clear images need few votes.
    """
    draws, generator, errors, counts = 400, np.random.default_rng(0), [], []
    for _ in range(2000):
        voting, answer = until_precise(draws), None
        try:
            while True:
                count = voting.send(answer).count
                hits = generator.binomial(count, share)
                answer = np.array([hits, count - hits])
        except StopIteration as end:
            counts.append(end.value.sum())
            errors.append(end.value[0] / counts[-1] - share)
    assert math.sqrt(np.mean(np.square(errors))) <= 1.1 / (2 * math.sqrt(draws))
    needed = 4 * draws * share * (1 - share)
    assert max(counts) <= draws and needed < np.mean(counts) + 8 and np.mean(counts) < needed + 60


torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)
NETWORK[1].weight.mul_(torch.linspace(0.1, 3, 10)[:, None])
PIXELS = torch.randint(256, (12, 1, 8, 8), dtype=torch.uint8)


def images_of(pixels: torch.Tensor = PIXELS) -> InMemoryImages:
    return InMemoryImages(pixels, torch.arange(12) % 10, describe_dataset("digits"))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_votes_are_the_first_ones_of_a_slow_count(batch):
    """Whatever shares a batch."""
    images, draws, which = images_of(), 60, np.array([3, 11, 0, 5, 6, 8])
    noise = GaussianNoise(0.1, 5)
    counted = NoisyVotes(NETWORK, images, 0.1, CPU, batch, Processes())
    found = counted.count(which, 5, lambda label: until_precise(draws), (10,))
    counts = found.sum(1)
    for index, votes, count in zip(which.tolist(), found, counts.tolist()):
        stream = noise.stream(index, CPU, Purpose.TRAINING_VOTES)
        classes = [int(NETWORK(stream.noisy(1, images[index][0])).argmax()) for _ in range(count)]
        assert votes.tolist() == [classes.count(each) for each in range(10)]
        shares = (votes + 2) / (count + 4)
        assert count == draws or (4 * draws * shares * (1 - shares)).max() <= count
    assert 22 <= counts.min() < 30 and 50 < counts.max() <= 60


ASKED = {"sha256": "teacher", "images": images_of(), "noise_sd": 0.1, "draws": 60, "batch": 16}
OTHERS = {"sha256": "another", "images": images_of(PIXELS.flip(0)), "noise_sd": 0.2, "draws": 61}


def votes_of(sha256: str, images: InMemoryImages, noise_sd: float, draws: int, batch: int):
    votes = NoisyVotes(NETWORK, images, noise_sd, CPU, batch, Processes())
    return VotingTeacher(Teacher(NETWORK, sha256), votes, draws)


def shares_of(teacher: VotingTeacher) -> list[list[float]]:
    """Of three images, of which two are alike, in the middle of a batch."""
    return teacher.fields(torch.tensor([1, 3, 0, 3, 2]), slice(1, 4))["targets"].tolist()


def test_votes_in_the_cache_are_those_of_one_teacher_and_its_noisy_images(monkeypatch):
    """Another batch takes them over; nothing else that decides them may differ."""
    counts, count = [], NoisyVotes.count

    def counting(votes, indices, *how, **more):
        counts.append(indices.tolist())
        return count(votes, indices, *how, **more)

    monkeypatch.setattr(NoisyVotes, "count", counting)
    assert shares_of(votes_of(**ASKED)) == shares_of(teacher := votes_of(**ASKED))
    assert counts == [[0, 1, 2, 3]] * 2, "nothing was kept yet"
    teacher.keep()
    known = shares_of(teacher)
    assert known[0] == known[2] != known[1]
    assert [sum(shares) for shares in known] == pytest.approx([1, 1, 1])
    for same in (ASKED, {**ASKED, "batch": 7}):
        assert shares_of(votes_of(**same)) == known
    assert len(counts) == 2
    for name, value in OTHERS.items():
        shares_of(votes_of(**{**ASKED, name: value}))
    assert len(counts) == 2 + len(OTHERS)
