"""What holds for every registered attack: its noise, its target and the model's state; the ball and
the pixel box.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoothadv.attacks import ATTACKS
from smoothadv.attacks.geometry import (
    in_grey_levels,
    l2_norm,
    project_ball,
    project_box,
    unit,
)
from support.models import linear_classifier


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    v = torch.rand(2, 3, 4, 5, generator=generator(0))
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
    x, v = torch.rand(1, 3, generator=generator(seed)), v * scale
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
