"""Certification counts the same votes as a loop that is written as plainly as possible, in the
benchmarks.
"""

import numpy as np
import torch

from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.noise import GaussianNoise
from smoothadv.statistics import Draws
from smoothadv.voting.classifier import optimized_for_inference
from smoothadv.voting.counter import Poll, VoteCounter
from support.plain import plain_module

SIGMA, DRAWS, IMAGES, CLASSES = 0.25, 500, 12, 10
plain = plain_module("plain_certification")


def ours(voter: torch.nn.Module, images: list[torch.Tensor], seed: int) -> np.ndarray:
    """Counts of all images [images, classes], packed into batches of 70."""

    def voting():
        return (yield Draws(DRAWS))

    noise = GaussianNoise(SIGMA, seed)
    polls = [
        Poll(image, (noise.stream(index, "cpu"),), voting()) for index, image in enumerate(images)
    ]
    return np.stack(
        [
            result.outcome
            for result in VoteCounter([voter], [CLASSES], 70, torch.device("cpu")).run(polls)
        ]
    )


def different_votes(first: np.ndarray, second: np.ndarray) -> int:
    return int(np.abs(first - second).sum()) // 2


def test_counts_are_those_of_a_plain_loop(checkpoint):
    classifier = load_classifier(checkpoint, "digits")
    dataset = get_dataset("digits", "test")
    images = [dataset[index][0] for index in range(IMAGES)]
    noise = GaussianNoise(SIGMA, 0)

    def draws_of(index: int):
        stream = noise.stream(index, "cpu")
        return lambda batch: stream.draw(len(batch), batch[0])

    expected = np.stack(
        [
            plain.count_votes(classifier, image, DRAWS, 64, CLASSES, draws_of(index))
            for index, image in enumerate(images)
        ]
    )
    # Other batches, and folding, round the logits differently: of 6,000 votes one falls the other
    # way, where two logits are equal to the last digits, with a probability of about 1 %.
    for voter in (classifier, optimized_for_inference(classifier, torch.device("cpu"))):
        assert different_votes(ours(voter, images, seed=0), expected) <= 2
    assert different_votes(ours(classifier, images, seed=1), expected) > 50, (
        "other draws would be noticed"
    )
