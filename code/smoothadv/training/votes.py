"""Votes of a classifier on noisy copies of training images: for data policies, and of a frozen
teacher.
"""

from collections.abc import Callable, Generator, Iterator

import numpy as np
import torch

from smoothadv.base.distributed import Processes
from smoothadv.base.progress import Progress
from smoothadv.datasets import ImageDataset
from smoothadv.noise import GaussianNoise, Purpose
from smoothadv.statistics import Draws
from smoothadv.voting.counter import Poll, VoteCounter

_IMAGES_AT_A_TIME = 512


def count_votes(
    classifier: Callable[[torch.Tensor], torch.Tensor],
    images: ImageDataset,
    indices: np.ndarray,
    draws: int,
    noise: GaussianNoise,
    device: torch.device,
    batch: int,
    processes: Processes,
    doing: str,
    for_labels: bool = False,
    check: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """The votes int64 [n, K] of ``draws`` noisy copies of each of the images ``indices`` [n],
    without augmentation.

    ``for_labels`` returns those for the images' labels alone, [n, 1]. The noise of an image is a
    function of ``noise`` and its index. Processes share the images; ``batch`` is the number of
    noisy images in a pass of ``classifier``. ``check`` is called now and then, and may raise an
    exception.
    """
    classes = images.description.num_classes
    votes = torch.zeros(len(indices), 1 if for_labels else classes, dtype=torch.int64)
    own, part = processes.share(torch.from_numpy(indices))
    counter = VoteCounter(classifier, classes, min(batch, max(1, len(own) * draws)), device)

    def polls() -> Iterator[Poll]:
        parts = own.split(_IMAGES_AT_A_TIME)
        for some, (loaded, labels) in zip(parts, images.evaluation_batches(parts, device)):
            check()
            for index, image, label in zip(some.tolist(), loaded, labels.tolist()):
                chosen = slice(label, label + 1) if for_labels else slice(None)
                yield Poll(
                    image,
                    noise.stream(index, device, Purpose.TRAINING_VOTES),
                    _answer(draws, chosen),
                )

    shown = Progress(
        total=len(own), desc=doing, unit=" images", quiet=not processes.is_first, leave=False
    )
    with shown, torch.inference_mode():
        for place, result in enumerate(counter.run(polls()), start=part.start):
            votes[place] = torch.from_numpy(result.outcome)
            shown.update()
    return processes.total(votes).numpy()


def _answer(draws: int, chosen: slice) -> Generator[Draws, np.ndarray, np.ndarray]:
    """Ask for so many draws; the votes for the ``chosen`` classes."""
    return (yield Draws(draws))[chosen]
