"""The losses on logits [B, m, K] against formulas written from the papers, sum by sum, in Python's
floats.
"""

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import norm
from torch import nn

from smoothadv.attacks import ATTACKS
from smoothadv.attacks.estimators import noisy_logits
from smoothadv.objectives import OBJECTIVES, Batch, mean_cross_entropy
from smoothadv.objectives.cat_rs import CatRS
from smoothadv.objectives.consistency import Consistency
from smoothadv.objectives.distillation import Distillation
from smoothadv.objectives.ft_cadis import FTCADIS
from smoothadv.objectives.macer import Macer
from smoothadv.objectives.smoothmix import SmoothMix
from smoothadv.objectives.stability import Stability
from support.commands import call, refused
from support.models import Recorder, random_linear_classifier
from support.objectives import outcome_of

SIGMA = 0.5
IMAGES, COPIES, CLASSES = 6, 4, 3
LABELS = torch.tensor([0, 1, 2, 1, 0, 2])


def logits(seed: int = 0, copies: int = COPIES, size: float = 1.0) -> torch.Tensor:
    """Logits [B, m, K], float64, in which most labels have the largest value."""
    drawn = torch.randn(
        IMAGES, copies, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return size * (drawn + 2 * torch.eye(CLASSES, dtype=torch.float64)[LABELS].unsqueeze(1))


def softmax(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


def averaged(rows: list[list[float]], factor: float = 1.0) -> list[float]:
    each = [softmax([factor * value for value in row]) for row in rows]
    return [math.fsum(column) / len(rows) for column in zip(*each)]


def slow_consistency(of_image: list[list[float]], label: int, weight: float, eta: float) -> float:
    mean, total = averaged(of_image), 0.0
    for row in of_image:
        each = softmax(row)
        total -= math.log(each[label]) / len(of_image)
        total += weight * math.fsum(p * math.log(p / q) for p, q in zip(mean, each)) / len(of_image)
    return total - eta * math.fsum(p * math.log(p) for p in mean)


def slow_macer(
    of_image: list[list[float]], label: int, weight: float, beta: float, gamma: float
) -> float:
    sharp = averaged(of_image, beta)
    total = -math.log(averaged(of_image)[label] + 1e-10)
    first, second = sorted(sharp, reverse=True)[:2]
    if sharp[label] == first:
        distance = norm.ppf(first) - norm.ppf(second)
        total += weight * SIGMA / 2 * (gamma - distance) if distance <= gamma else 0.0
    return total


def slow_stability(of_image: list[list[float]], label: int, weight: float) -> float:
    noisy, clean = map(softmax, of_image)
    return -math.log(clean[label]) - weight * math.fsum(
        p * math.log(q) for p, q in zip(clean, noisy)
    )


def slow_mean(slow, values: torch.Tensor, *settings: float) -> float:
    rows = zip(values.tolist(), LABELS.tolist())
    return math.fsum(slow(of_image, label, *settings) for of_image, label in rows) / len(LABELS)


CASES = {
    "consistency": (Consistency(noise_sd=SIGMA), slow_consistency, (10.0, 0.5), COPIES),
    "consistency 3, 2": (
        Consistency(noise_sd=SIGMA, regularization=3, eta=2),
        slow_consistency,
        (3.0, 2.0),
        COPIES,
    ),
    "macer": (Macer(noise_sd=SIGMA, sharpness=2), slow_macer, (6.0, 2.0, 8.0), COPIES),
    "macer, small hinge": (
        Macer(noise_sd=SIGMA, sharpness=2, gamma=2),
        slow_macer,
        (6.0, 2.0, 2.0),
        COPIES,
    ),
    "stability": (Stability(noise_sd=SIGMA), slow_stability, (2.0,), 2),
}
every_case = pytest.mark.parametrize(
    ("objective", "slow", "settings", "copies"), CASES.values(), ids=CASES
)


@every_case
def test_loss_is_that_of_the_formula(objective, slow, settings, copies):
    for seed in range(4):
        values = logits(seed, copies, 0.7)
        loss, terms = objective.criterion(values, LABELS)
        assert loss.item() == pytest.approx(slow_mean(slow, values, *settings), rel=1e-12)
        assert tuple(terms) == objective.TERMS
        wrong = [2 * settings[0], *settings[1:]]
        assert loss.item() != pytest.approx(slow_mean(slow, values, *wrong), rel=1e-6), "a control"


@every_case
def test_gradient_is_that_of_finite_differences(objective, slow, settings, copies):
    values = logits(1, copies, 0.7).requires_grad_()
    assert torch.autograd.gradcheck(lambda given: objective.criterion(given, LABELS)[0], values)


@pytest.mark.parametrize("kind", [None, "strong", "weak"])
def test_a_router_learns_shares_of_stages(kind):
    """The loss is the sum of those of each class with its share; divergence and entropy are weighed
    by the radius of the stage with the most or the least noise to which copies are sent, or not.
    """
    objective = Consistency(noise_sd=SIGMA, num_noise_vec=COPIES, route_consistency=kind)
    model = random_linear_classifier(16, CLASSES, seed=1).double()
    images = torch.rand(IMAGES, 1, 4, 4).double()
    shares, radii = torch.rand(2, IMAGES, CLASSES).double()
    noise = objective.draw(images, torch.Generator().manual_seed(0))
    sigmas, expected, choose = [0.5, 1.0, 0.25], [], min if kind == "weak" else max
    values = noisy_logits(model, images, noise)
    for of_image, own, radius in zip(values.tolist(), shares.tolist(), radii.tolist()):
        sent = choose((row.index(max(row)) for row in of_image), key=sigmas.__getitem__)
        weights = [size * (radius[sent] if kind else 1) for size in (10, 0.5)]
        expected += [s * slow_consistency(of_image, k, *weights) for k, s in enumerate(own)]
    stages = torch.stack([torch.tensor(sigmas).double().expand_as(radii), radii], -1)
    batch = Batch(images, LABELS, noise, targets=shares, stages=stages)
    found = outcome_of(objective, model, batch).loss.item()
    assert found == pytest.approx(math.fsum(expected) / IMAGES, rel=1e-12)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda some: objective.criterion(some, shares)[0], values)


@pytest.mark.parametrize("kind", [Consistency, Stability, Macer])
@pytest.mark.parametrize("size", [0.0, 30.0, 104.0, 1e4])
def test_loss_is_finite_where_votes_are_equal_or_unanimous(kind, size):
    """Where a probability is 0 or a quantile infinite, gradients are finite, and the hinge of MACER
    is 0.
    """
    objective = kind(noise_sd=SIGMA)
    for dtype in (torch.float32, torch.float64):
        values = (
            (size * torch.eye(CLASSES)[LABELS].unsqueeze(1))
            .repeat(1, max(2, objective.copies), 1)
            .to(dtype)
        )
        loss, terms = objective.criterion(values.requires_grad_(), LABELS)
        loss.backward()
        assert loss.isfinite() and values.grad.isfinite().all()
        assert kind is not Macer or size == 0 or terms["hinge"] == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Consistency, [20, 20, 10, 10]),
        (Stability, [2, 2, 2, 1]),
        (Macer, [12, 12, 6, 12]),
        (CatRS, [0.5, 0.5, 1, 2]),
        (FTCADIS, [4, 4, 4, 4]),
    ],
)
def test_lambda_is_the_papers_for_the_nearest_noise(kind, expected):
    assert [kind(noise_sd=sigma).regularization for sigma in (0.12, 0.25, 0.5, 1.0)] == expected


