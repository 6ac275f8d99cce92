"""SmoothedModule: values and gradients in closed form and by an obvious loop; which noise it has;
and the attacks of four libraries on it.
"""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import smoothadv
from smoothadv import SmoothedModule
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.noise import GaussianNoise, Purpose
from support.models import ProbitClassifier

SIGMA = 0.5


@pytest.fixture(scope="module")
def classifier(checkpoints) -> nn.Module:
    """The committed SmoothAdv model of digits."""
    return load_classifier(checkpoints["PGD"], "digits")


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def draws(m: int, sigma: float = SIGMA, seed: int = 0, first: int = 0) -> torch.Tensor:
    out = torch.empty(m, 1, 8, 8)
    noise = GaussianNoise(sigma, seed).stream(0, "cpu", Purpose.ATTACK_NOISE)
    noise.fill(out, torch.zeros(1, 8, 8), first)
    return out


def with_gradient(
    module: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    points = images.clone().requires_grad_()
    logits = module(points)
    loss = nn.functional.cross_entropy(logits, torch.arange(len(images)) % 2, reduction="sum")
    return logits.detach(), torch.autograd.grad(loss, points)[0]


def test_average_of_a_probit_classifier_is_known():
    """E Phi(w.(x + d) + b) = Phi((w.x + b) / sqrt(1 + sigma^2 |w|^2)). With m = 20,000 draws the
    mean of probabilities, whose deviation is at most 1/2, is within 0.02 of it, but for a share of
    2e-8; gradients likewise, of values at most |w| / sqrt(2 pi).
    """
    weight = torch.tensor([3.0, 4.0, -1.0, 2.0])
    model = ProbitClassifier(weight, -1.0, torch.float64)
    module = SmoothedModule(model, SIGMA, 20_000)
    points = torch.tensor([[0.1, 0.2, 0.9, 0.3], [0.9, 0.1, 0.2, 0.4]], dtype=torch.float64)
    images = points.view(2, 1, 2, 2).requires_grad_()
    found = module(images)
    wide = math.sqrt(1 + SIGMA**2 * float(weight @ weight))
    score = (points.detach() @ weight.double() - 1) / wide
    assert torch.allclose(found.exp()[:, 1], torch.special.ndtr(score), atol=0.02)
    assert torch.allclose(found.exp().sum(1), torch.ones(2, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(found.exp()[:, 1].sum(), images)
    slope = torch.exp(-(score**2) / 2) / math.sqrt(2 * math.pi) / wide
    assert torch.allclose(gradient.flatten(1), slope[:, None] * weight.double(), atol=0.04)


def test_values_and_gradients_are_those_of_an_obvious_loop(classifier, images):
    noise = draws(7)

    def obvious(points: torch.Tensor) -> torch.Tensor:
        mean = sum(classifier(points + one).softmax(1) for one in noise) / len(noise)
        return mean.log()

    found, expected = (
        with_gradient(module, images) for module in (SmoothedModule(classifier, SIGMA, 7), obvious)
    )
    for one, two in zip(found, expected):
        assert torch.allclose(one, two, atol=1e-5)
    other = with_gradient(SmoothedModule(classifier, SIGMA, 7, seed=1), images)
    assert not torch.allclose(found[0], other[0], atol=1e-2)


def test_logits_do_not_vanish_where_a_probability_does():
    class Sure(nn.Module):
        def forward(self, images):
            return torch.stack([images.flatten(1).sum(1) * 0 + 500.0, images.flatten(1).sum(1)], 1)

    found, gradient = with_gradient(SmoothedModule(Sure(), SIGMA, 3), torch.rand(2, 1, 8, 8))
    assert found[0, 1] < -400 and found.isfinite().all() and gradient[1].norm() > 1


@pytest.mark.parametrize(
    ("fresh", "batch"),
    [
        *((False, size) for size in (1, 3, 4, 5, 12, 1000)),
        *((True, size) for size in (5, 12, 1000)),
    ],
)
def test_passes_of_any_size_give_the_same(classifier, images, fresh, batch):
    """With fresh draws, where a pass takes all images: the images of a pass have draws of their
    own.
    """
    made = {"m": 6, "fresh": fresh}
    whole, parts = (
        with_gradient(SmoothedModule(classifier, SIGMA, batch=size, **made), images)
        for size in (None, batch)
    )
    for one, two in zip(whole, parts):
        assert torch.allclose(one, two, atol=1e-5)


def test_a_pass_has_at_most_as_many_noisy_images(images):
    sizes = []

    class Counting(nn.Module):
        def forward(self, noisy):
            sizes.append(len(noisy))
            return noisy.flatten(1)[:, :3]

    SmoothedModule(Counting(), SIGMA, 6, batch=4)(images)
    assert max(sizes) <= 4 and sum(sizes) == 6 * len(images)


def test_noise_is_one_function_of_an_image_whatever_is_beside_it(classifier, images):
    module = SmoothedModule(classifier, SIGMA, 5)
    whole = module(images)
    assert torch.equal(whole, module(images)), "the same draws in each call"
    assert torch.allclose(module(images.flip(0)).flip(0), whole, atol=1e-5)
    assert torch.allclose(module(images[2:3]), whole[2:3], atol=1e-5)
    assert torch.allclose(copy.deepcopy(module)(images), whole)


def test_fresh_noise_is_new_for_each_image_and_call_and_repeats_with_the_seed(classifier, images):
    one, two = (SmoothedModule(classifier, SIGMA, 5, seed=3, fresh=True) for _ in range(2))
    same = images[:1].expand(3, -1, -1, -1)
    first, second = one(same), one(same)
    assert len({*first[:, 0].tolist(), *second[:, 0].tolist()}) == 6
    assert torch.equal(two(same), first) and torch.equal(two(same), second)
    expected = draws(30, seed=3).view(2, 5, 3, 1, 8, 8)
    noisy = [(same + copies).flatten(0, 1) for copies in expected]
    means = [classifier(some).view(5, 3, 10).softmax(2).mean(0).log() for some in noisy]
    assert torch.allclose(torch.stack([first, second]), torch.stack(means), atol=1e-5)


def test_module_leaves_the_classifier_as_it_is(classifier, images):
    flags = [parameter.requires_grad for parameter in classifier.parameters()]
    module = SmoothedModule(classifier, SIGMA, 2).train()
    assert module.training and not any(part.training for part in module.model.modules())
    with torch.no_grad():
        assert not module(images).requires_grad
    assert module(images[:0]).shape == (0, 10)
    assert [parameter.requires_grad for parameter in classifier.parameters()] == flags
    assert {f"model.{name}" for name in classifier.state_dict()} == {*module.state_dict()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sigma": 0}, "sigma must be a positive finite number, got 0"),
        ({"sigma": math.inf}, "sigma must be a positive finite number"),
        ({"m": 0}, "m must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_impossible_values_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SmoothedModule(nn.Flatten(), **{"sigma": 0.5, **options})


@pytest.mark.parametrize("bad", [torch.rand(1, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.uint8)])
def test_what_is_no_batch_of_images_is_refused(bad):
    with pytest.raises(ValueError, match="give floats \\[B, C, H, W\\]"):
        SmoothedModule(nn.Flatten(), 0.5)(bad)


# ---- attacks of other libraries ----

Attack = Callable[[nn.Module, torch.Tensor, torch.Tensor, float], torch.Tensor]


def foolbox_attack(module, inputs, labels, epsilon):
    import foolbox

    model = foolbox.PyTorchModel(module.eval(), bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.L2ProjectedGradientDescentAttack(steps=10, rel_stepsize=0.25)
    return attack(model, inputs, labels, epsilons=epsilon)[1]


def torchattacks_attack(module, inputs, labels, epsilon):
    import torchattacks

    return torchattacks.PGDL2(module.eval(), eps=epsilon, alpha=epsilon / 4, steps=10)(
        inputs, labels
    )


def art_attack(module, inputs, labels, epsilon):
    from art.attacks.evasion import ProjectedGradientDescent
    from art.estimators.classification import PyTorchClassifier

    model = PyTorchClassifier(
        module, nn.CrossEntropyLoss(), (1, 8, 8), 10, clip_values=(0, 1), device_type="cpu"
    )
    attack = ProjectedGradientDescent(
        model, norm=2, eps=epsilon, eps_step=epsilon / 4, max_iter=10, verbose=False
    )
    return torch.from_numpy(attack.generate(inputs.numpy(), labels.numpy()))


def autoattack_attack(module, inputs, labels, epsilon):
    from pyautoattack import AutoAttack

    attack = AutoAttack(module.eval(), norm="L2", eps=epsilon, version="rand", seed=0)
    attack.apgd.n_iter, attack.apgd.eot_iter = 10, 2
    return attack.run_standard_evaluation(inputs, labels)[0]


ATTACKS: dict[str, tuple[Attack, bool]] = {
    "foolbox": (foolbox_attack, False),
    "torchattacks": (torchattacks_attack, False),
    "art": (art_attack, False),
    "autoattack": (autoattack_attack, True),
}
"""An attack of each library, and whether it expects new noise in each call."""


@pytest.mark.parametrize("library", ATTACKS)
@pytest.mark.filterwarnings("ignore")
def test_attacks_of_libraries_stay_in_the_ball_and_succeed_in_a_large_one(
    classifier, checkpoints, library
):
    attack, fresh = ATTACKS[library]
    dataset = get_dataset("digits", "test")
    inputs = torch.stack([dataset[index][0] for index in range(0, 64, 8)])
    smoothed = SmoothedModule(classifier, 0.25, 16)
    labels = smoothed(inputs).argmax(1)
    for epsilon, shares in ((0.02, (0.0, 0.3)), (3.0, (0.8, 1.0))):
        module = SmoothedModule(classifier, 0.25, 8, seed=1, fresh=fresh)
        found = attack(module, inputs, labels, epsilon).detach()
        lengths = (found - inputs).flatten(1).norm(dim=1)
        assert 0 < lengths.max() <= epsilon * (1 + 1e-4), library
        assert float(found.min()) >= 0 and float(found.max()) <= 1
        flipped = (smoothed(found).argmax(1) != labels).float().mean()
        assert shares[0] <= flipped <= shares[1], (library, epsilon)


def test_it_is_a_name_of_the_package():
    assert smoothadv.SmoothedModule is SmoothedModule and "SmoothedModule" in smoothadv.__all__
