"""What an ensemble gains over its members, and what consensus saves, on checkpoints of digits and
the same noise.

    python benchmarks/ensembles.py --sigma 0.25 A.pth.tar B.pth.tar C.pth.tar --N 1000 --skip 2

Saving: passes of members with consensus, by the images in them, as a share of all members on all
images. The ratio of times, of this process on one thread, is the median over rounds in which the
ways alternate. The votes are compared draw by draw. Then each member and both ensembles certify the
same images.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import smoothadv
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.noise import GaussianNoise
from smoothadv.voting.classifier import VotingClassifier, optimized_for_inference

RADII = (0.0, 0.25, 0.5, 0.75)


def ensemble_file(folder: Path, checkpoints: list[Path], mean: str) -> Path:
    """A TOML file that names the ensemble."""
    path = folder / f"{mean}.toml"
    members = ", ".join(f'"{checkpoint.resolve()}"' for checkpoint in checkpoints)
    path.write_text(f'members = [{members}]\nmean = "{mean}"\n')
    return path


def counted_rows(voter: VotingClassifier) -> list[int]:
    """A list that gets the number of images of each pass of a member."""
    rows: list[int] = []
    assert isinstance(voter.classifier, Ensemble)
    for member in voter.classifier.members:
        member.register_forward_hook(lambda module, images, logits: rows.append(len(logits)))
    return rows


def saving(path: Path, sigma: float, batch: int, images: int, rounds: int) -> str:
    """The saving of consensus at this batch, as a line for people."""
    dataset, members = get_dataset("digits", "test"), load_classifier(path, "digits")
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


def certified(name: str, model: Path, options: argparse.Namespace) -> str:
    """A row of the table: average certified radius and certified accuracy in percent at RADII."""
    rows = smoothadv.certify(
        model,
        "digits",
        sigma=options.sigma,
        n=options.N,
        skip=options.skip,
        device="cpu",
        seed=options.seed,
    )
    radii = (rows.correct * rows.radius).mean()
    shares = [100 * (rows.correct * (rows.radius >= radius)).mean() for radius in RADII]
    abstained = 100 * (rows.predict == -1).mean()
    return " | ".join(
        [name, f"{radii:.3f}", *(f"{share:.1f}" for share in shares), f"{abstained:.1f}"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument(
        "--N", type=int, default=1000, help="draws of the certificates; 0: only the saving"
    )
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=40, help="images of the comparison of times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 128, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        by_mean = {
            mean: ensemble_file(Path(folder), options.checkpoints, mean)
            for mean in ("logits", "probabilities")
        }
        for batch in options.batches:
            line = saving(
                by_mean["probabilities"], options.sigma, batch, options.images, options.rounds
            )
            print(line, flush=True)
        if not options.N:
            return
        print("model | ACR | " + " | ".join(f"at {radius:g}" for radius in RADII) + " | abstains")
        for number, checkpoint in enumerate(options.checkpoints, start=1):
            print(certified(f"member {number}", checkpoint, options), flush=True)
        for mean, path in by_mean.items():
            print(certified(f"mean of {mean}", path, options), flush=True)


if __name__ == "__main__":
    main()
