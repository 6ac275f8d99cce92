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


@pytest.mark.parametrize("name", ATTACKS)
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
