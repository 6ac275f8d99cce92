"""Restarts, targets, each example's own epsilon, and attacks where memory runs out, against
computations that leave nothing out.
"""

import dataclasses
import gc
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Stein, expected_loss
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import NonFiniteError, UserError
from support.fragile_models import OUT_OF_MEMORY, Forgetful
from support.models import ConstantClassifier, Recorder
from support.slow_attacks import (
    batch_noise,
    copy_probabilities,
    slow_loss,
    slow_target,
    smooth_network,
)
from support.statistical_checks import FALSE_ALARM

SIGMA, CLASSES, COPIES, EXAMPLES = 0.25, 4, 3, 6
INDICES = [5, 0, 31, 8, 9, 100]
ATTACKS = {
    "PGD": PGD(0.5, 2),
    "random start": PGD(0.5, 2, random_start=True),
    "expected loss": PGD(0.5, 2, estimator=expected_loss),
    "Stein": PGD(0.5, 2, estimator=Stein(SIGMA)),
    "hard Stein": PGD(0.5, 2, estimator=Stein(SIGMA, hard=True)),
    "DDN": DDN(0.5, 5, initial_norm=0.4),
}
each_attack = pytest.mark.parametrize("name", ATTACKS)
without_randomness = pytest.mark.parametrize(
    "name", [name for name in ATTACKS if name != "random start"]
)


