"""Accuracy of a smoothed classifier of digits under PGD of foolbox, of torchattacks and of this
package.

    python benchmarks/attack_libraries.py models/quickstart/smoothadv/checkpoint.pth.tar

All take T = 20 steps of length 2 epsilon / T from the image, over m draws, on the same test images.
PREDICT judges each adversarial image by n fresh draws; an abstention is an error. The intervals are
Clopper-Pearson's, 95 %, over images. The last column judges by the m draws that were attacked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from foolbox import PyTorchModel
from foolbox.attacks import L2PGD
from torchattacks import PGDL2

import smoothadv
from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.statistics.bounds import binomial_interval

SIGMA, STEPS = 0.25, 20
EPSILONS = (0.25, 0.5, 0.75)
Attack = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def foolbox_attack(smoothed: smoothadv.SmoothedModule) -> Attack:
    """Images, labels and epsilon give adversarial images, by foolbox."""
    attack = L2PGD(rel_stepsize=2 / STEPS, steps=STEPS, random_start=False)
    bounded = PyTorchModel(smoothed, bounds=(0, 1))
    return lambda images, labels, epsilon: attack(bounded, images, labels, epsilons=epsilon)[1]


def torchattacks_attack(smoothed: smoothadv.SmoothedModule) -> Attack:
    """The same by torchattacks."""
    return lambda images, labels, epsilon: PGDL2(
        smoothed, epsilon, 2 * epsilon / STEPS, STEPS, random_start=False
    )(images, labels)


def main() -> None:
    """Parse, attack, print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--m", type=int, default=16)
    parser.add_argument("--n", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, count = load_classifier(options.checkpoint, "digits"), options.images
    loader = torch.utils.data.DataLoader(get_dataset("digits", "test"), batch_size=count)
    images, labels = next(iter(loader))
    fixed = smoothadv.SmoothedModule(model, SIGMA, options.m)
    fresh = smoothadv.SmoothedModule(model, SIGMA, options.m, fresh=True)
    own = SmoothedAttack(PGD(max(EPSILONS), STEPS), SIGMA, options.m)
    attacks: dict[str, tuple[Attack, smoothadv.SmoothedModule | None]] = {
        "foolbox, fixed draws": (foolbox_attack(fixed), fixed),
        "torchattacks, fixed draws": (torchattacks_attack(fixed), fixed),
        "foolbox, fresh draws": (foolbox_attack(fresh), None),
        "torchattacks, fresh draws": (torchattacks_attack(fresh), None),
        "`SmoothedAttack`": (
            lambda images, labels, epsilon: own(
                model, images, labels, epsilon=torch.full((len(images),), epsilon)
            ),
            None,
        ),
    }
    print("| attack |", *(f"{epsilon:.2f} |" for epsilon in EPSILONS), "0.50 by the m draws |")
    print("|---|" + "---:|" * (len(EPSILONS) + 1))
    for name, (attack, attacked) in attacks.items():
        cells, by_attacked = [], "-"
        for epsilon in EPSILONS:
            found = attack(images, labels, epsilon)
            norms = (found - images).flatten(1).norm(dim=1)
            assert norms.max() <= epsilon + 1e-5 and 0 <= found.min() and found.max() <= 1
            rows = smoothadv.predict(model, found, labels, sigma=SIGMA, n=options.n, alpha=0.001)
            right = int(rows.correct.sum())
            low, high = binomial_interval(right, count, 0.95)
            cells.append(f"{100 * right / count:.1f} ({100 * low:.1f}–{100 * high:.1f})")
            if attacked is not None and epsilon == 0.5:
                with torch.no_grad():
                    share = (attacked(found).argmax(1) == labels).double().mean()
                by_attacked = f"{100 * share:.1f}"
        print(f"| {name} |", *(f"{cell} |" for cell in [*cells, by_attacked]), flush=True)


if __name__ == "__main__":
    main()
