"""DDN in batches returns what its pseudo-code does: compared in float64 with an implementation that
takes one example after the other, with no work saved and nothing of the package under test.

Rony et al., CVPR 2019, on the smoothed classifier (Salman et al., 2019): every iterate gets a pass
and a gradient, whether anything comes of them or not. An example that is adversarial at the start
is its own closest one.
"""

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from smoothadv.attacks.ddn import DDN
from support.models import Recorder, linear_classifier
from support.released import randomise_batch_norms
from support.slow_attacks import copy_probabilities, slow_plug_in


def majority(model: Callable, point: torch.Tensor, noise: torch.Tensor) -> int:
    """The class that most of the copies are given; the smallest of those that tie."""
    votes = Counter(copy_probabilities(model, point, noise).argmax(1).tolist())
    most = max(votes.values())
    return min(label for label, count in votes.items() if count == most)


def slow_ddn(
    model: Callable,
    x: torch.Tensor,
    label: int,
    noise: torch.Tensor,
    epsilon: float,
    steps: int,
    *,
    initial_norm: float = 1.0,
    gamma: float = 0.05,
    targeted: bool = False,
) -> torch.Tensor:
    """The adversarial example for one x [...] with noise [m, ...]."""
    v, norm = torch.zeros_like(x), initial_norm
    worst = torch.maximum(x, 1 - x).norm().item()
    best, best_norm = torch.zeros_like(x), worst
    for k in range(steps):
        obeyed = majority(model, x + v, noise) == label
        adversarial = obeyed if targeted else not obeyed
        if adversarial and v.norm().item() < best_norm:
            best, best_norm = v, v.norm().item()
        gradient = slow_plug_in(model, x + v, label, noise)
        step = 0.01 + 0.495 * (1 + math.cos(math.pi * k / max(1, steps - 1)))
        if gradient.norm() > 0:
            v = v + (-1 if targeted else 1) * step * gradient / gradient.norm()
        norm = min(norm * (1 - gamma if adversarial else 1 + gamma), worst)
        if v.norm() > 0:
            v = norm * v / v.norm()
        v = torch.clamp(x + v, 0, 1) - x
    if best.norm() > epsilon:
        best = best * (epsilon / best.norm())
    return x + best


SHAPE, CLASSES, KINDS = (1, 4, 4), 3, ("linear", "convolutional")
EPSILON, INITIAL_NORM = 0.25, 0.25


@functools.cache
def network(kind: str) -> nn.Module:
    """A random network in train mode, whose batch normalization has statistics of its own.

    No class is the most likely one over all images: else most of these would be too far from any
    other.
    """
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = [nn.Flatten(), nn.Linear(16, CLASSES)]
        if kind == "convolutional":
            first = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
            layers = [*first, nn.Conv2d(4, 4, 3), nn.ReLU(), *layers]
        made = nn.Sequential(*layers).double().eval()
        randomise_batch_norms(made)
    with torch.no_grad():
        made[-1].bias -= made(drawn(200, 1)[0]).mean(0)
    return made.train()


def drawn(examples: int, copies: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [B, 1, 4, 4] and their noise [B, m, 1, 4, 4]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(examples, *SHAPE, dtype=torch.float64, generator=generator)
    return x, 0.1 * torch.randn(examples, copies, *SHAPE, dtype=torch.float64, generator=generator)


def voted(model: nn.Module, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return torch.tensor([majority(model, *each) for each in zip(x, noise)])


def labels_such_that(adversarial: list[bool], votes: torch.Tensor, targeted: bool) -> torch.Tensor:
    """Labels that make the chosen examples adversarial at the start: another than voted or,
    targeted, the voted one.
    """
    another = (votes + 1) % CLASSES
    return torch.where(torch.tensor(adversarial) == targeted, votes, another)


STARTS = {
    "mixed": [True, False, False, True, False, False],
    "all": [True] * 3,
    "none": [False] * 4,
    "one, adversarial": [True],
    "one, not adversarial": [False],
}


def both(kind: str, start: str, copies: int, steps: int, seed: int = 0, **options):
    """What the package and the slow implementation return, and the images."""
    model = network(kind)
    x, noise = drawn(len(STARTS[start]), copies, seed)
    judge = copy.deepcopy(model).eval()  # the attack has to find the mode itself
    labels = labels_such_that(STARTS[start], voted(judge, x, noise), options.get("targeted", False))
    options = {"initial_norm": INITIAL_NORM, **options}
    quick = DDN(EPSILON, steps, **options)(model, x, labels, noise)
    assert model.training, "the attack gives the model its mode back"
    slow = [
        slow_ddn(judge, *example, EPSILON, steps, **options)
        for example in zip(x, labels.tolist(), noise)
    ]
    return quick, torch.stack(slow), x


# Of 32 combinations 24, among which any two of the values meet.
WAYS = list(itertools.product(KINDS, [False, True]))


@pytest.mark.parametrize(
    ("copies", "steps", "kind", "targeted"),
    [
        (copies, steps, *WAYS[(3 * number + shift) % len(WAYS)])
        for number, (copies, steps) in enumerate(itertools.product([1, 4], [1, 2, 4, 10]))
        for shift in range(3)
    ],
)
def test_result_is_that_of_the_pseudo_code(copies, steps, kind, targeted):
    for start in STARTS:
        quick, slow, x = both(kind, start, copies, steps, targeted=targeted)
        torch.testing.assert_close(
            quick, slow, rtol=0, atol=1e-10, msg=lambda text, start=start: f"{start}: {text}"
        )
        settled = torch.tensor(STARTS[start])
        assert torch.equal(quick[settled], x[settled])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        # Longer than the way to the farthest corner, which cuts it before the box does.
        {"initial_norm": 9.0},
        {"gamma": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [2, 4, 10])
def test_settings_mean_what_they_do_in_the_pseudo_code(kind, options, steps):
    for seed in range(3):
        quick, slow, _ = both(kind, "mixed", 4, steps, seed, **options)
        torch.testing.assert_close(quick, slow, rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_every_iterate_but_the_last_needs_a_gradient(steps):
    """The last one is only voted on."""
    x, noise = drawn(len(STARTS["mixed"]), 2)
    model, differentiable = Recorder(network("convolutional")), []
    model.register_forward_pre_hook(lambda *_: differentiable.append(torch.is_grad_enabled()))
    labels = labels_such_that(
        STARTS["mixed"], voted(copy.deepcopy(model.model).eval(), x, noise), False
    )
    DDN(EPSILON, steps, initial_norm=INITIAL_NORM)(model, x, labels, noise)
    assert differentiable == [*[True] * (steps - 1), False]
    assert {len(batch) for batch in model.batches} <= {2 * len(x)}


@pytest.mark.parametrize("label, adversarial", [(0, False), (1, True)])
def test_a_tied_vote_goes_to_the_smaller_class(label, adversarial):
    # One copy on either side of the boundary. Adversarial inputs are returned unchanged, others are
    # moved across it.
    noise = torch.tensor([[[0.3], [-0.3]]], dtype=torch.float64)
    x = torch.tensor([[0.5]], dtype=torch.float64)
    attacked = DDN(0.3, 2, initial_norm=0.4)(
        linear_classifier((1.0,), -0.5), x, torch.tensor([label]), noise
    )
    assert torch.equal(attacked, x) == adversarial