def problem(seed: int, dtype: torch.dtype = torch.float64, scale: float = 6.0):
    """A strongly curved model, inputs [B, 5], the labels it gives them, and the noise of INDICES
    for seed 2.
    """
    model = smooth_network(5, CLASSES, seed, dtype, scale)
    inputs = torch.rand(EXAMPLES, 5, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return model, inputs, model(inputs).argmax(1), batch_noise(SIGMA, 2, INDICES, COPIES, inputs)


def attacked(
    attack, problem, *, epsilon=None, targets=None, batch: int = 7, **options
) -> torch.Tensor:
    model, inputs, labels, _ = problem
    attack = SmoothedAttack(attack, SIGMA, COPIES, seed=2, batch=batch, **options)
    return attack(model, inputs, labels, INDICES, epsilon=epsilon, targets=targets)


def losses(
    problem, results: torch.Tensor, labels: torch.Tensor | None = None, hard: bool = False
) -> np.ndarray:
    """-log of the labels' mean probabilities, or the share of copies that are not given them."""
    model, _, problem_labels, noise = problem
    labels = (problem_labels if labels is None else labels).tolist()
    if hard:
        answers = [copy_probabilities(model, *each).argmax(1) for each in zip(results, noise)]
        return np.array(
            [(answer != label).double().mean() for answer, label in zip(answers, labels)]
        )
    return np.array([slow_loss(model, *each) for each in zip(results, labels, noise)])


@pytest.mark.parametrize("aim", ["away", "a target", "every class"])
@each_attack
def test_more_restarts_never_do_worse_and_are_reproducible(name, aim):
    """The runs of fewer restarts are among those of more."""
    given, sign = problem(4), -1 if aim == "a target" else 1
    targets = (given[2] + 1) % CLASSES if aim == "a target" else None
    options = {"targets": targets, "target": "every" if aim == "every class" else None}
    before = np.full(EXAMPLES, -np.inf)
    for restarts in (1, 3):
        results = attacked(ATTACKS[name], given, restarts=restarts, **options)
        now = sign * losses(given, results, targets, hard=name == "hard Stein")
        assert (now >= before - 1e-12).all()
        better, before = (now > before + 1e-6).sum(), now
    assert torch.equal(attacked(ATTACKS[name], given, restarts=restarts, **options), results)
    assert better > 0 or aim == "every class", "restarts are good for something"


def test_restarts_begin_at_uniform_points_of_the_ball_and_the_first_run_at_the_image():
    """In d = 3 dimensions (norm / epsilon)^3 is uniform. False alarms: 1e-6 per Kolmogorov-Smirnov
    test, over seeds.
    """
    x, labels = torch.full((1_500, 3), 0.5), torch.zeros(1_500, dtype=torch.int64)
    recorder = Recorder(ConstantClassifier(0, 2))
    result = SmoothedAttack(PGD(0.4, 1), 0.0, restarts=3, batch=1_500)(recorder, x, labels)
    # Of each run a pass for the gradient and one for the loss.
    first, second, third = (recorder.batches[number] - x for number in (0, 2, 4))
    assert torch.equal(first, torch.zeros_like(x)) and torch.equal(result, x), (
        "of equal runs the first is kept"
    )
    for v in (second, third):
        share = (v.norm(dim=1) / 0.4).double().numpy()
        assert stats.kstest(share**3, "uniform").pvalue > FALSE_ALARM
        assert (
            stats.kstest((v[:, 0] / v.norm(dim=1)).double().numpy(), "uniform", (-1, 2)).pvalue
            > FALSE_ALARM
        )
        assert stats.kstest(share, "uniform").pvalue < FALSE_ALARM, (
            "the check would notice another radius"
        )
    assert abs(np.corrcoef(second.flatten(), third.flatten())[0, 1]) < 0.08, (
        "5 standard errors: 6e-7"
    )


@pytest.mark.parametrize("rule", ["runner-up", "least-likely"])
@each_attack
def test_rule_names_the_class_that_sorting_does_and_the_attack_wants_it(name, rule):
    given = problem(1)
    model, inputs, labels, noise = given
    slow = torch.tensor(
        [slow_target(rule, model, *each) for each in zip(inputs, labels.tolist(), noise)]
    )
    for batch in (2, 4, 100):
        attack = SmoothedAttack(ATTACKS[name], SIGMA, COPIES, seed=2, target=rule, batch=batch)
        assert torch.equal(attack.choose_targets(model, inputs, labels, INDICES), slow)
    assert torch.equal(
        attacked(ATTACKS[name], given, target=rule), attacked(ATTACKS[name], given, targets=slow)
    )
    other = "least-likely" if rule == "runner-up" else "runner-up"
    assert any(
        slow_target(other, model, *each) != one
        for *each, one in zip(inputs, labels.tolist(), noise, slow)
    )


def test_random_target_is_uniform_among_the_others_and_a_function_of_seed_and_index():
    """False alarm: 1e-6 over the seeds, of a chi-squared test with 3,000 choices."""
    model, count = smooth_network(5, CLASSES, 0), 3_000
    inputs, labels = torch.rand(count, 5, dtype=torch.float64), torch.arange(count) % CLASSES

    def chosen(seed: int, order: list[int]) -> torch.Tensor:
        attack = SmoothedAttack(PGD(0.5, 1), 0.0, seed=seed, target="random")
        return attack.choose_targets(model, inputs[order], labels[order], order)

    everyone = list(range(count))
    targets = chosen(0, everyone)
    shifts = np.bincount(((targets - labels) % CLASSES).numpy(), minlength=CLASSES)
    assert shifts[0] == 0, "the label is none"
    assert stats.chisquare(shifts[1:]).pvalue > FALSE_ALARM
    assert stats.chisquare(shifts[1:] + [150, 0, -150]).pvalue < FALSE_ALARM, (
        "the check would notice"
    )
    some = [700, 3, 2_999, 4]
    assert torch.equal(chosen(0, some), targets[some])
    assert 0.5 < (chosen(1, everyone) != targets).double().mean() < 0.8, "2 / 3 by chance"


@without_randomness
def test_target_is_reached_as_by_the_plain_targeted_attack(name):
    given = model, inputs, labels, noise = problem(3)
    targets = (labels + torch.tensor([1, 2, 3, 1, 2, 3])) % CLASSES
    plain = dataclasses.replace(ATTACKS[name], targeted=True)(model, inputs, targets, noise)
    torch.testing.assert_close(
        attacked(ATTACKS[name], given, targets=targets), plain, rtol=0, atol=1e-10
    )
    # What a call says takes the place of the rule.
    for rule in (0, "runner-up", "every"):
        results = attacked(ATTACKS[name], given, targets=targets, target=rule)
        torch.testing.assert_close(results, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("target", [0, CLASSES - 1])
@each_attack
def test_class_number_is_a_target_for_all_and_its_own_examples_stay_unchanged(name, target):
    model, inputs, _, noise = problem(4, torch.float32)
    labels = torch.tensor([0, 1, 2, 3, target, target])
    given = model, inputs, labels, noise
    results = attacked(ATTACKS[name], given, target=target, restarts=2)
    assert torch.equal(
        results, attacked(ATTACKS[name], given, targets=torch.full_like(labels, target), restarts=2)
    )
    assert torch.equal(results[labels == target], inputs[labels == target])
    attack = SmoothedAttack(ATTACKS[name], SIGMA, COPIES, target=target)
    assert attack.choose_targets(model, inputs, labels).tolist() == [target] * EXAMPLES


@without_randomness
def test_every_class_in_turn_and_the_worst_for_the_label_is_kept(name):
    for seed in range(2):
        given = problem(seed)
        labels, hard = given[2], name == "hard Stein"
        each = [
            attacked(ATTACKS[name], given, targets=(labels + shift) % CLASSES)
            for shift in range(1, CLASSES)
        ]
        worst = np.max([losses(given, results, hard=hard) for results in each], axis=0)
        results = attacked(ATTACKS[name], given, target="every")
        assert losses(given, results, hard=hard) == pytest.approx(worst, abs=1e-10)
        for result, *candidates in zip(results, *each):
            assert min((result - candidate).abs().max() for candidate in candidates) < 1e-10
        last = losses(given, each[-1], hard=hard)
        assert hard or (last < worst - 1e-6).any(), "not simply the last one"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *product(("PGD", "DDN"), ({"restarts": 3}, {"target": "every"}, {"target": "runner-up"})),
        *((name, {}) for name in ATTACKS),
    ],
    ids=str,
)
def test_each_example_stays_in_its_own_ball(name, options):
    epsilon = torch.tensor([0.0, 0.01, 0.1, 0.0, 0.7, 2.0], dtype=torch.float64)
    given = problem(2)
    results = attacked(ATTACKS[name], given, epsilon=epsilon, **options)
    assert ((results - given[1]).norm(dim=1) <= epsilon * (1 + 1e-9)).all()
    assert torch.equal(results[epsilon == 0], given[1][epsilon == 0])
    for row in (2, 5):
        with_one_size = attacked(
            ATTACKS[name], given, epsilon=epsilon[row].expand(EXAMPLES), **options
        )
        assert torch.equal(with_one_size[row], results[row]), (
            "the sizes of the others do not matter"
        )
    for dtype in (torch.float32, torch.float16):
        coarse = attacked(ATTACKS[name], given, epsilon=epsilon.to(dtype), **options)
        torch.testing.assert_close(coarse, results, rtol=0, atol=5e-2)


