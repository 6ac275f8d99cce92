"""DDN on linear classifiers, whose closest adversarial example is at a known distance; its schedule and its votes."""

import math

import pytest
import torch
from scipy.stats import norm

from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Estimate
from smoothadv.attacks.shared.geometry import quantize
from support.models import ConstantClassifier, LinearClassifier, Recorder, linear_classifier

DIMENSION = 16
CENTRE = torch.full((1, DIMENSION), 0.5, dtype=torch.float64)  # far from every pixel's limits: nothing is clipped
LABEL = torch.tensor([1])


def classifier_at(distance: float) -> LinearClassifier:
    """Class 1 at CENTRE, with the boundary at this distance along the diagonal."""
    return linear_classifier((1 / math.sqrt(DIMENSION),) * DIMENSION, distance - 0.5 * math.sqrt(DIMENSION))


def iterate_norms(attack: DDN, distance: float) -> tuple[list[float], float]:
    """The norms of the points that the attack evaluated, and of what it returned."""
    recorder = Recorder(classifier_at(distance))
    attacked = attack(recorder, CENTRE, LABEL)
    return [(point - CENTRE).norm().item() for point in recorder.batches], (attacked - CENTRE).norm().item()


def test_norms_oscillate_around_the_distance_and_the_closest_is_returned():
    norms, returned = iterate_norms(DDN(2.0, 10), 0.8)
    expected = [0, 1.05, 0.9975, 0.9476, 0.9002, 0.8552, 0.8125, 0.7718, 0.8104, 0.7699]
    assert norms == pytest.approx(expected, abs=5e-5)
    assert returned == pytest.approx(0.810439, abs=5e-7)


@pytest.mark.parametrize(
    "distance, initial_norm, steps, expected",
    [(0.8, 1.0, 2, 1.05), (0.3, 0.25, 2, 0.0), (0.3, 0.25, 10, 0.302359), (0.8, 1.0, 1, 0.0)],
)
def test_result_on_a_linear_classifier(distance, initial_norm, steps, expected):
    _, returned = iterate_norms(DDN(2.0, steps, initial_norm=initial_norm), distance)
    assert returned == pytest.approx(expected, abs=5e-7)


def test_result_is_scaled_into_the_ball():
    norms, returned = iterate_norms(DDN(0.5, 2), 0.8)
    assert norms[1] == pytest.approx(1.05)
    assert returned == pytest.approx(0.5)


@pytest.mark.parametrize("targeted", [False, True])
def test_an_input_that_is_adversarial_already_is_returned(targeted):
    # The classifier says 1 at CENTRE: wrong where the label is 0, obeyed where the target is 1.
    label = torch.tensor([1 if targeted else 0])
    assert torch.equal(DDN(1.0, 5, targeted=targeted)(classifier_at(0.2), CENTRE, label), CENTRE)


def test_a_target_is_reached_by_descending_towards_it():
    attacked = DDN(1.0, 10, initial_norm=0.25, targeted=True)(classifier_at(0.3), CENTRE, torch.tensor([0]))
    assert (attacked - CENTRE).norm().item() == pytest.approx(0.302359, abs=5e-7)
    assert classifier_at(0.3)(attacked).argmax() == 0


@pytest.mark.parametrize("answer", [0, 1])
def test_a_zero_gradient_is_no_reason_to_move(answer):
    x = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(DDN(1.0, 4)(ConstantClassifier(answer, 2), x, torch.tensor([1, 1])), x)


def test_the_last_update_competes_only_on_request():
    assert iterate_norms(DDN(2.0, 1), 0.8)[1] == 0
    norms, returned = iterate_norms(DDN(2.0, 1, evaluate_last=True), 0.8)
    assert (norms, returned) == (pytest.approx([0, 1.05]), pytest.approx(1.05))
    # ... and wins only where it is adversarial.
    assert iterate_norms(DDN(2.0, 1, evaluate_last=True), 1.1)[1] == 0


def test_norm_never_exceeds_that_of_the_farthest_image():
    x = torch.tensor([[0.3, 0.9]], dtype=torch.float64)
    recorder = Recorder(linear_classifier((3.0, 4.0), 20.0))  # never adversarial: the norm grows and grows
    DDN(10.0, 12, initial_norm=5.0)(recorder, x, LABEL)
    # Down the diagonal both pixels are clipped at 0; beyond the box nothing is evaluated.
    assert all(((0 <= point) & (point <= 1)).all() for point in recorder.batches)
    farthest = math.hypot(0.7, 0.9)
    # The first step of length 5 * 1.05 is cut to the farthest distance before it is clipped.
    expected = (x - farthest * torch.tensor([[0.6, 0.8]], dtype=torch.float64)).clamp(0, 1)
    torch.testing.assert_close(recorder.batches[1], expected)


