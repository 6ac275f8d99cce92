"""Training objectives: which noise and which copies they train on, in which mode, and with how
large an attack.
"""

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch

from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.base.settings import SettingError, options_of
from smoothadv.noise import training_noise
from smoothadv.objectives import OBJECTIVES, attack_field
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv
from support.models import Recorder, network_with_state, random_linear_classifier

SIGMA = 0.25
IMAGES = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 1, 0])
SHIFT = 0.125
TAUGHT = {
    "teacher": random_linear_classifier(16, 3, seed=2),
    "targets": torch.eye(3)[LABELS] * 0.7 + 0.1,
}


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class ShiftingAttack:
    """Moves every pixel by SHIFT towards the middle, looks at the model once, and remembers what it
    was called with.
    """

    epsilon: float
    calls: list = field(default_factory=list)

    def __call__(self, model, inputs, labels, noise, generator, epsilon) -> torch.Tensor:
        self.calls.append(
            {"epsilon": epsilon, "inputs": inputs, "labels": labels, "noise": noise.clone()}
        )
        return inputs + SHIFT * (0.5 - inputs).sign()


def moved(images: torch.Tensor) -> torch.Tensor:
    return images + SHIFT * (0.5 - images).sign()


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_attack_and_update_see_the_same_noise_and_all_copies_are_trained_on(copies):
    attack, recorder = ShiftingAttack(0.5), Recorder(random_linear_classifier(16, 3, seed=1))
    outcome = SmoothAdv(attack, SIGMA, copies, warmup=0)(recorder, IMAGES, LABELS, 0, generator())

    (call,) = attack.calls
    noise = call["noise"]
    assert noise.shape == (5, copies, 1, 4, 4)
    assert len(noise.flatten(0, 1).flatten(1).unique(dim=0)) == 5 * copies
    assert noise.std().item() == pytest.approx(
        SIGMA, rel=0.35
    )  # 80 or more numbers: 4 standard errors
    assert torch.equal(call["inputs"], IMAGES) and torch.equal(call["labels"], LABELS)
    (batch,) = recorder.batches
    torch.testing.assert_close(batch.unflatten(0, (5, copies)) - moved(IMAGES)[:, None], noise)
    assert outcome.examples == 5 * copies


def obvious_loss(
    model, images: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """The mean cross-entropy over all copies and the number of correct ones, copy by copy."""
    losses, correct = [], 0
    for image, label, draws in zip(images, labels, noise):
        for draw in draws:
            logits = model((image + draw)[None])[0]
            losses.append(torch.logsumexp(logits, 0) - logits[label])
            correct += int(logits.argmax() == label)
    return sum(losses) / len(losses), correct


def test_gaussian_trains_on_the_mean_cross_entropy_of_one_copy():
    model = random_linear_classifier(16, 3, seed=1)
    outcome = Gaussian(SIGMA)(model, IMAGES, LABELS, 0, generator())
    loss, correct = obvious_loss(
        model, IMAGES, LABELS, training_noise(IMAGES, 1, SIGMA, generator())
    )
    torch.testing.assert_close(outcome.loss, loss)
    assert (int(outcome.correct), outcome.examples) == (correct, 5)


@pytest.mark.parametrize("attack", [ATTACKS[name](0.5, 3) for name in ATTACKS], ids=list(ATTACKS))
@pytest.mark.parametrize("copies", [1, 2])
def test_attacks_in_eval_mode_and_updates_in_train_mode_once(attack, copies):
    torch.manual_seed(0)  # a network that is right about some images, which DDN then attacks
    network = network_with_state()
    recorder = Recorder(network).train()
    SmoothAdv(attack, SIGMA, copies, warmup=0)(
        recorder, IMAGES, LABELS, 0, generator()
    ).loss.backward()

    assert recorder.modes == [False] * (len(recorder.modes) - 1) + [True]
    assert len(recorder.modes) >= 3  # the attack did look
    # Batch normalization is the first layer: its statistics are those of the update's batch, seen
    # once.
    trained_on = recorder.batches[-1]
    assert len(trained_on) == 5 * copies
    assert network[0].num_batches_tracked == 1
    torch.testing.assert_close(network[0].running_mean, 0.1 * trained_on.mean((0, 2, 3)))
    torch.testing.assert_close(network[0].running_var, 0.9 + 0.1 * trained_on.var((0, 2, 3)))


@pytest.mark.parametrize(
    "warmup, expected",
    [
        (10, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5]),
        (2, [0, 0.25, 0.5, 0.5]),
        (1, [0, 0.5, 0.5]),
        (0, [0.5, 0.5, 0.5]),
    ],
)
def test_epsilon_grows_linearly_from_zero_over_the_warmup(warmup, expected):
    attack = ShiftingAttack(0.5)
    objective = SmoothAdv(attack, SIGMA, 1, warmup)
    model = random_linear_classifier(16, 3, seed=1)
    for epoch in range(len(expected)):
        objective(model, IMAGES, LABELS, epoch, generator())
    assert [objective.epsilon(epoch) for epoch in range(len(expected))] == pytest.approx(expected)
    # What is announced is what is done.
    assert [call["epsilon"] for call in attack.calls] == pytest.approx(expected)


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
