"""What holds for every training objective, and the options and counts of SmoothAdv.

Every objective has a finite loss with a gradient, takes its randomness from one generator, and
leaves its batch as it is. "Vanilla PGD + noise" attacks the base classifier and trains on noisy
copies of the result; without any noise it is "Vanilla PGD". Objectives of denoisers have values in
closed form. Tests cover which model is attacked, which copies were classified correctly before the
attack, which copies are trained on, and how epsilon grows.
"""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.attacks import ATTACKS, GradientAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.pgd import PGD
from smoothadv.base.settings import SettingError, options_of
from smoothadv.noise import training_noise
from smoothadv.objectives import OBJECTIVES, Batch, attack_field
from smoothadv.objectives.denoising import DENOISING, DenoisedStability, MeanSquaredError
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv
from support.models import Recorder, linear_classifier, network_with_state, random_linear_classifier
from support.objectives import outcome_of

SIGMA, EPSILON, STEPS = 0.25, 0.5, 3
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
@pytest.mark.parametrize(
    ("noise_sd", "epoch"), [(0.25, 0), (0.25, 1), (0.25, 50), (0.01, 50), (1.0, 50)]
)
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
def test_noise_of_every_objective_is_a_standard_deviation_of_at_most_10(objective):
    (noise,) = [each for each in options_of(objective) if each.field == "noise_sd"]
    assert noise.parse("10") == 10
    for text in ("-0.1", "10.1", "nan", "inf", "some"):
        with pytest.raises(SettingError, match=text):
            noise.parse(text)


@every_objective
def test_every_objective_draws_from_its_generator_alone_and_leaves_its_batch_alone(objective):
    model = random_linear_classifier(16, 3, seed=1)
    built, images, labels = build(objective, SIGMA), IMAGES.clone(), LABELS.clone()
    losses = []
    for global_seed, seed in [(1, 3), (2, 3), (1, 4)]:
        torch.manual_seed(global_seed)
        losses.append(built(model, images, labels, 50, generator(seed), **TAUGHT).loss.item())
    assert losses[0] == losses[1] != losses[2]
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


def network(seed: int = 1) -> nn.Sequential:
    """A classifier with batch normalization, whose outputs differ between train mode and eval
    mode.
    """
    norm = nn.BatchNorm2d(1, momentum=0.0)
    norm.running_mean.fill_(0.7)
    norm.running_var.fill_(0.3)
    return nn.Sequential(norm, *random_linear_classifier(16, 3, seed))


def vanilla(attack: object, noise_sd: float, copies: int = 1, **options) -> SmoothAdv:
    return SmoothAdv(attack, noise_sd, copies, **{"warmup": 0, **options})


def slow_accuracy(model: nn.Module, images: torch.Tensor, noise: torch.Tensor) -> int:
    """How many copies the model classifies correctly in eval mode, one by one."""
    modes = model.training
    model.eval()
    pairs = [
        (model((image + draw)[None]).argmax() == label)
        for image, label, draws in zip(images, LABELS, noise)
        for draw in draws
    ]
    model.train(modes)
    return int(sum(pairs))