@pytest.mark.parametrize("sigma", [SIGMA, 0])
def test_stability_compares_with_the_image_itself_and_counts_the_noisy_copy(sigma):
    images = torch.rand(IMAGES, 1, 4, 4)
    recorder = Recorder(model := random_linear_classifier(16, CLASSES, seed=1))
    outcome = Stability(noise_sd=sigma)(
        recorder, images, LABELS, 0, torch.Generator().manual_seed(0)
    )
    clean, noisy = recorder.batches
    assert outcome.examples == IMAGES
    assert outcome.correct == (model(noisy).argmax(1) == LABELS).sum()
    assert torch.equal(clean, images)
    assert (noisy - images).std().item() == pytest.approx(sigma, rel=0.3)


@pytest.mark.parametrize("name", ["consistency", "macer"])
def test_losses_combine_with_attacks(name):
    """With an attack, the images are those that SmoothAdv's attack finds on the same noise."""
    model, images = random_linear_classifier(16, CLASSES, seed=1), torch.rand(IMAGES, 1, 4, 4)
    attack = ATTACKS["PGD"](0.5, 2)
    both = OBJECTIVES[name](
        attack=attack, noise_sd=SIGMA, num_noise_vec=COPIES, warmup=0, regularization=2
    )
    noise = both.draw(images, torch.Generator().manual_seed(0))
    moved = attack(model, images, LABELS, noise)
    values = model((moved.unsqueeze(1) + noise).flatten(0, 1)).unflatten(0, (IMAGES, COPIES))
    assert (
        outcome_of(both, model, both.batch(images, LABELS, 0, None, noise=noise)).loss.item()
        == both.criterion(values, LABELS)[0].item()
    )
    alone = OBJECTIVES[name](noise_sd=SIGMA, num_noise_vec=COPIES, regularization=2)
    assert (
        outcome_of(alone, model, alone.batch(images, LABELS, 0, None, noise=noise)).loss
        < outcome_of(both, model, both.batch(images, LABELS, 0, None, noise=noise)).loss
    )
    assert alone.epsilon(math.inf) == 0 and both.epsilon(math.inf) == 0.5


