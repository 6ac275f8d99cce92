"""No attack ever leaves its ball or the pixels, whatever the model, the image, the estimator and
the settings; and the steps of which attacks are made.

Distances are taken in float64 and may exceed epsilon by a relative 1e-5, however small it is beside
the rounding of the sum of image and perturbation.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoothadv.attacks import ATTACKS, SmoothedAttack
from smoothadv.attacks.ddn import DDN
from smoothadv.attacks.estimators import Stein, expected_loss, plug_in
from smoothadv.attacks.geometry import (
    in_grey_levels,
    l2_norm,
    project_ball,
    project_box,
    unit,
)
from smoothadv.attacks.pgd import PGD
from support.models import ConstantClassifier, linear_classifier
from support.slow_attacks import smooth_network

CLASSES = 3


def faults(result: torch.Tensor, inputs: torch.Tensor, epsilon: torch.Tensor) -> list[str]:
    """In what the result [B, ...] is not an admissible answer for these inputs and radii [B]."""
    lengths = (result.double() - inputs.double()).flatten(1).norm(dim=1)
    found = {
        "not of the inputs' shape": result.shape != inputs.shape,
        "not of the inputs' type": result.dtype != inputs.dtype or result.requires_grad,
        "not finite": not result.isfinite().all(),
        "no image": (result < 0).any() or (result > 1).any(),
        "outside the ball": (lengths > epsilon.double() * (1 + 1e-5)).any(),
        "moved without leave": not torch.equal(result[epsilon == 0], inputs[epsilon == 0]),
    }
    return [fault for fault, is_there in found.items() if is_there]


def classifier(kind: str, dimension: int, dtype: torch.dtype) -> torch.nn.Module:
    """Ordinary, without any gradient, or with a softmax of zeros and ones and huge or vanishing
    gradients.
    """
    if kind == "constant":
        return ConstantClassifier(1, CLASSES)
    model = smooth_network(dimension, CLASSES, seed=7, dtype=dtype)
    factor = {"ordinary": 1.0, "saturated": 1e5, "faint": 1e-25}[kind]
    with torch.no_grad():
        model[3].weight.mul_(factor)
        model[3].bias.mul_(factor)
        if kind == "saturated":
            model[1].weight.mul_(1e5)
    return model


@st.composite
def situations(draw):
    """Images of several shapes, also black, white and grey ones; labels; radii; a classifier."""
    shape = draw(st.sampled_from([(1,), (7,), (1, 1, 2), (3, 4, 4), (1, 5, 3), (2, 2, 2, 2)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    source = torch.Generator().manual_seed(draw(st.integers(0, 1_000)))
    examples = draw(st.integers(1, 4))
    inputs = torch.rand(examples, *shape, generator=source).to(dtype)
    inputs = {
        "any": inputs,
        "corner": inputs.round(),
        "edge": (3 * inputs - 1).clamp(0, 1),
        "grey": inputs * 0 + 0.5,
    }[draw(st.sampled_from(["any", "corner", "edge", "grey"]))]
    labels = torch.randint(CLASSES, (examples,), generator=source)
    kind = draw(st.sampled_from(["ordinary", "constant", "saturated", "faint"]))
    size = st.floats(-4, 1).map(lambda exponent: 10**exponent)
    radii = draw(st.lists(st.one_of(size, st.just(0.0)), min_size=examples, max_size=examples))
    return (
        inputs,
        labels,
        torch.tensor(radii, dtype=torch.float64),
        classifier(kind, inputs[0].numel(), dtype),
    )


@st.composite
def attacks(draw):
    """An attack with any settings."""
    estimator = draw(st.sampled_from([plug_in, expected_loss, Stein(0.3), Stein(0.3, hard=True)]))
    common = {
        "epsilon": draw(st.floats(1e-4, 10)),
        "num_steps": draw(st.integers(1, 6)),
        "estimator": estimator,
    }
    if draw(st.booleans()):
        return PGD(
            **common,
            step_size=draw(st.sampled_from([None, None, 1e-3, 1e3])),
            random_start=draw(st.booleans()),
            random_if_flat=draw(st.booleans()),
        )
    return DDN(
        **common,
        initial_norm=draw(st.sampled_from([1e-3, 0.3, 1.0, 50.0])),
        gamma=draw(st.sampled_from([0.05, 0.5, 0.99])),
    )


@given(situations(), attacks(), st.booleans(), st.integers(1, 5), st.booleans(), st.booleans())
def test_direct_attack_stays_in_the_ball_and_the_box(
    situation, attack, targeted, copies, begins, sized
):
    inputs, labels, epsilon, model = situation
    source = torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(len(inputs), copies, *inputs.shape[1:], generator=source).to(
        inputs.dtype
    )
    # Where to begin may lie anywhere: it is brought back first.
    start = 3 * torch.randn(inputs.shape, generator=source).to(inputs.dtype) if begins else None
    attack = dataclasses.replace(attack, targeted=targeted)
    batch = inputs, labels, noise
    before = [tensor.clone() for tensor in batch]
    results = [
        attack(
            model,
            *batch,
            torch.Generator().manual_seed(1),
            epsilon=epsilon if sized else None,
            start=start,
        )
        for _ in range(2)
    ]
    assert (
        faults(results[0], inputs, epsilon if sized else torch.full_like(epsilon, attack.epsilon))
        == []
    )
    assert torch.equal(*results), "the generator alone decides"
    assert all(map(torch.equal, batch, before)), "what was given is left alone"


@settings(max_examples=30)
@given(
    situations(),
    attacks(),
    st.sampled_from([None, 0, 2, "runner-up", "least-likely", "random", "every"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8, 256]),
    st.booleans(),
)
def test_attack_on_a_smoothed_classifier_stays_there_too(
    situation, attack, target, copies, restarts, batch, sized
):
    inputs, labels, epsilon, model = situation
    smoothed = SmoothedAttack(attack, 0.3, copies, restarts=restarts, target=target, batch=batch)
    result = smoothed(model, inputs, labels, epsilon=epsilon if sized else None)
    assert (
        faults(result, inputs, epsilon if sized else torch.full_like(epsilon, attack.epsilon)) == []
    )


def test_rounding_of_many_pixels_does_not_leave_a_small_ball():
    """The sum of image and perturbation alone would be 1.8e-4 outside."""
    inputs, labels = (
        0.5 + torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)) / 2,
        torch.arange(4) % 3,
    )
    model, radii = classifier("ordinary", 3072, torch.float32), torch.full((4,), 1e-4)
    attack = PGD(1e-4, 3)
    assert faults(attack(model, inputs, labels), inputs, radii) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "nextafter", lambda adversarial, inputs: adversarial)
        assert faults(attack(model, inputs, labels), inputs, radii) == ["outside the ball"]


@pytest.mark.parametrize("attack", [ATTACKS[name] for name in ATTACKS], ids=list(ATTACKS))
@pytest.mark.parametrize("targeted, sign", [(False, -1), (True, 1)])
@pytest.mark.parametrize("label", [0, 1])
def test_labels_are_left_or_where_targeted_approached(attack, targeted, sign, label):
    # On the boundary, with the attacked class on the right side by a hair's breadth.
    weight = torch.tensor([3.0, 4.0])
    x = torch.full((1, 2), 0.5)
    towards_label = weight / 5 * (1 if label == 1 else -1)
    side = 1 if (label == 1) != targeted else -1
    attacked = attack(0.25, 5, targeted=targeted)(
        linear_classifier(weight, -3.5 + side * 1e-3, torch.float32), x, torch.tensor([label])
    )
    assert ((attacked - x) @ towards_label).item() * sign > 0.01


vectors = st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3).map(
    lambda values: torch.tensor([values])
)


@given(vectors, st.sampled_from([1e-30, 1e-20, 1.0, 1e20, 1e30]))
def test_unit_has_norm_one_at_every_scale_and_leaves_zero_alone(v, scale):
    v = v * scale
    length = v.double().norm().item()
    expected = v.double() / length if v.any() else torch.zeros_like(v).double()
    torch.testing.assert_close(unit(v).double(), expected, rtol=1e-5, atol=1e-6)
    assert l2_norm(v).item() == pytest.approx(length, rel=1e-5, abs=1e-44)  # subnormal


def test_norms_are_taken_over_all_dimensions_of_each_example():
    v = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = (v**2).sum((1, 2, 3)).sqrt()
    torch.testing.assert_close(l2_norm(v), expected)
    torch.testing.assert_close(unit(v), v / expected[:, None, None, None])


@given(vectors, st.floats(0.001, 3))
def test_ball_projection_shortens_what_is_too_long_and_nothing_else(v, epsilon):
    length = v.norm().item()
    projected = project_ball(v, epsilon)
    torch.testing.assert_close(
        projected, v if length <= epsilon else v * (epsilon / length), rtol=1e-5, atol=1e-7
    )


@given(vectors, st.sampled_from([0.1, 1.0, 5.0]), st.integers(0, 100))
def test_box_projection_is_the_nearest_perturbation_that_keeps_an_image(v, scale, seed):
    x, v = torch.rand(1, 3, generator=torch.Generator().manual_seed(seed)), v * scale
    expected = [
        min(max(value, -pixel), 1 - pixel) for value, pixel in zip(v[0].tolist(), x[0].tolist())
    ]
    torch.testing.assert_close(project_box(x, v)[0], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_grey_levels_stay_inside_the_ball_and_off_its_sphere():
    """A perturbation of 3 and 4 levels has length 5: it is shortened at a radius of 5 levels, and
    kept above that.
    """
    x, moved = torch.tensor([[100.0, 100.0]]) / 255, torch.tensor([[103.0, 104.0]]) / 255
    radius = torch.tensor([5.0], dtype=torch.float64) / 255
    assert float(radius) * 255 == 5, "the sphere is hit to the last bit"
    (on_it,) = (in_grey_levels(x, moved, radius) * 255).round().tolist()
    assert (on_it[0] - 100) ** 2 + (on_it[1] - 100) ** 2 < 25 and on_it != [100, 100]
    (kept,) = (in_grey_levels(x, moved, radius * (1 + 1e-9)) * 255).round().tolist()
    assert kept == [103, 104]