def slow_loss(model: nn.Module, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy over all copies, as one batch in train mode."""
    copies = torch.stack([image + draw for image, draws in zip(images, noise) for draw in draws])
    log_p = model.train()(copies).log_softmax(1)
    labels = [label for label, draws in zip(LABELS, noise) for _ in draws]
    return -torch.stack([row[label] for row, label in zip(log_p, labels)]).mean()


OBJECTIVES_WITHOUT_NOISE_IN_THE_ATTACK = {
    "vanilla": (0.0, {}),
    "vanilla, asked for twice": (0.0, {"base_attack": True}),
    "vanilla + noise": (SIGMA, {"base_attack": True}),
}


@pytest.mark.parametrize(
    "noise_sd, options",
    OBJECTIVES_WITHOUT_NOISE_IN_THE_ATTACK.values(),
    ids=OBJECTIVES_WITHOUT_NOISE_IN_THE_ATTACK,
)
@pytest.mark.parametrize("copies", [1, 4])
def test_base_classifier_is_attacked_without_noise_by_one_pass_a_step(noise_sd, options, copies):
    recorder = Recorder(network()).train()
    objective = vanilla(PGD(EPSILON, STEPS), noise_sd, copies, **options)
    outcome = objective(recorder, IMAGES, LABELS, 0, generator())

    *attacked, trained_on = recorder.batches
    assert [len(batch) for batch in attacked] == [5] * STEPS
    assert torch.equal(attacked[0], IMAGES), "the attack starts at the image itself"
    assert recorder.modes == [False] * STEPS + [True]
    # Every point it looked at is within epsilon of the image: nothing was added to it.
    assert max((batch - IMAGES).flatten(1).norm(dim=1).max() for batch in attacked) <= EPSILON * (
        1 + 1e-5
    )

    adversarial = PGD(EPSILON, STEPS)(network(), IMAGES, LABELS)
    assert (adversarial - IMAGES).flatten(1).norm(dim=1).min() > 0.1
    noise = training_noise(IMAGES, copies, noise_sd, generator())
    assert (noise.abs().max() > 0) == (noise_sd > 0)
    torch.testing.assert_close(
        trained_on, torch.cat([image + draws for image, draws in zip(adversarial, noise)])
    )
    torch.testing.assert_close(outcome.loss, slow_loss(network(), adversarial, noise))
    assert outcome.examples == 5 * copies


def test_gaussian_trains_on_one_noisy_copy():
    outcome = Gaussian(SIGMA)(network().train(), IMAGES, LABELS, 0, generator())
    noise = training_noise(IMAGES, 1, SIGMA, generator())
    torch.testing.assert_close(outcome.loss, slow_loss(network(), IMAGES, noise))
    assert (outcome.examples, outcome.unattacked_examples) == (5, 0)


ATTACKED = {
    "PGD": (ATTACKS["PGD"](EPSILON, STEPS), {}, 4),
    "DDN": (ATTACKS["DDN"](EPSILON, STEPS), {}, 4),
    "DDN of one step": (ATTACKS["DDN"](EPSILON, 1), {}, 4),
    "PGD on the base classifier": (ATTACKS["PGD"](EPSILON, STEPS), {"base_attack": True}, 1),
    "DDN on the base classifier": (ATTACKS["DDN"](EPSILON, STEPS), {"base_attack": True}, 1),
}


@pytest.mark.parametrize("attack, options, seen", ATTACKED.values(), ids=ATTACKED)
@pytest.mark.parametrize("first_copy", [False, True], ids=["all copies", "first copy"])
def test_what_was_right_before_the_attack_is_counted_in_eval_mode(
    attack, options, seen, first_copy
):
    model = network().train()
    objective = vanilla(attack, SIGMA, 4, train_first_copy=first_copy, **options)
    outcomes = [objective(model, IMAGES, LABELS, 0, generator(seed)) for seed in range(8)]
    for seed, outcome in enumerate(outcomes):
        noise = (
            training_noise(IMAGES, 4, SIGMA, generator(seed))
            if seen == 4
            else torch.zeros(5, 1, 1, 4, 4)
        )
        assert outcome.unattacked_examples == 5 * seen
        assert int(outcome.unattacked_correct) == slow_accuracy(network(), IMAGES, noise)
    # In training after the attack it is another number.
    shares = [
        (int(each.unattacked_correct) / (5 * seen), int(each.correct) / each.examples)
        for each in outcomes
    ]
    assert any(before != after for before, after in shares)


@pytest.mark.parametrize("base_attack", [False, True], ids=["smoothed", "base"])
def test_first_copy_alone_is_trained_on_while_all_are_attacked(base_attack):
    recorder = Recorder(network())
    options = {"base_attack": base_attack, "train_first_copy": True}
    outcome = vanilla(PGD(EPSILON, STEPS), SIGMA, 4, **options)(
        recorder, IMAGES, LABELS, 0, generator()
    )
    noise = training_noise(IMAGES, 4, SIGMA, generator())
    adversarial = PGD(EPSILON, STEPS)(network(), IMAGES, LABELS, None if base_attack else noise)
    assert [len(batch) for batch in recorder.batches] == [5 if base_attack else 20] * STEPS + [5]
    torch.testing.assert_close(recorder.batches[-1], adversarial + noise[:, 0])
    torch.testing.assert_close(outcome.loss, slow_loss(network(), adversarial, noise[:, :1]))
    assert outcome.examples == 5


@pytest.mark.parametrize(
    "warmup, expected",
    [
        (10, [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5, 0.5]),
        (3, [0.5 / 3, 1 / 3, 0.5, 0.5]),
        (1, [0.5, 0.5]),
        (0, [0.5, 0.5]),
    ],
)
def test_epsilon_grows_linearly_and_may_begin_an_epoch_earlier(warmup, expected):
    usual, ahead = (
        vanilla(PGD(EPSILON, 1), SIGMA, warmup=warmup, warmup_from_first_epoch=is_ahead)
        for is_ahead in (False, True)
    )
    assert [ahead.epsilon(epoch) for epoch in range(len(expected))] == pytest.approx(expected)
    assert max(ahead.epsilon(epoch) for epoch in range(500)) == EPSILON, "exactly, and never more"
    late = [usual.epsilon(epoch) for epoch in range(40)]
    assert late == [
        0.0 if warmup else EPSILON,
        *(ahead.epsilon(epoch) for epoch in range(39)),
    ]
    # The attack gets the same epsilon: on a linear classifier it moves exactly that far.
    recorder = Recorder(linear_classifier((1.0,) * 16, 1.0, torch.float32))
    images = torch.full((1, 1, 4, 4), 0.5)
    noise = torch.zeros(1, 1, 1, 4, 4)
    outcome_of(ahead, recorder, ahead.batch(images, torch.tensor([1]), 0, None, noise=noise))
    assert (recorder.batches[-1] - images).norm().item() == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("attack", [PGD(EPSILON, STEPS), DDN(EPSILON, STEPS)], ids=["PGD", "DDN"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_one_form_of_the_classifier_is_attacked_and_the_other_trained(attack, training):
    """Two different classifiers here, so that a mix-up shows; a model and its quicker twin in
    use.
    """
    attacked, trained = Recorder(network(1)).train(training), Recorder(network(2)).train()
    noise = training_noise(IMAGES, 2, SIGMA, generator())
    objective = vanilla(attack, SIGMA, 2)
    outcome = outcome_of(
        objective, trained, objective.batch(IMAGES, LABELS, 0, None, noise=noise), attacked=attacked
    )

    assert len(trained.batches) == 1 and trained.modes == [True]
    assert len(attacked.batches) == STEPS and attacked.modes == [False] * STEPS
    assert attacked.training == training and trained.training
    adversarial = attack(network(1), IMAGES, LABELS, noise)
    assert (adversarial - attack(network(2), IMAGES, LABELS, noise)).abs().max() > 0.01
    torch.testing.assert_close(trained.batches[0], (adversarial[:, None] + noise).flatten(0, 1))
    assert int(outcome.unattacked_correct) == slow_accuracy(network(1), IMAGES, noise)

    outcome.loss.backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())
    assert all(
        parameter.grad is None and parameter.requires_grad for parameter in attacked.parameters()
    )


def scaled(weight: float) -> nn.Module:
    """D(z) = w z."""
    layer = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval().requires_grad_(False)


def noisy_digits(count: int = 6, teacher: nn.Module | None = None) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images, noise = torch.randn(2, count, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return Batch(images, labels, SIGMA * noise.unsqueeze(1), teacher=teacher)


@pytest.mark.parametrize("weight", [0.5, 0.9, 1.0])
def test_squared_error_of_a_scaled_image_is_known(weight):
    """Of pixels ~ N(0, 1): (1 - w)^2 + w^2 sigma^2. The mean of 128,000 squares is within 2 %, 5
    standard errors.
    """
    seen = noisy_digits(2000)
    loss = float(outcome_of(MeanSquaredError(SIGMA), scaled(weight), seen).loss.detach())
    assert loss == pytest.approx((1 - weight) ** 2 + (weight * SIGMA) ** 2, rel=0.02)
    errors = weight * (seen.images + seen.noise[:, 0]).double() - seen.images
    assert loss == pytest.approx(float((errors**2).mean()), rel=1e-5)


def test_stability_is_the_cross_entropy_under_the_class_of_the_clean_image():
    network, model = classifier(), scaled(0.8)
    seen = noisy_digits(6, network)
    outcome = outcome_of(DenoisedStability(SIGMA), model, seen)
    logits = network(0.8 * (seen.images + seen.noise[:, 0]))
    wanted = network(seen.images).argmax(1)
    assert float(outcome.loss.detach()) == pytest.approx(
        float(F.cross_entropy(logits, wanted)), rel=1e-5
    )
    assert (
        int(outcome.correct) == int((logits.argmax(1) == seen.labels).sum())
        and outcome.examples == 6
    )
    outcome.loss.backward()
    assert float(model.weight.grad) != 0, "gradients pass through the classifier"
    assert all(weight.grad is None for weight in network.parameters()), "which stays as it is"


@pytest.mark.parametrize("name", DENOISING)
@pytest.mark.parametrize("with_classifier", [True, False])
def test_accuracies_are_those_behind_the_classifier_or_unknown(name, with_classifier):
    network, model = classifier(), scaled(0.8)
    seen, objective = noisy_digits(90, network if with_classifier else None), DENOISING[name](SIGMA)
    if name == "stability" and not with_classifier:
        with pytest.raises(ValueError, match="needs a classifier"):
            objective.test(model, seen)
        return
    loss, noisy, clean = objective.test(model, seen)
    assert float(loss.detach()) == pytest.approx(
        90 * float(outcome_of(objective, model, seen).loss.detach()), rel=1e-5
    )
    if not with_classifier:
        assert math.isnan(noisy) and math.isnan(clean)
        return
    images = 0.8 * torch.stack([seen.images + seen.noise[:, 0], seen.images])
    expected = [int((network(some).argmax(1) == seen.labels).sum()) for some in images]
    assert [int(noisy), int(clean)] == expected and noisy != clean
