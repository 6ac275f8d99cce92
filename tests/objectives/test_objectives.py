"""What holds for every training objective: a finite loss with a gradient, randomness from one
generator, and a batch that stays as it is.
"""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.base.settings import SettingError, options_of
from smoothadv.objectives import OBJECTIVES, attack_field
from smoothadv.objectives.gaussian import Gaussian
from support.models import network_with_state, random_linear_classifier

SIGMA = 0.25
IMAGES = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 1, 0])
TAUGHT = {
    "teacher": random_linear_classifier(16, 3, seed=2),
    "targets": torch.eye(3)[LABELS] * 0.7 + 0.1,
}


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(objective: type, noise_sd: float):
    """An objective as the training command would compose it."""
    given = {"attack": ATTACKS["PGD"](0.5, 2), "regularization": 2.0}
    return objective(
        noise_sd=noise_sd,
        **{
            each.name: given[each.name]
            for each in dataclasses.fields(objective)
            if each.name in given
        },
    )


every_objective = pytest.mark.parametrize(
    "objective", [OBJECTIVES[name] for name in OBJECTIVES], ids=list(OBJECTIVES)
)


@every_objective
@pytest.mark.parametrize("noise_sd", [0.01, 0.25, 1.0])
@pytest.mark.parametrize("epoch", [0, 1, 50])
def test_every_objective_gives_a_finite_loss_with_a_gradient(objective, noise_sd, epoch):
    model = network_with_state().train()
    outcome = build(objective, noise_sd)(model, IMAGES, LABELS, epoch, generator(), **TAUGHT)
    assert outcome.loss.shape == () and outcome.loss.isfinite()
    assert 0 <= int(outcome.correct) <= outcome.examples and outcome.examples % len(IMAGES) == 0
    outcome.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().max() > 0 for gradient in gradients)
    assert model.training


@every_objective
@pytest.mark.parametrize("text", ["-0.1", "10.1", "nan", "inf", "some"])
def test_noise_of_every_objective_is_a_standard_deviation_of_at_most_10(objective, text):
    (noise,) = [each for each in options_of(objective) if each.field == "noise_sd"]
    assert noise.parse("10") == 10
    with pytest.raises(SettingError, match=text):
        noise.parse(text)


@every_objective
def test_every_objective_draws_from_its_generator_alone(objective):
    model = random_linear_classifier(16, 3, seed=1)
    built = build(objective, SIGMA)
    losses = []
    for global_seed, seed in [(1, 3), (2, 3), (1, 4)]:
        torch.manual_seed(global_seed)
        losses.append(built(model, IMAGES, LABELS, 50, generator(seed), **TAUGHT).loss.item())
    assert losses[0] == losses[1] != losses[2]


@every_objective
def test_every_objective_leaves_its_batch_alone(objective):
    images, labels = IMAGES.clone(), LABELS.clone()
    build(objective, SIGMA)(
        random_linear_classifier(16, 3, seed=1), images, labels, 50, generator(), **TAUGHT
    )
    assert torch.equal(images, IMAGES) and torch.equal(labels, LABELS)


@dataclass(frozen=True)
class Named(Gaussian):
    """An attack in a field of another name, and a field whose name alone is that of an attack."""

    adversary: GradientAttack | None = None
    attack: str = "none"


def test_an_attack_is_found_by_the_type_of_its_field():
    pgd = ATTACKS["PGD"](0.5, 2)
    assert attack_field(Named).name == "adversary" and attack_field(Gaussian) is None
    assert Named(SIGMA, pgd).gradient_attack is pgd and Gaussian(SIGMA).gradient_attack is None
