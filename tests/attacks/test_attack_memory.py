"""Attacks where memory runs out: on the accelerator, on the host, always above some batch or just
once.
"""

import gc

import pytest
import torch

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Stein, expected_loss
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import UserError
from support.fragile_models import OUT_OF_MEMORY, Forgetful
from support.slow_attacks import smooth_network

SIGMA, CLASSES, COPIES, DIMENSION = 0.25, 3, 6, 5
every_error = pytest.mark.parametrize("error", OUT_OF_MEMORY)
ATTACKS = {
    "PGD": PGD(0.4, 3),
    "expected loss": PGD(0.4, 2, estimator=expected_loss, random_start=True),
    "Stein": PGD(0.4, 2, estimator=Stein(SIGMA)),
    "DDN": DDN(0.4, 4, initial_norm=0.3),
}
each_attack = pytest.mark.parametrize("name", ATTACKS)


def problem(examples: int = 7) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    model = smooth_network(DIMENSION, CLASSES, 1)
    inputs = torch.rand(
        examples, DIMENSION, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return model, inputs, model(inputs).argmax(1)


def smoothed(name: str, batch: int, batches: list[int] | None = None, **options) -> SmoothedAttack:
    batches = [] if batches is None else batches
    return SmoothedAttack(
        ATTACKS[name],
        SIGMA,
        COPIES,
        seed=3,
        batch=batch,
        on_smaller_batch=batches.append,
        **options,
    )


@pytest.mark.parametrize("name, error", list(zip(ATTACKS, [*OUT_OF_MEMORY, "host"])))
@pytest.mark.parametrize(
    "options", [{}, {"restarts": 2, "target": "every"}, {"target": "random"}], ids=str
)
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_batch_is_halved_until_it_fits_and_nothing_else_changes(name, error, options, named):
    model, inputs, labels = problem()
    indices = list(range(10, 17)) if named else None
    expected = smoothed(name, 64, **options)(model, inputs, labels, indices)
    batches: list[int] = []
    attack, fragile = (
        smoothed(name, 64, batches, **options),
        Forgetful(model, 5, OUT_OF_MEMORY[error]),
    )
    result = attack(fragile, inputs, labels, indices)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
    assert (result != inputs).any()
    # 7 examples of 6 copies: with indices, passes of 60, 30, 12 and 6 rows do not fit, nor do 42 of
    # them without.
    assert batches == [32, 16, 8, 4] and attack.batch == 4
    sizes = fragile.sizes.copy()
    torch.testing.assert_close(
        attack(fragile, inputs, labels, indices), expected, rtol=0, atol=1e-9
    )
    assert batches == [32, 16, 8, 4] and max(fragile.sizes[len(sizes) :]) <= 4, (
        "it is not tried again"
    )


@each_attack
@pytest.mark.parametrize("pass_number", [1, 2, 3, 5, 8])
def test_memory_that_runs_out_once_halves_once(name, pass_number):
    """At any pass, among them those after examples that are done already; which are not attacked
    again.
    """
    model, inputs, labels = problem()
    expected = smoothed(name, 13)(model, inputs, labels, range(7))
    batches: list[int] = []
    fragile = Forgetful(model, fails={pass_number})
    result = smoothed(name, 13, batches)(fragile, inputs, labels, range(7))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
    assert batches == [6]
    assert fragile.sizes[:pass_number] == [12] * pass_number and set(
        fragile.sizes[pass_number:]
    ) == {6}


def test_memory_that_runs_out_while_targets_are_chosen_halves_the_batch_too():
    model, inputs, labels = problem()
    expected = smoothed("PGD", 64, target="runner-up").choose_targets(model, inputs, labels)
    batches: list[int] = []
    fragile = Forgetful(model, 11)
    result = smoothed("PGD", 64, batches, target="runner-up").choose_targets(
        fragile, inputs, labels
    )
    assert torch.equal(result, expected) and batches == [32, 16, 8]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("no"),
        KeyError("no"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_come_through_unchanged(error):
    model, inputs, labels = problem()
    batches: list[int] = []

    def make() -> BaseException:
        return error

    model.train()
    attack = smoothed("PGD", 64, batches)
    with pytest.raises(type(error)) as caught:
        attack(Forgetful(model, 0, make), inputs, labels)
    assert caught.value is error
    assert batches == [] and attack.batch == 64
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


@every_error
def test_one_copy_that_does_not_fit_is_told_in_one_line(error):
    model, inputs, labels = problem()
    batches: list[int] = []
    model.train()
    with pytest.raises(UserError) as caught:
        smoothed("PGD", 5, batches)(Forgetful(model, 0, OUT_OF_MEMORY[error]), inputs, labels)
    assert batches == [2, 1]
    message = str(caught.value)
    assert "memory" in message and len(message.splitlines()) == 1
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


@each_attack
@every_error
@pytest.mark.parametrize("fails", [1, 2, 4])
def test_nothing_of_a_failed_attempt_is_kept_when_the_next_begins(name, error, fails):
    """Else what ran out of memory would stand in the way of the smaller batch. No garbage collector
    helps.
    """
    model, inputs, labels = problem()
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
        attack(fragile, inputs, labels, range(7))
    finally:
        gc.enable()
    assert alive == [0]


def test_a_tensor_that_is_kept_would_be_noticed():
    model, inputs, labels = problem()
    fragile, alive, kept = Forgetful(model, fails={2}), [], []
    model.register_forward_hook(lambda module, arguments, output: kept.append(output))
    attack = SmoothedAttack(
        ATTACKS["PGD"],
        SIGMA,
        COPIES,
        batch=64,
        on_smaller_batch=lambda batch: alive.append(fragile.alive()),
    )
    attack(fragile, inputs, labels)
    # The logits of the first pass, as the model returned them.
    assert alive == [1]