def test_what_makes_no_sense_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="at least 2"):
        Consistency(noise_sd=SIGMA, num_noise_vec=1)
    with pytest.raises(ValueError, match="--lambda has no default"):
        Consistency(noise_sd=SIGMA, attack=ATTACKS["PGD"](0.5, 2))
    for options, word in [
        (["--objective", "consistency", "--noise", 0.25, "--epsilon", 0.5], "--epsilon"),
        (["--objective", "macer", "--noise", 0.25, "--warmup", 3], "--warmup is not read"),
        (["--objective", "consistency", "--noise", 0], "2 noisy copies"),
        (["--objective", "gaussian", "--noise", 0.25, "--lambda", 2], "--lambda is not read"),
    ]:
        assert refused(
            call(capsys, "train", "digits", "digits_resnet8", tmp_path / "run", *options),
            word,
            code=2,
        )


# ---- losses of two sets of copies, and of what an attack made ----

SHARES = torch.tensor([0.5, 0.25, 0.01, 0.4, 0.3, 0.1], dtype=torch.float64)
COUNTED = torch.tensor([1, 2, 3, 4, 4, 1])
TARGETS = torch.tensor(
    [[0.9, 0.1, 0], [0, 1, 0], [0.2, 0.3, 0.5], [0, 0.7, 0.3], [1, 0, 0], [0.4, 0.1, 0.5]]
).double()


def divergence(shares: list[float], row: list[float]) -> float:
    return math.fsum(p * math.log(p / q) for p, q in zip(shares, softmax(row)) if p)


def slow_smoothmix(first, second, label, share, weight) -> float:
    mean = averaged(first)
    total = -math.fsum(math.log(softmax(row)[label]) for row in first) / len(first)
    targets = [(1 - share) * p + share / CLASSES for p in mean]
    is_correct = mean[label] == max(mean)
    return total + weight * is_correct * math.fsum(
        divergence(targets, row) for row in second
    ) / len(second)


def slow_cat_rs(first, second, label, of_image, weight) -> float:
    counted, targets = of_image
    total = math.fsum(sorted(-math.log(softmax(row)[label]) for row in first)[:counted]) / len(
        first
    )
    return total + weight * (counted == len(first)) * max(
        divergence(targets, row) for row in second
    )


def slow_ft_cadis(first, second, label, of_image, weight) -> float:
    each = [-math.log(softmax(row)[label]) for row in first]
    right = [one for one, row in zip(each, first) if row[label] == max(row)]
    total = math.fsum(right or [min(each)]) / len(first)
    return total + weight * (len(right) == len(first)) * max(
        divergence(averaged(first), row) for row in second
    )


