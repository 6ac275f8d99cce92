"""Counting votes, written down a second time: one image and one draw after the other. And
classifiers to put to it.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from smoothadv.statistics import Draws
from smoothadv.voting.counter import Poll, VoteCounter
from support.votes import outcome

CLASSES = 4
_KNOWN: dict[tuple, int] = {}  # the class of a draw, by all that it depends on


class WholeNumbers(nn.Module):
    """A small convolutional network on black and white pixels with small whole weights: no sum is
    ever rounded.

    Its classes share the noisy copies of most images among themselves.
    """

    def __init__(self, channels: int = 1, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Flatten(2),
            nn.LazyLinear(3),
            nn.Flatten(),
        )
        self.last = nn.Linear(18, CLASSES)
        self.layers(torch.zeros(1, channels, 4, 4))  # settles the size of the lazy layer
        for parameter in self.parameters():
            parameter.data = torch.randint(-3, 4, parameter.shape, generator=generator).float()

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers((images > 0.5).float()))


def counter_of(
    classifiers: Callable | list[Callable], batch: int, depth: int = 1, **options
) -> VoteCounter:
    """``depth`` = 2 is how an accelerator is kept busy: the next batch starts before this one's
    votes are counted.
    """
    stages = classifiers if isinstance(classifiers, list) else [classifiers]
    counter = VoteCounter(stages, [CLASSES] * len(stages), batch, torch.device("cpu"), **options)
    counter._depth = depth
    return counter


def votes_one_by_one(
    classifiers: Sequence[Callable[[torch.Tensor], torch.Tensor]], poll: Poll, request: Draws
) -> np.ndarray:
    """The answer to a request."""
    stream, classifier = poll.streams[request.stage], classifiers[request.stage]
    counts, first = np.zeros(CLASSES, dtype=np.int64), stream.reserve(request.count)
    for draw in range(first, first + request.count):
        address = stream.noise, stream.example, stream.purpose, draw
        key = classifier, poll.image.numpy().tobytes(), *address
        if key not in _KNOWN:
            noisy = torch.empty(1, *poll.image.shape)
            stream.fill(noisy, poll.image, draw)
            _KNOWN[key] = int(classifier(noisy)[0].argmax())
        counts[_KNOWN[key]] += 1
        if request.is_settled is not None and request.is_settled(counts):
            break
    return counts


def outcome_one_by_one(classifiers: Sequence[Callable[[torch.Tensor], torch.Tensor]], poll: Poll):
    """What a poll's voting returns in the end."""
    return outcome(poll.voting, partial(votes_one_by_one, classifiers, poll))


def ask(requests: Iterable[Draws]):
    """A voting that makes these requests whatever the answers, and returns the answers."""
    answers = []
    for request in requests:
        answers.append((yield request).tolist())
    return answers


def on_stages(voting: Generator, stages: int, number: int) -> Generator:
    """The same voting, with each request at some stage of so many."""
    generator, answer = np.random.default_rng(number), None
    while True:
        try:
            request = voting.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield replace(request, stage=int(generator.integers(stages)))


def image_of(number: int) -> torch.Tensor:
    """[1, 4, 4], of 8 bits, grey: noise turns many of its pixels black or white."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(90, 166, (1, 4, 4), generator=generator).to(torch.float32) / 255