# What is refused. None of it may pass silently: an attack that does less than it should makes a
# defence look good.


NO_RADII = (-0.1, float("nan"), float("inf"))


@pytest.mark.parametrize(
    ("settings", "arguments", "word"),
    [
        *(({"sigma": sigma}, {}, "sigma") for sigma in NO_RADII),
        *(({"target": target}, {}, "target") for target in (1.5, True, "closest")),
        *(({name: 0}, {}, name) for name in ("num_noise_vec", "restarts", "batch")),
        ({"seed": -1}, {}, "seed"),
        ({"attack": PGD(0.5, 2, targeted=True)}, {}, "target"),
        ({"sigma": 0.0, "num_noise_vec": 2}, {}, "sigma"),
        ({"sigma": 0.0, "attack": PGD(0.5, 2, estimator=Stein(0.25))}, {}, "sigma"),
        *(
            ({"target": target, "attack": ATTACKS[name]}, {}, str(target))
            for target in (-1, CLASSES, 1_000)
            for name in ("PGD", "hard Stein", "DDN")
        ),
        *(({}, {"targets": torch.full((EXAMPLES,), k)}, None) for k in (-1, CLASSES, 1_000)),
        # Else the examples of a later pass would be attacked with an epsilon of nothing.
        *(
            ({"sigma": sigma, "num_noise_vec": copies, "batch": batch}, argument, None)
            for sigma, copies in ((0.0, 1), (SIGMA, 4))
            for batch in (2, 256)
            for count in (1, EXAMPLES - 1, EXAMPLES + 3)
            for argument in (
                {"epsilon": torch.full((count,), 0.1)},
                {"targets": torch.zeros(count).long()},
                {"indices": range(count)},
            )
        ),
        *(
            ({}, {"epsilon": torch.tensor([r] + [0.1] * (EXAMPLES - 1))}, "epsilon")
            for r in NO_RADII
        ),
        *(({}, {"epsilon": e}, "epsilon") for e in (0.1, torch.tensor(0.1), torch.tensor([1, 2]))),
        # Grey levels, or images that are standardized: there epsilon would mean something else.
        *(({}, {"pixel": pixel}, "[0, 1]") for pixel in (-0.01, 1.01, 255.0, *NO_RADII)),
    ],
)
def test_what_an_attack_cannot_do_is_refused(settings, arguments, word):
    model, inputs, labels, _ = problem(0)
    inputs[2, 0] = arguments.get("pixel", inputs[2, 0])
    given = {name: value for name, value in arguments.items() if name != "pixel"}
    with pytest.raises(ValueError, match=word):
        SmoothedAttack(**{"attack": PGD(0.5, 2), "sigma": SIGMA, **settings})(
            model, inputs, labels, **given
        )


