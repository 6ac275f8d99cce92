"""DDN at the edges of its pseudo-code: ties, zero gradients, the farthest image, grey levels,
settings.
"""

import math

import pytest
import torch

from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.shared.geometry import quantize
from support.models import Recorder, linear_classifier

LABEL = torch.tensor([1])


def test_norm_never_exceeds_that_of_the_farthest_image():
    x = torch.tensor([[0.3, 0.9]], dtype=torch.float64)
    recorder = Recorder(
        linear_classifier((3.0, 4.0), 20.0)
    )  # never adversarial: the norm grows and grows
    DDN(10.0, 12, initial_norm=5.0)(recorder, x, LABEL)
    # Down the diagonal both pixels are clipped at 0; beyond the box nothing is evaluated.
    assert all(((0 <= point) & (point <= 1)).all() for point in recorder.batches)
    farthest = math.hypot(0.7, 0.9)
    # The first step of length 5 * 1.05 is cut to the farthest distance before it is clipped.
    expected = (x - farthest * torch.tensor([[0.6, 0.8]], dtype=torch.float64)).clamp(0, 1)
    torch.testing.assert_close(recorder.batches[1], expected)


@pytest.mark.parametrize("label, adversarial", [(0, False), (1, True)])
def test_a_tied_vote_goes_to_the_smaller_class(label, adversarial):
    # One copy on either side of the boundary. Adversarial inputs are returned unchanged, others are
    # moved across it.
    noise = torch.tensor([[[0.3], [-0.3]]], dtype=torch.float64)
    x = torch.tensor([[0.5]], dtype=torch.float64)
    attacked = DDN(0.3, 2, initial_norm=0.4)(
        linear_classifier((1.0,), -0.5), x, torch.tensor([label]), noise
    )
    assert torch.equal(attacked, x) == adversarial


def test_quantized_iterates_lie_on_grey_levels_and_the_result_in_the_ball():
    x = torch.full((1, 48), 100 / 255)
    weight = torch.linspace(-1, 2, 48)
    recorder = Recorder(linear_classifier(weight, float(-weight @ x[0] + 0.3), torch.float32))
    attacked = DDN(0.05, 8, initial_norm=0.2, quantization_levels=256)(recorder, x, LABEL)
    levels = torch.stack(recorder.batches) * 255
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
    assert 0 < (attacked - x).norm() <= 0.05 * (1 + 1e-5)
    plain = Recorder(recorder.model)
    DDN(0.05, 8, initial_norm=0.2)(plain, x, LABEL)
    assert ((torch.stack(plain.batches) * 255).frac() - 0.5).abs().min() < 0.4  # the check can fail


@pytest.mark.parametrize("levels", [2, 16, 256])
def test_quantized_images_are_the_nearest_grey_levels(levels):
    x = torch.linspace(0, 1, 1_001, dtype=torch.float64)
    grid = torch.arange(levels, dtype=torch.float64) / (levels - 1)
    quantized = quantize(x, levels)
    torch.testing.assert_close(
        (quantized - x).abs(), (x[:, None] - grid).abs().amin(1), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(quantize(grid, levels), grid, rtol=0, atol=1e-12)
