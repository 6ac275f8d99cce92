"""Accuracy of a smoothed classifier of digits under the attacks of several libraries, at the same
budget, steps and noise draws.

    python benchmarks/attack_libraries.py models/quickstart/smoothadv/checkpoint.pth.tar

The libraries attack ``SmoothedModule``, ours ``SmoothedAttack``: projected gradient descent in l2,
with steps of 2 epsilon / STEPS; AutoAttack chooses its own. All images are judged alike: by
PREDICT, with fresh draws. It has to return the label: an abstention counts as wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from art.attacks.evasion import ProjectedGradientDescent
from art.estimators.classification import PyTorchClassifier
from foolbox import PyTorchModel
from foolbox.attacks import L2ProjectedGradientDescentAttack
from pyautoattack import AutoAttack
from torchattacks import PGDL2
from tqdm import tqdm

from smoothadv import Smooth, SmoothedModule
from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.statistics.bounds import binomial_interval

SIGMA, DRAWS, STEPS, JUDGING = 0.25, 32, 20, 10_000
EPSILONS = (0.25, 0.5, 0.75)
Attack = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, float], torch.Tensor]


def smoothed(model: torch.nn.Module, fresh: bool = False) -> SmoothedModule:
    return SmoothedModule(model, SIGMA, DRAWS, seed=1, fresh=fresh).eval()


def nothing(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epsilon: float
) -> torch.Tensor:
    return images


def by_foolbox(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epsilon: float
) -> torch.Tensor:
    attacked = PyTorchModel(smoothed(model), bounds=(0, 1), device="cpu")
    attack = L2ProjectedGradientDescentAttack(rel_stepsize=2 / STEPS, steps=STEPS)
    return attack(attacked, images, labels, epsilons=epsilon)[1]


def by_torchattacks(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epsilon: float
) -> torch.Tensor:
    return PGDL2(smoothed(model), eps=epsilon, alpha=2 * epsilon / STEPS, steps=STEPS)(
        images, labels
    )


def by_art(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epsilon: float
) -> torch.Tensor:
    shape, loss = tuple(images.shape[1:]), torch.nn.CrossEntropyLoss()
    attacked = PyTorchClassifier(
        smoothed(model), loss, shape, 10, clip_values=(0, 1), device_type="cpu"
    )
    step = 2 * epsilon / STEPS
    attack = ProjectedGradientDescent(
        attacked, norm=2, eps=epsilon, eps_step=step, max_iter=STEPS, verbose=False
    )
    return torch.from_numpy(attack.generate(images.numpy(), labels.numpy()))


def by_autoattack(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epsilon: float
) -> torch.Tensor:
    attack = AutoAttack(smoothed(model, fresh=True), norm="L2", eps=epsilon, version="rand", seed=0)
    attack.apgd.n_iter, attack.apgd.eot_iter = STEPS, 5
    return attack.run_standard_evaluation(images, labels)[0]


def by_ours(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epsilon: float
) -> torch.Tensor:
    return SmoothedAttack(PGD(epsilon, STEPS), SIGMA, DRAWS, seed=1)(model, images, labels)


ATTACKS: dict[str, Attack] = {
    "none": nothing,
    "smoothadv, PGD": by_ours,
    "foolbox, L2ProjectedGradientDescentAttack": by_foolbox,
    "torchattacks, PGDL2": by_torchattacks,
    "ART, ProjectedGradientDescent": by_art,
    "AutoAttack, rand (5 draws of gradients per step)": by_autoattack,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--skip", type=int, default=2, help="take every K-th test image")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = load_classifier(arguments.checkpoint, "digits")
    dataset = get_dataset("digits", "test")
    chosen = range(0, len(dataset), arguments.skip)
    images = torch.stack([dataset[index][0] for index in chosen])
    labels = torch.tensor([dataset[index][1] for index in chosen])
    smooth = Smooth(model, 10, SIGMA)

    def accuracy(attack: Attack, epsilon: float) -> str:
        moved = attack(model, images, labels, epsilon).detach()
        assert float((moved - images).flatten(1).norm(dim=1).max()) <= epsilon * (1 + 1e-4)
        found = [smooth.predict(image, JUDGING, 0.001, 1000) for image in moved]
        right = sum(one == label for one, label in zip(found, labels.tolist()))
        low, high = binomial_interval(right, len(labels), 0.95)
        return f"{right / len(labels):.1%} ({100 * low:.1f}–{100 * high:.1f})"

    rows = [
        [name, *(accuracy(attack, e) for e in EPSILONS)] for name, attack in tqdm(ATTACKS.items())
    ]
    print(f"| attack | {' | '.join(f'epsilon {e:g}' for e in EPSILONS)} |")
    print("|---" * (1 + len(EPSILONS)) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