@pytest.mark.parametrize("target", [None, "runner-up", "random", "every", 1])
def test_no_examples_have_no_adversarial_examples(target):
    model, inputs, labels, _ = problem(0)
    attack = SmoothedAttack(PGD(0.5, 2), SIGMA, 2, restarts=2, target=target)
    for indices in (None, []):
        result = attack(model, inputs[:0], labels[:0], indices)
        assert result.shape == inputs[:0].shape and result.dtype == inputs.dtype
        targets = attack.choose_targets(model, inputs[:0], labels[:0], indices)
        assert targets is None or (targets.shape == (0,) and targets.dtype == torch.int64)


@each_attack
def test_an_evaluation_in_inference_mode_attacks_all_the_same(name):
    model, inputs, labels, _ = problem(0)
    attack = SmoothedAttack(ATTACKS[name], SIGMA, 2, restarts=2)
    expected = attack(model, inputs, labels)
    assert not torch.equal(expected, inputs)
    with torch.inference_mode():
        assert torch.equal(attack(model, inputs * 1, labels * 1), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_an_error_and_no_image(value):
    model, inputs, labels, _ = problem(0)
    with torch.no_grad():
        next(model.parameters()).fill_(value)
    with pytest.raises(NonFiniteError, match="not finite"):
        SmoothedAttack(PGD(0.5, 2), SIGMA, 2)(model, inputs, labels)


# Memory runs out: on the accelerator, on the host; always above some batch, or just once.


each_failure = pytest.mark.parametrize(("name", "error"), list(zip(ATTACKS, [*OUT_OF_MEMORY] * 2)))


@each_failure
@pytest.mark.parametrize(
    ("options", "indices"),
    [({}, None), ({"target": "every"}, INDICES), ({"restarts": 2, "target": "random"}, INDICES)],
    ids=str,
)
def test_batch_is_halved_until_it_fits_and_nothing_else_changes(name, error, options, indices):
    model, inputs, labels, _ = problem(1)
    batches: list[int] = []
    attack = SmoothedAttack(
        ATTACKS[name], SIGMA, COPIES, batch=64, on_smaller_batch=batches.append, **options
    )
    expected = attack(model, inputs, labels, indices)
    assert batches == [] and (expected != inputs).any()
    fragile = Forgetful(model, 5, OUT_OF_MEMORY[error])
    for _ in range(2):  # the second time, only what fits is tried
        result = attack(fragile, inputs, labels, indices)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
        # Of 3 copies, passes of 63, 30, 15 and 6 rows do not fit, nor do all 18 without indices.
        assert batches == [32, 16, 8, 4] and attack.batch == 4
    later = fragile.sizes[len(fragile.sizes) // 2 :]
    assert max(later) <= 4, "it is not tried again"


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_one_copy_that_does_not_fit_is_told_in_one_line(error):
    model, inputs, labels, _ = problem(0)
    batches: list[int] = []
    attack = SmoothedAttack(PGD(0.5, 2), SIGMA, COPIES, batch=5, on_smaller_batch=batches.append)
    with pytest.raises(UserError, match="memory") as caught:
        attack(Forgetful(model.train(), 0, OUT_OF_MEMORY[error]), inputs, labels)
    assert batches == [2, 1] and len(str(caught.value).splitlines()) == 1
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


@each_failure
@pytest.mark.parametrize("fails", [1, 2, 4])
def test_nothing_of_a_failed_attempt_is_kept_when_the_next_begins(name, error, fails):
    """Else what ran out of memory would stand in the way of the smaller batch. No garbage collector
    helps.
    """
    model, inputs, labels, _ = problem(0)
    fragile, alive = Forgetful(model, make_error=OUT_OF_MEMORY[error], fails={fails}), []
    attack = SmoothedAttack(
        ATTACKS[name],
        SIGMA,
        COPIES,
        batch=64,
        restarts=2,
        on_smaller_batch=lambda batch: alive.append(fragile.alive()),
    )
    gc.disable()
    try:
        attack(fragile, inputs, labels, INDICES)
    finally:
        gc.enable()
    assert alive == [0]
