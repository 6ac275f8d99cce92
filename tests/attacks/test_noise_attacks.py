"""The attacks of noise against a slow loop over copies, and against what they promise of norms, moments and ways."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.attacks.noise_attacks import from_targets, until_misclassified
from support.models import ConstantClassifier, Recorder, linear_classifier, network_with_state, random_linear_classifier

IMAGES, COPIES, CLASSES, STEPS, SIZE = 5, 3, 3, 4, 0.6
SHAPE = (1, 4, 4)
LABELS = torch.tensor([0, 1, 2, 1, 0])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = drawn(IMAGES, *SHAPE, seed=1).sigmoid()
NOISE = 0.5 * drawn(IMAGES, COPIES, *SHAPE, seed=2) + 0.1
TARGETS = (2 * drawn(IMAGES, CLASSES, seed=3)).softmax(1).index_fill(1, torch.tensor([2]), 0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.Softplus(), nn.Flatten(), nn.Linear(16, CLASSES)
    return nn.Sequential(*layers).double()


def ascent(model, image, noise, loss) -> tuple[torch.Tensor, torch.Tensor]:
    noise = noise.clone().requires_grad_()
    logits = model((image + noise)[None])[0]
    (gradient,) = torch.autograd.grad(loss(logits), noise)
    return gradient / gradient.norm(), logits.detach()


def slow_until_misclassified(model, image, label, noise, steps, size):
    norm = noise.norm()
    for _ in range(steps):
        direction, logits = ascent(model, image, noise, lambda logits: -logits.log_softmax(0)[label])
        if logits.argmax() != label:
            return noise
        noise = noise + size * direction
        noise = noise * norm / noise.norm()
    return noise


def slow_from_targets(model, image, target, noise, steps, size):
    start = noise
    for _ in range(steps):
        # KL without the entropy of the targets, which does not depend on the noise.
        direction, _ = ascent(model, image, noise, lambda logits: -(target * logits.log_softmax(0)).sum())
        way = noise + 2 * size / steps * direction - start
        noise = start + way * min(1.0, size / way.norm().item())
        noise = (noise - noise.mean()) / noise.std(correction=0) * start.std(correction=0) + start.mean()
    return noise


ATTACKS = {
    "sphere": (until_misclassified, slow_until_misclassified, LABELS),
    "targets": (from_targets, slow_from_targets, TARGETS),
}
every_attack = pytest.mark.parametrize(("attack", "slow", "goals"), ATTACKS.values(), ids=ATTACKS)


@every_attack
@pytest.mark.parametrize("size", [0.01, SIZE, 3.0])
def test_noise_is_that_of_a_loop_over_copies(attack, slow, goals, size, model):
    ours = attack(model, X, goals, NOISE, STEPS, size)
    cases = zip(X, goals, NOISE)
    slowly = torch.stack(
        [torch.stack([slow(model, x, goal, n, STEPS, size) for n in draws]) for x, goal, draws in cases]
    )
    torch.testing.assert_close(ours, slowly, rtol=1e-9, atol=1e-9)
    of_tensor = attack(model, X, goals, NOISE, STEPS, torch.tensor(size, dtype=torch.float64))
    torch.testing.assert_close(of_tensor, ours, rtol=1e-12, atol=1e-12)
    assert (attack(model, X, goals, NOISE, STEPS, size / 2) - ours).abs().max() > 0.05 * size, "a control"


def losses(model, goals: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    logits = model((X[:, None] + noise).flatten(0, 1)).log_softmax(1).unflatten(0, noise.shape[:2])
    shares = goals if goals.dim() == 2 else F.one_hot(goals, CLASSES)
    return -(shares[:, None] * logits).sum(-1)


@every_attack
def test_copies_keep_their_norm_and_their_mean_and_lose(attack, slow, goals, model):
    moved = attack(model, X, goals, NOISE, STEPS, SIZE)
    torch.testing.assert_close(moved.flatten(2).norm(dim=2), NOISE.flatten(2).norm(dim=2), rtol=1e-12, atol=0)
    means, before = moved.flatten(2).mean(2), NOISE.flatten(2).mean(2)
    assert torch.allclose(means, before, rtol=0, atol=1e-12) == (attack is from_targets)
    assert (losses(model, goals, moved) - losses(model, goals, NOISE)).mean() > 0.02
    # A step of length s from a sphere ends within s of where it began, once it is back on the sphere.
    way = (until_misclassified(model, X, LABELS, NOISE, 1, 0.1) - NOISE).flatten(2).norm(dim=2)
    assert way.max() <= 0.1 * (1 + 1e-9) and way.max() > 0.05


def test_each_copy_stops_at_the_first_misclassified_noise(model):
    """Before it, at each number of steps, the copy was still classified correctly; some never move."""
    right = model(X).argmax(1)
    path = [until_misclassified(model, X, right, NOISE, steps, SIZE) for steps in range(7)]
    wrong = [model((X[:, None] + n).flatten(0, 1)).argmax(1) != right.repeat_interleave(COPIES) for n in path]
    assert torch.equal(path[0], NOISE)
    for now, later, is_wrong in zip(path, path[1:], wrong):
        stays = (now == later).flatten(2).all(2).flatten()
        assert torch.equal(stays, is_wrong)
    assert 0 < wrong[-1].sum() and wrong[0].sum() < wrong[-1].sum()


def test_one_step_on_a_linear_classifier_is_along_its_weights():
    weight = torch.arange(1.0, 17.0, dtype=torch.float64)
    linear, unit = linear_classifier(weight, 100.0), weight / weight.norm()
    moved = until_misclassified(linear, X, torch.ones(IMAGES, dtype=torch.int64), NOISE, 1, SIZE).flatten(2)
    expected = NOISE.flatten(2) - SIZE * unit
    expected *= (NOISE.flatten(2).norm(dim=2) / expected.norm(dim=2))[..., None]
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-12)
    others = until_misclassified(linear, X, torch.zeros(IMAGES, dtype=torch.int64), NOISE, 9, SIZE)
    assert torch.equal(others, NOISE), "these are misclassified already"
    certain = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(IMAGES, 2)
    moved = from_targets(linear, X, certain, NOISE, 1, SIZE).flatten(2)  # a step of 2 SIZE ends at SIZE
    expected = NOISE.flatten(2) - SIZE * unit
    mean, deviation = (part(NOISE.flatten(2)) for part in (first, second))
    torch.testing.assert_close(moved, mean + (expected - first(expected)) / second(expected) * deviation)


def first(values: torch.Tensor) -> torch.Tensor:
    return values.mean(2, keepdim=True)


def second(values: torch.Tensor) -> torch.Tensor:
    return values.std(2, correction=0, keepdim=True)


@every_attack
def test_models_are_left_as_they_were_and_attacked_in_eval_mode(attack, slow, goals):
    network = network_with_state().double().train()
    network[0].eval()
    network[3].bias.requires_grad_(False)
    before = [part.clone() for part in network.state_dict().values()]
    recorder = Recorder(network).train()
    network[0].eval()
    with torch.no_grad():
        attack(recorder, X, goals, NOISE, 2, SIZE)
    assert recorder.modes == [False, False] and recorder.training and network.training and not network[0].training
    assert [each.requires_grad for each in network.parameters()] == [True, True, True, False]
    assert all(map(torch.equal, network.state_dict().values(), before))
    assert all(each.grad is None for each in network.parameters())


@every_attack
def test_nothing_to_follow_and_nothing_to_move_give_no_nan(attack, slow, goals):
    still = attack(ConstantClassifier(1, CLASSES), X, goals, NOISE, STEPS, SIZE)
    torch.testing.assert_close(still, NOISE, rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.float64):
        classifier = random_linear_classifier(16, CLASSES, seed=1).to(dtype)
        zero = attack(
            classifier, X.to(dtype), goals.to(dtype) if goals.dim() == 2 else goals, 0 * NOISE.to(dtype), 3, SIZE
        )
        assert zero.abs().max() < 1e-20 and zero.dtype == dtype
