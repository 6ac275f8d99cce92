"""PGD on linear classifiers, whose worst perturbation is known, and its steps one by one."""

import pytest
import torch

from smoothadv.attacks.pgd import PGD
from support.models import POINT, WEIGHT, Recorder, linear_classifier

UNIT_WEIGHT = torch.tensor(WEIGHT, dtype=torch.float64) / 5


def batch(*values: float) -> torch.Tensor:
    """One example: [1, d]"""
    return torch.tensor([values], dtype=torch.float64)


def gaussian(copies: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Noise of standard deviation 0.5 for inputs [B, ...]: [B, copies, ...]"""
    shape = (len(like), copies, *like.shape[1:])
    return 0.5 * torch.randn(shape, dtype=like.dtype, generator=torch.Generator().manual_seed(seed))


AWAY, TOWARDS = (1, False, -1), (0, True, -1)


# One after the other: the number of copies, the number of steps, and what is wanted of which label.
@pytest.mark.parametrize(
    "copies, steps, wanted",
    [
        *((copies, 3, AWAY) for copies in (None, 1, 2, 8)),
        *((2, steps, TOWARDS) for steps in (1, 2, 7, 20)),
        *(
            (copies, 3, wanted)
            for wanted in ((0, False, 1), (1, True, 1), TOWARDS)
            for copies in (None, 8)
        ),
    ],
)
def test_moves_straight_away_from_the_label_of_a_linear_classifier(copies, steps, wanted):
    label, targeted, sign = wanted
    x = batch(*POINT) if sign < 0 else batch(0.5, 0.5)  # no pixel is clipped
    noise = None if copies is None else gaussian(copies, x)
    attacked = PGD(0.25, steps, targeted=targeted)(
        linear_classifier(), x, torch.tensor([label]), noise
    )
    torch.testing.assert_close(attacked - x, sign * 0.25 * UNIT_WEIGHT[None], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("margin", [1e3, 1e6])
def test_a_saturated_softmax_still_has_a_direction(margin):
    # The label has a probability that underflows a float32: its logarithm has a gradient all the
    # same.
    x = torch.tensor([POINT])
    model = linear_classifier((3.0, 4.0), -5.0 - margin, torch.float32)
    attacked = PGD(0.25, 2)(model, x, torch.tensor([1]), gaussian(3, x))
    torch.testing.assert_close(
        attacked - x, -0.25 * UNIT_WEIGHT[None].float(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    "steps, step_size, expected", [(4, None, 0.125), (2, None, 0.25), (4, 0.01, 0.01)]
)
def test_a_step_is_two_epsilon_over_the_number_of_steps_unless_stated(steps, step_size, expected):
    x, recorder = batch(*POINT), Recorder(linear_classifier())
    PGD(0.25, steps, step_size=step_size)(recorder, x, torch.tensor([1]))
    assert len(recorder.batches) == steps
    assert torch.equal(recorder.batches[0], x)
    assert (recorder.batches[1] - x).norm().item() == pytest.approx(expected)


def test_a_gradient_with_a_zero_among_its_numbers_is_not_flat():
    x, model = batch(0.5, 0.5), linear_classifier(weight=(3.0, 0.0))
    attacked = PGD(0.25, 3, random_if_flat=True)(model, x, torch.tensor([1]))
    torch.testing.assert_close(attacked - x, batch(-0.25, 0.0), rtol=1e-9, atol=1e-12)