class Zigzag:
    """An estimator that points along the first half of the pixels, then along the second; the label stays."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model, points, labels, noise) -> Estimate:
        gradient = torch.zeros_like(points)
        half = slice(0, DIMENSION // 2) if not self.calls else slice(DIMENSION // 2, DIMENSION)
        gradient[:, half] = 7.0
        self.calls += 1
        return Estimate(gradient, model(points).unsqueeze(1))


@pytest.mark.parametrize("steps", [3, 4, 10])
def test_steps_are_annealed_by_a_cosine_from_1_to_one_hundredth(steps):
    recorder = Recorder(linear_classifier(torch.zeros(DIMENSION), 1.0))
    DDN(2.0, steps, estimator=Zigzag(), initial_norm=0.5)(recorder, CENTRE, LABEL)
    first = (recorder.batches[-1] - CENTRE)[0, 0].item() * math.sqrt(DIMENSION / 2)
    second = (recorder.batches[-1] - CENTRE)[0, -1].item() * math.sqrt(DIMENSION / 2)
    # The label stays, so the norm grows by a factor of 1.05 a step; (a, b) are the coordinates along the two halves.
    a, b, radius = 0.525, 0.0, 0.525
    for k in range(1, steps - 1):
        b += 0.01 + 0.495 * (1 + math.cos(math.pi * k / (steps - 1)))
        radius *= 1.05
        a, b = a * radius / math.hypot(a, b), b * radius / math.hypot(a, b)
    assert (first, second) == (pytest.approx(a), pytest.approx(b))


@pytest.mark.parametrize("label, adversarial", [(0, False), (1, True)])
def test_a_tied_vote_goes_to_the_smaller_class(label, adversarial):
    # One copy on either side of the boundary. Adversarial inputs are returned unchanged, others are moved across it.
    noise = torch.tensor([[[0.3], [-0.3]]], dtype=torch.float64)
    x = torch.tensor([[0.5]], dtype=torch.float64)
    attacked = DDN(0.3, 2, initial_norm=0.4)(linear_classifier((1.0,), -0.5), x, torch.tensor([label]), noise)
    assert torch.equal(attacked, x) == adversarial


@pytest.mark.parametrize("beyond, adversarial", [(1, False), (2, True)])
def test_the_majority_of_the_copies_decides(beyond, adversarial):
    offsets = torch.tensor([-1.0] * beyond + [1.0] * (3 - beyond), dtype=torch.float64)
    noise = offsets[None, :, None].expand(1, 3, DIMENSION) * 0.1  # 0.4 along the diagonal
    attacked = DDN(2.0, 2)(classifier_at(0.3), CENTRE, LABEL, noise)
    assert torch.equal(attacked, CENTRE) == adversarial


def test_each_example_has_its_own_norm():
    model = classifier_at(0.8)
    near = CENTRE - (0.7 / math.sqrt(DIMENSION)) * torch.ones_like(CENTRE)  # at distance 0.1
    together = DDN(2.0, 10)(model, torch.cat([CENTRE, near]), torch.tensor([1, 1]))
    apart = torch.cat([DDN(2.0, 10)(model, x, LABEL) for x in (CENTRE, near)])
    torch.testing.assert_close(together, apart)
    assert (together[0] - CENTRE).norm() > (together[1] - near).norm() + 0.1


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


# Rounding a Gaussian direction of norm epsilon to 256 levels leaves a coordinate at zero with probability
# 2 Phi(sqrt(d) / (510 epsilon)) - 1; where epsilon is small per pixel, the norm grows and the direction turns.
@pytest.mark.parametrize("dimension, epsilon, zeros", [(3_072, 0.25, 0.3362), (150_528, 127 / 256, 0.8748)])
def test_quantizing_zeroes_the_known_share_of_a_gaussian_direction(dimension, epsilon, zeros):
    assert 2 * norm.cdf(math.sqrt(dimension) / (510 * epsilon)) - 1 == pytest.approx(zeros, abs=5e-5)
    examples = 400_000 // dimension
    v = torch.randn(examples, dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v *= epsilon / v.norm(dim=1, keepdim=True)
    x = torch.full_like(v, 128 / 255)
    rounded = quantize(x + v, 256) - x
    share = (rounded.abs() < 1e-9).double().mean().item()
    # 5 standard errors: a false alarm in 2 million. 255 levels would already be seen.
    tolerance = 5 * math.sqrt(zeros * (1 - zeros) / rounded.numel())
    assert abs(share - zeros) < tolerance
    if dimension == 150_528:
        assert rounded.norm(dim=1).mean().item() == pytest.approx(0.539, abs=2e-3)
        assert torch.cosine_similarity(rounded, v).mean().item() == pytest.approx(0.696, abs=2e-3)


@pytest.mark.parametrize("levels", [2, 16, 256])
def test_quantized_images_are_the_nearest_grey_levels(levels):
    x = torch.linspace(0, 1, 1_001, dtype=torch.float64)
    grid = torch.arange(levels, dtype=torch.float64) / (levels - 1)
    quantized = quantize(x, levels)
    torch.testing.assert_close((quantized - x).abs(), (x[:, None] - grid).abs().amin(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(quantize(grid, levels), grid, rtol=0, atol=1e-12)


@pytest.mark.parametrize("epsilon, steps", [(-0.1, 2), (float("nan"), 2), (0.25, 0)])
def test_meaningless_settings_are_refused(epsilon, steps):
    with pytest.raises(ValueError, match="epsilon"):
        DDN(epsilon, steps)
