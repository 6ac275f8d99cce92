"""The attacks of noise against a slow loop over copies, and against what they promise."""

import pytest
import torch
from torch import nn

from smoothadv.attacks.noise_attacks import from_targets, until_misclassified
from support.models import (
    ConstantClassifier,
    random_linear_classifier,
)

COPIES, CLASSES, STEPS, SIZE = 3, 3, 4, 0.6

DRAWN = torch.randn(6, 5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
X, NOISE = DRAWN[0].sigmoid(), 0.5 * DRAWN[1:4].transpose(0, 1) + 0.1


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Softplus(), nn.Flatten(), nn.Linear(16, CLASSES)
    ).double()


def ascent(model, image, noise, shares) -> tuple[torch.Tensor, torch.Tensor]:
    """The direction in which the cross-entropy with these shares grows; KL differs by their
    entropy, a constant.
    """
    noise = noise.clone().requires_grad_()
    logits = model((image + noise)[None])[0]
    (gradient,) = torch.autograd.grad(-(shares * logits.log_softmax(0)).sum(), noise)
    return gradient / gradient.norm(), logits.detach()


def slow_until_misclassified(model, image, label, noise, steps, size):
    norm = noise.norm()
    for _ in range(steps):
        direction, logits = ascent(model, image, noise, torch.eye(CLASSES)[label])
        further = noise + size * direction
        noise = further * norm / further.norm() if logits.argmax() == label else noise
    return noise


def slow_from_targets(model, image, target, noise, steps, size):
    start = noise
    for _ in range(steps):
        way = noise + 2 * size / steps * ascent(model, image, noise, target)[0] - start
        noise = start + way * min(1.0, size / way.norm().item())
        noise = (noise - noise.mean()) / noise.std(correction=0) * start.std(
            correction=0
        ) + start.mean()
    return noise


every_attack = pytest.mark.parametrize(
    ("attack", "slow", "goals"),
    [
        (until_misclassified, slow_until_misclassified, torch.tensor([0, 1, 2, 1, 0])),
        (
            from_targets,
            slow_from_targets,
            (2 * DRAWN[4].flatten(1)[:, :CLASSES]).softmax(1) * torch.tensor([1, 1, 0]),
        ),
    ],
    ids=["sphere", "targets"],
)


@every_attack
@pytest.mark.parametrize("size", [0.01, SIZE, 3.0])
def test_noise_is_that_of_a_loop_over_copies(attack, slow, goals, size, model):
    """It keeps its norm, and in the attack from targets also its mean; a size may be a tensor."""
    ours = attack(model, X, goals, NOISE, STEPS, size)
    slowly = [
        slow(model, x, goal, n, STEPS, size)
        for x, goal, draws in zip(X, goals, NOISE)
        for n in draws
    ]
    torch.testing.assert_close(ours.flatten(0, 1), torch.stack(slowly), rtol=1e-9, atol=1e-9)
    assert (attack(model, X, goals, NOISE, STEPS, size / 2) - ours).abs().max() > 0.05 * size, (
        "a control"
    )
    assert torch.equal(
        attack(model, X, goals, NOISE, STEPS, torch.tensor(size, dtype=torch.float64)), ours
    )
    torch.testing.assert_close(
        ours.flatten(2).norm(dim=2), NOISE.flatten(2).norm(dim=2), rtol=1e-12, atol=0
    )
    means = ours.flatten(2).mean(2) - NOISE.flatten(2).mean(2)
    assert (means.abs().max() < 1e-12) == (attack is from_targets)


def test_each_copy_stops_at_the_first_misclassified_noise(model):
    """From one number of steps to the next exactly the copies move that are still classified
    correctly.
    """
    right = model(X).argmax(1)
    path = [until_misclassified(model, X, right, NOISE, steps, SIZE) for steps in range(7)]
    wrong = [
        model((X[:, None] + n).flatten(0, 1)).argmax(1) != right.repeat_interleave(COPIES)
        for n in path
    ]
    assert torch.equal(path[0], NOISE) and wrong[0].sum() < wrong[-1].sum()
    for now, later, is_wrong in zip(path, path[1:], wrong):
        assert torch.equal((now == later).flatten(2).all(2).flatten(), is_wrong)


@every_attack
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_to_follow_and_nothing_to_move_give_no_nan(attack, slow, goals, dtype):
    images, noise, goals = (
        X.to(dtype),
        NOISE.to(dtype),
        goals if goals.dim() == 1 else goals.to(dtype),
    )
    still = attack(ConstantClassifier(1, CLASSES), images, goals, noise, STEPS, SIZE)
    torch.testing.assert_close(still, noise, rtol=1e-6, atol=1e-6)
    zero = attack(
        random_linear_classifier(16, CLASSES, seed=1).to(dtype),
        images,
        goals,
        0 * noise,
        STEPS,
        SIZE,
    )
    assert zero.abs().max() < 1e-20 and zero.dtype == dtype
    assert not attack(
        ConstantClassifier(1, CLASSES), images, goals, 0 * noise, STEPS, SIZE
    ).any(), "nan counts as any"