PAIRS = {
    "ft-cadis": (
        lambda w: FTCADIS(SIGMA, regularization=w),
        slow_ft_cadis,
        [()] * IMAGES,
        (),
    ),
    "smoothmix": (
        lambda w: SmoothMix(SIGMA, eta=w / 2),
        slow_smoothmix,
        SHARES.tolist(),
        (SHARES, 2.0),
    ),
    "cat-rs": (
        lambda w: CatRS(SIGMA, regularization=w),
        slow_cat_rs,
        [*zip(COUNTED.tolist(), TARGETS.tolist())],
        (TARGETS, COUNTED),
    ),
}
every_pair = pytest.mark.parametrize(
    ("build", "slow", "of_images", "given"), PAIRS.values(), ids=PAIRS
)


@every_pair
@pytest.mark.parametrize("weight", [0.0, 0.7, 5.0])
def test_loss_of_two_sets_of_copies_is_that_of_the_formula(build, slow, of_images, given, weight):
    """Its gradient is that of finite differences, also through the first mean, as in SmoothMix's
    released code.
    """
    objective, values = build(weight), [logits(seed, size=0.7) for seed in (1, 10)]
    values[0][:2] *= -1  # the mean of their predictions is wrong
    values[0][5, 0] *= -1  # one copy of an image is wrong
    assert (values[0].softmax(-1).mean(1).argmax(1) == LABELS).tolist() == [False] * 2 + [True] * 4
    values = [each.requires_grad_() for each in values]
    loss, terms = objective.combined(*values, LABELS, *given)
    cases = [*zip(values[0].tolist(), values[1].tolist(), LABELS.tolist(), of_images)]
    expected, wrong = (
        math.fsum(slow(*case, w) for case in cases) / IMAGES for w in (weight, weight + 0.1)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert loss.item() != pytest.approx(wrong, rel=1e-6), "a control"
    assert tuple(terms) == objective.TERMS
    assert torch.autograd.gradcheck(
        lambda *both: objective.combined(*both, LABELS, *given)[0], values
    )


@every_pair
@pytest.mark.parametrize("size", [0.0, 104.0, 1e4, -1e4])
def test_losses_of_unanimous_copies_and_certain_targets_are_finite(
    build, slow, of_images, given, size
):
    for dtype in (torch.float32, torch.float64):
        row = torch.eye(CLASSES, dtype=dtype)[LABELS].unsqueeze(1).repeat(1, COPIES, 1)
        both = [(abs(size) * row).requires_grad_(), (size * row).requires_grad_()]
        numbers = [
            each.to(dtype) if torch.is_tensor(each) and each.is_floating_point() else each
            for each in given
        ]
        loss, _ = build(2.0).combined(*both, LABELS, *numbers)
        loss.backward()
        assert (
            loss.isfinite()
            and all(each.grad.isfinite().all() for each in both)
            and loss.dtype == dtype
        )


def batch_of(objective, **fields) -> Batch:
    images = torch.rand(IMAGES, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    noise = objective.draw(images, torch.Generator().manual_seed(0))
    each = {"": 0, "image": 1, "copy": objective.copies}[objective.UNIFORMS]
    return Batch(
        images,
        LABELS,
        noise,
        objective.epsilon(99),
        uniforms=torch.linspace(0, 0.99, IMAGES * each).reshape(IMAGES, each),
        targets=TARGETS.float(),
        **fields,
    )


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("transfer", [0.0, 0.25, 1.0])
def test_distillation_is_the_distance_of_logits_and_the_cross_entropy(copies, transfer):
    objective = Distillation(SIGMA, copies, transfer)
    model, teacher = (random_linear_classifier(16, CLASSES, seed) for seed in (1, 2))
    batch = batch_of(objective, teacher=teacher)
    ours, theirs = (noisy_logits(each, batch.images, batch.noise) for each in (model, teacher))
    pairs = zip(ours.flatten(0, 1).tolist(), theirs.flatten(0, 1).tolist())
    distance = math.fsum(math.dist(*pair) for pair in pairs) / (IMAGES * copies)
    outcome = outcome_of(objective, model, batch)
    expected = transfer * distance + (1 - transfer) * mean_cross_entropy(ours, LABELS).item()
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5) and distance > 0.1
    outcome.loss.backward()
    assert all(each.grad is None for each in teacher.parameters()), "it is frozen"
    outcome_of(objective, model, batch_of(objective, teacher=model)).loss.backward()
    assert all(each.grad.isfinite().all() for each in model.parameters()), "also at a distance of 0"


@pytest.mark.parametrize("is_first", [False, True])
def test_smoothmix_trains_on_the_image_and_on_the_way_to_the_end_of_its_attack(is_first):
    """x' = PGD of T steps in no ball; the mixed image is at (1 - t) x + t x', with t = (1 - u) /
    2.
    """
    objective = SmoothMix(
        SIGMA, mix_steps=3, mix_step_size=0.4, one_step_adversary=is_first, warmup=4
    )
    model, batch = (
        random_linear_classifier(16, CLASSES, seed=1),
        batch_of(objective, epoch=1),
    )
    recorder = Recorder(model)
    outcome_of(objective, recorder, batch, attacked=model)
    given = model, batch.images, LABELS, batch.noise
    end, first = (ATTACKS["PGD"](99.0, steps, step_size=0.4)(*given) for steps in (3, 1))
    step = first - batch.images  # of at most half the length in the second of four epochs
    half = step * (0.2 / step.flatten(1).norm(dim=1)).clamp(max=1).reshape(-1, 1, 1, 1)
    start, share = (
        batch.images + half * is_first,
        ((1 - batch.uniforms[:, 0]) / 2).reshape(-1, 1, 1, 1),
    )
    for seen, expected in zip(
        recorder.batches, (start, start + share * (end - start)), strict=True
    ):
        torch.testing.assert_close(
            seen, (expected[:, None] + batch.noise).flatten(0, 1), rtol=0, atol=2e-6
        )
    assert [objective.ramp(epoch) for epoch in (0, 1, 3, 9)] == [0.25, 0.5, 1, 1]


@pytest.mark.parametrize(("confidence", "counted"), [("model", [2, 4, 1]), ("teacher", [3, 1, 2])])
def test_cat_rs_counts_as_many_copies_as_uniforms_are_below_the_confidence(
    monkeypatch, confidence, counted
):
    """The images are 0, so that the noise is the logits: of four copies 3, 4 and 0 are right."""
    classes = torch.tensor([[0, 0, 1, 0], [2, 2, 2, 2], [0, 2, 0, 0]])
    batch = Batch(
        torch.zeros(3, 1, 1, 3),
        torch.tensor([0, 2, 1]),
        torch.eye(3)[classes].reshape(3, 4, 1, 1, 3),
        uniforms=torch.tensor([[0.9, 0.7, 0.74, 0.75], [0, 0.2, 0.3, 0.99], [0.4, 0.1, 0.5, 0.6]]),
        targets=torch.tensor([[0.8, 0.2, 0], [0.1, 0.8, 0.1], [0.5, 0.5, 0]]),
    )
    combined, seen = CatRS.combined, []
    monkeypatch.setattr(
        CatRS, "combined", lambda *given: seen.append(given[-1].tolist()) or combined(*given)
    )
    objective = CatRS(SIGMA, confidence=confidence)
    outcome_of(objective, nn.Flatten(), replace(batch, epsilon=objective.epsilon(0)))
    assert seen == [counted]


def test_attack_of_cat_rs_doubles_from_an_epoch_on():
    doubled = CatRS(SIGMA, noise_epsilon=0.75, double_from_epoch=80)
    assert [doubled.epsilon(epoch) for epoch in (0, 79, 80, math.inf)] == [0.75, 0.75, 1.5, 1.5]
    assert {CatRS(SIGMA).epsilon(epoch) for epoch in (0, 80, math.inf)} == {1.0}


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_lambda_of_macer_is_zero_before_its_epoch(kind):
    """An epoch may be a tensor, in a CUDA graph."""
    objective, values = Macer(noise_sd=SIGMA, sharpness=2, lambda_from_epoch=200), logits(2)
    batch = Batch(torch.zeros(IMAGES, 1, 1, CLASSES), LABELS, values[:, :, None, None])
    for epoch, weight in ((0, 0.0), (199, 0.0), (200, 6.0), (439, 6.0)):
        seen = replace(batch, epoch=kind(epoch))
        outcome = objective.loss(nn.Flatten(), seen, seen)
        expected = slow_mean(slow_macer, values, weight, 2.0, 8.0)
        assert outcome.loss.item() == pytest.approx(expected, rel=1e-6) and outcome.terms["hinge"]
