"""Noise in integer grey levels: noisy images are functions of image + noise in integers, and the
noise is as stated.

The random checks have a false-alarm probability of 1e-6 over the seeds
(``support.statistical_checks``).
"""

import math
from dataclasses import dataclass
from unittest import mock

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoothadv.base.errors import UserError
from smoothadv.noise import RoundedGaussianNoise
from smoothadv.noise.rounded import _Ranks
from smoothadv.noise.scale import with_exact_levels
from support.slow_noise import (
    SIGMAS,
    clip_of,
    exact_thresholds,
    noisy_grey,
    thresholds,
    uniform_coordinate,
)

CIFAR, IMAGENET = 3 * 32 * 32, 3 * 224 * 224
EVERY_GREY = torch.arange(256, dtype=torch.float32).view(1, 16, 16) / 255
PRODUCTS = torch.arange(256).view(1, 16, 16) * torch.tensor(1 / 255)  # as GPUs divide


@dataclass(frozen=True)
class ChosenNoise(RoundedGaussianNoise):
    """Noise made from given ``uniforms`` [draws, coordinates], not random ones; the number of
    coordinates is even.
    """

    uniforms: torch.Tensor

    def words(self, device, counters, draws, example, first, purpose):
        assert self.uniforms.shape == (draws, 2 * counters)
        halves = self.uniforms.split(counters, dim=1)
        # 32 bits, then 30; the last 2 bits of the second word are not read, and are all ones here.
        words = [part for half in halves for part in (half >> 30, (half & (2**30 - 1)) << 2 | 3)]
        yield slice(0, draws), tuple(words)


def executed(sigma: float, image: torch.Tensor, uniforms: list[int] | torch.Tensor) -> np.ndarray:
    """The noisy images, float32, if every coordinate of draw k is made from the k-th of these
    uniforms.
    """
    column = torch.as_tensor(uniforms, dtype=torch.int64)[:, None]
    noise = ChosenNoise(sigma, 0, column.expand(-1, image.numel()))
    return noise.stream(0, "cpu").noisy(len(column), image).numpy()


def grey_levels(noisy: np.ndarray) -> np.ndarray:
    """The integers Y of float32 values Y / 255."""
    levels = np.rint(noisy.astype(np.float64) * 255).astype(np.int64)
    assert (levels.astype(np.float32) / np.float32(255) == noisy).all()
    return levels


@pytest.mark.parametrize("sigma", SIGMAS)
def test_every_noisy_grey_level_is_a_float_of_its_own(sigma):
    levels = np.arange(-clip_of(sigma), 256 + clip_of(sigma), dtype=np.float32)
    assert len(np.unique(levels / np.float32(255))) == len(levels)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_what_is_executed_depends_on_the_sum_of_image_and_noise_alone(sigma):
    """Exhaustive: every value of a pixel, every integer that noise can be."""
    clip = clip_of(sigma)
    # The smallest uniform that gives each integer: some integers far out have none, for want of
    # bits.
    smallest = {
        value: k - 255 - clip for k, value in enumerate([0, *thresholds(sigma)]) if value < 2**62
    }
    noise = np.array(list(smallest.values()))
    found = executed(sigma, EVERY_GREY, list(smallest)).reshape(len(noise), 256)
    sums = np.clip(np.arange(256)[None, :] + noise[:, None], -clip, 255 + clip)
    assert set(sums.flatten()) == set(range(-clip, 256 + clip))
    assert (found == sums.astype(np.float32) / np.float32(255)).all()


@pytest.mark.parametrize(
    ("sigma", "grey"),
    [*((sigma, 128) for sigma in SIGMAS), *((SIGMAS[0], grey) for grey in (0, 1, 255))],
)
def test_uniforms_at_the_thresholds_and_next_to_them_give_the_right_integers(sigma, grey):
    """The thresholds are those of 60-digit arithmetic: one more or less, of 2^62, would be
    noticed.
    """
    clip, table = clip_of(sigma), thresholds(sigma)
    evenly = range(0, 2**62 + 1, 2**49)
    near = {value + step for value in (*table, *evenly) for step in (-1, 0, 1)}
    uniforms = sorted(value for value in near if 0 <= value < 2**62)
    found = grey_levels(executed(sigma, torch.full((1, 1, 2), grey / 255), uniforms))
    expected = [noisy_grey(grey, uniform, table, clip) for uniform in uniforms]
    assert (found == np.array(expected)[:, None, None, None]).all()


@pytest.mark.parametrize(("sigma", "clip"), [(0.12, 184), (0.25, 383), (0.5, 765), (1.0, 1530)])
def test_noisy_pixels_reach_six_sigma_beyond_black_and_white(sigma, clip):
    assert RoundedGaussianNoise(sigma, 0).clip == clip == math.ceil(6 * 255 * sigma)


