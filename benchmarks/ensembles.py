"""What consensus saves in an ensemble of checkpoints of digits.

    python benchmarks/ensembles.py --sigma 0.25 A.pth.tar B.pth.tar C.pth.tar

Saving: passes of members with consensus, by the images in them, as a share of all members on all
images. The ratio of times, of this process on one thread, is the median over rounds in which the
ways alternate. The votes are compared draw by draw.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from smoothadv.architectures.ensemble import Ensemble
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.noise import GaussianNoise
from smoothadv.voting.classifier import VotingClassifier, optimized_for_inference


def counted_rows(voter: VotingClassifier) -> list[int]:
    """A list that gets the number of images of each pass of a member."""
    rows: list[int] = []
    assert isinstance(voter.classifier, Ensemble)
    for member in voter.classifier.members:
        member.register_forward_hook(lambda module, images, logits: rows.append(len(logits)))
    return rows


def saving(members: Ensemble, sigma: float, batch: int, images: int, rounds: int) -> str:
    """The saving of consensus at this batch, as a line for people."""
    dataset = get_dataset("digits", "test")
    voter = optimized_for_inference(members, torch.device("cpu"), dataset[0][0])
    noise = GaussianNoise(sigma, 0)
    batches = [
        noise.stream(index, "cpu").noisy(batch, dataset[index][0]) for index in range(images)
    ]
    batches = [noisy.to(memory_format=torch.channels_last) for noisy in batches]
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "consensus": voter.scores,
        "all members": partial(voter.scores, consensus=False),
        "whole batches": voter,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    votes = {}
    for _ in range(rounds):
        for way, compute in ways.items():
            start = time.process_time()
            with torch.inference_mode():
                votes[way] = [compute(noisy).argmax(1) for noisy in batches]
            times[way].append(time.process_time() - start)
    rows = counted_rows(voter)
    for noisy in batches:
        voter.scores(noisy)
    decisive, count = sum(rows), len(members.members)
    differ = sum(
        int((one != other).sum()) for one, other in zip(votes["consensus"], votes["all members"])
    )
    ratios = [
        statistics.median(one / other for one, other in zip(times["consensus"], times[way]))
        for way in ("all members", "whole batches")
    ]
    return (
        f"batch {batch}: {decisive / (count * batch * images):.3f} of the passes of {count} "
        f"members (at least {(count // 2 + 1) / count:.3f}), time ratio {ratios[0]:.3f} to all "
        f"members in equal passes, {ratios[1]:.3f} to all members in passes of whole batches "
        f"(medians of {rounds}), {differ} of {batch * images} votes differ"
    )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 128, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = [load_classifier(checkpoint, "digits") for checkpoint in options.checkpoints]
    members = Ensemble(loaded, "probabilities")
    for batch in options.batches:
        how = options.sigma, batch, options.images, options.rounds
        print(saving(members, *how), flush=True)


if __name__ == "__main__":
    main()
