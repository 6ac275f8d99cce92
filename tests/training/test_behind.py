"""Training behind a frozen denoiser is training its composition with the classifier, of which only
the classifier changes; and what else an update does to gradients.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from smoothadv.architectures.denoisers import Denoised
from smoothadv.attacks import ATTACKS
from smoothadv.base.distributed import Processes
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import InMemoryImages
from smoothadv.noise import Purpose
from smoothadv.objectives.ft_cadis import FTCADIS
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.training.execution import Execution
from smoothadv.training.update import Address, Update

CPU, SIGMA, RATE = torch.device("cpu"), 0.25, 0.1
IMAGES = torch.rand(6, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
OBJECTIVES = {
    "gaussian": Gaussian(SIGMA),
    "smoothadv": SmoothAdv(ATTACKS["PGD"](0.5, 2), SIGMA, 2, warmup=0),
    "ft-cadis": FTCADIS(SIGMA, num_noise_vec=3, noise_steps=2),
}


def networks() -> tuple[nn.Module, nn.Module]:
    """A denoiser, which would be another one in train mode, and a classifier."""
    torch.manual_seed(2)
    denoiser = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh())
    denoiser[1].running_var.fill_(0.5)
    classifier = nn.Sequential(nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(32, 3)))
    return denoiser.double().eval().requires_grad_(False), classifier.double()


def update_of(objective, denoiser, classifier, **more) -> Update:
    optimizer = torch.optim.SGD(classifier.parameters(), RATE)
    example = IMAGES[:2].to(next(classifier.parameters()).dtype)
    given = classifier, objective, optimizer, Execution(), Processes(), CPU, example
    return Update(*given, images_at_a_time=4, denoiser=denoiser, **more)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_is_the_training_of_the_composition(name):
    """By hand, one micro-batch after the other; ft-cadis moves what the denoiser leaves."""
    denoiser, classifier = networks()
    before, objective = copy.deepcopy(denoiser.state_dict()), OBJECTIVES[name]
    other, address = copy.deepcopy(classifier), Address(3, 20, 5)
    update = update_of(objective, denoiser, classifier)
    sums = update(IMAGES, LABELS, torch.arange(6), address)
    generator = address.generator(CPU, Purpose.OBJECTIVE)
    batch = objective.batch(IMAGES, LABELS, 20, generator, 6)
    composed, choices = Denoised(denoiser, other), address.generator(CPU, Purpose.ATTACK_CHOICES, 0)
    total = 0.0
    for part in (slice(0, 4), slice(4, 6)):
        one, seen = batch.part(part), composed
        if name == "ft-cadis":
            noisy = (one.images[:, None] + one.noise).flatten(0, 1)
            left = denoiser(noisy).unflatten(0, one.noise.shape[:2]) - one.images[:, None]
            one, seen = replace(one, noise=left), other
        loss = objective.loss(seen, one, objective.attacked(seen, one, choices)).loss
        (loss * len(one.images) / 6).backward()
        total += loss.item() * len(one.images) * objective.copies
    torch.optim.SGD(other.parameters(), RATE).step()
    for ours, theirs in zip(classifier.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert sums[0].item() == pytest.approx(total)
    alone = update_of(objective, None, networks()[1])
    assert alone(IMAGES, LABELS, torch.arange(6), address)[0].item() != pytest.approx(total)
    assert not denoiser.training and all(
        torch.equal(value, before[key]) for key, value in denoiser.state_dict().items()
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_evaluation_is_behind_the_denoiser(name):
    """Also that of an objective that is trained on what the denoiser leaves."""
    denoiser, classifier = (network.float() for network in networks())
    described = replace(describe_dataset("digits"), class_names=("a", "b", "c"))
    grey = (255 * IMAGES).to(torch.uint8)
    images = InMemoryImages(grey, LABELS, replace(described, image_shape=(2, 4, 4)))
    update = update_of(OBJECTIVES[name], denoiser, classifier)
    found = update.evaluate(images, torch.arange(6), 6, Address(3, 20, 5))
    with torch.no_grad():
        right = Denoised(denoiser, classifier)(grey / 255).argmax(1) == LABELS
    assert found["test_clean_accuracy"] == round(right.double().mean().item(), 6)


@pytest.mark.parametrize("most", [1e-3, 1e9])
def test_gradient_of_each_tensor_is_clipped_to_the_norm(most):
    """The weights change by that; a large norm changes nothing."""
    denoiser, classifier = networks()
    start = copy.deepcopy(classifier)
    plain = copy.deepcopy(classifier)
    update_of(OBJECTIVES["gaussian"], denoiser, plain)(
        IMAGES, LABELS, torch.arange(6), Address(3, 20, 5)
    )
    update = update_of(OBJECTIVES["gaussian"], denoiser, classifier, clip_gradients=most)
    update(IMAGES, LABELS, torch.arange(6), Address(3, 20, 5))
    for first, free, clipped in zip(
        start.parameters(), plain.parameters(), classifier.parameters(), strict=True
    ):
        step, wanted = (clipped - first) / RATE, (free - first) / RATE
        assert wanted.norm() > 1e-3, "a control"
        expected = wanted * min(1.0, most / (wanted.norm().item() + 1e-6))
        torch.testing.assert_close(step, expected, rtol=1e-6, atol=1e-12)