@settings(max_examples=25)
@given(
    st.sampled_from([0.03, 0.1, 0.12, 0.25]),
    st.integers(0, 2**40),
    st.sampled_from([(1, 1, 1), (1, 3, 3), (3, 4, 5)]),
    st.integers(0, 2**31),
    st.integers(0, 2**31),
)
def test_draws_are_those_of_a_slow_implementation(sigma, seed, shape, example, draw):
    grey = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed % 1000))
    rows = torch.empty(1, *shape)
    with mock.patch.object(_Ranks, "at_most", autospec=True, side_effect=_Ranks.at_most) as asked:
        RoundedGaussianNoise(sigma, seed).stream(example, "cpu").fill(
            rows, grey.to(torch.float32) / 255, draw
        )
    table, clip, dimension = thresholds(sigma), clip_of(sigma), grey.numel()
    uniforms = [uniform_coordinate(i, dimension, seed, example, 0, draw) for i in range(dimension)]
    expected = [
        noisy_grey(int(g), uniform, table, clip) for g, uniform in zip(grey.flatten(), uniforms)
    ]
    assert grey_levels(rows.numpy()).flatten().tolist() == expected
    assert asked.call_args.args[1].flatten().tolist() == uniforms, (
        "all 62 bits, of which few decide"
    )


# The table in docs/guarantee.md: sigma, for CIFAR-10, for ImageNet; rounded up to two digits.
DISTANCES = [
    (0.12, 9.8e-14, 4.8e-12),
    (0.25, 2.0e-13, 9.6e-12),
    (0.5, 3.4e-13, 1.7e-11),
    (1.0, 5.9e-13, 2.9e-11),
]


@pytest.mark.parametrize("sigma, cifar, imagenet", DISTANCES)
def test_distance_is_a_tight_bound_and_grows_with_sigma_as_documented(sigma, cifar, imagenet):
    noise = RoundedGaussianNoise(sigma, 0)
    pairs = zip(exact_thresholds(sigma), thresholds(sigma))
    with mpmath.workdps(60):
        of_one = mpmath.fsum(abs(value - whole) for value, whole in pairs) / 2**62
    for dimension, documented in [(1, 3e-16), (CIFAR, cifar), (IMAGENET, imagenet)]:
        exact = dimension * of_one
        assert exact <= noise.distance(dimension) <= exact * (1 + mpmath.mpf("1e-11"))
        assert noise.distance(dimension) <= dimension * (255 + noise.clip) * 2.0**-62
        assert noise.distance(dimension) <= documented and (
            dimension == 1 or documented < 1.05 * exact
        )


def test_a_product_with_the_rounded_reciprocal_is_the_next_float_for_126_grey_levels():
    # Those that begin with two ones in binary, but for white.
    differing = [level for level in range(255) if f"{level:b}".startswith("11")]
    assert torch.equal(EVERY_GREY.nextafter(PRODUCTS), PRODUCTS) and differing == (
        (PRODUCTS != EVERY_GREY).flatten().nonzero().flatten().tolist()
    )


@pytest.mark.parametrize("towards", [0.0, 1.0])
def test_the_float_next_to_a_grey_level_means_it_and_the_one_after_is_refused(towards):
    limit, noise = torch.tensor(towards), RoundedGaussianNoise(0.25, 0)
    near = torch.nextafter(EVERY_GREY, limit).where(EVERY_GREY > 0, -0.0)
    for image in (EVERY_GREY, PRODUCTS, near):
        assert torch.equal(*(noise.stream(0, "cpu").noisy(3, one) for one in (image, EVERY_GREY)))
        assert with_exact_levels(image).numpy().tobytes() == EVERY_GREY.numpy().tobytes()
        assert (image - (EVERY_GREY.double() * 255).round() / 255).abs().max() <= 1.5 * 2**-24, (
            "as docs/guarantee.md says"
        )
    after = torch.nextafter(near, limit)
    for value in after[after != near]:
        with pytest.raises(UserError, match=f"value {value:.9g}, expected k/255 with k in 0..255"):
            noise.check_image(value.view(1, 1, 1))
    assert torch.equal(
        with_exact_levels(torch.stack([near, near * 0.9])), torch.stack([EVERY_GREY, near * 0.9])
    )


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        -1 / 255,
        256 / 255,
        1e-9,
        -1e-9,
        1 + 2**-23,
        1e-45,
        -1e-45,
        200.0,
        float("nan"),
        float("inf"),
        float("-inf"),
    ],
)
def test_other_images_are_refused(value):
    """Rounding them would move them by up to half a grey level per pixel, which no radius accounts
    for.
    """
    image = EVERY_GREY.clone()
    image[0, 3, 4] = value
    with pytest.raises(UserError, match="^this one is not of 8 bits: it has the value"):
        RoundedGaussianNoise(0.25, 0).stream(0, "cpu").noisy(1, image, "this one")
