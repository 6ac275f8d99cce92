"""The Gaussian: its distribution, and that other keys give unrelated draws.

Random checks have a false-alarm probability of 1e-6 over the seeds
(``support.statistical_checks``).
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

from smoothadv.noise import GaussianNoise, Purpose, derive_generator, training_noise
from support.statistical_checks import are_uncorrelated, is_gaussian_sample

IMAGE = torch.zeros(3, 4, 5)


def draws(
    count: int, sigma: float = 0.25, seed: int = 0, example: int = 0, purpose: int = 0
) -> np.ndarray:
    return GaussianNoise(sigma, seed).stream(example, "cpu", purpose).draw(count, IMAGE).numpy()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sigma", [0.12, 1.0])
@pytest.mark.parametrize("of_training", [False, True])
def test_noise_is_gaussian_of_the_stated_scale(sigma, of_training):
    images = torch.zeros(100, 1, 20, 20)
    sample = (
        training_noise(images, 8, sigma, generator(0)).numpy()
        if of_training
        else draws(5_000, sigma)
    )
    assert is_gaussian_sample(sample, sigma)
    # A scale 1 % off would be noticed, in either direction.
    assert not is_gaussian_sample(sample, 1.01 * sigma)
    assert not is_gaussian_sample(sample, 0.99 * sigma)


def test_a_scale_off_by_a_thousandth_is_noticed():
    """The variance of 1e7 draws has a standard error of 4.5e-4. A false alarm for 1 % of the seeds;
    seed 0 is none.
    """
    sample = (
        GaussianNoise(0.25, 0).stream(0, "cpu").draw(2_500, torch.zeros(1, 50, 80)).numpy().ravel()
    )
    squares = np.sum(np.square(sample, dtype=np.float64)) / 0.25**2
    levels = [stats.chi2.cdf(squares / scale**2, len(sample)) for scale in (0.999, 1.0, 1.001)]
    assert [0.005 < level < 0.995 for level in levels] == [False, True, False]


def test_training_noise_is_scaled_standard_noise():
    images = torch.zeros(5, 1, 30, 40, dtype=torch.float64)
    noise, standard = (training_noise(images, 2, sigma, generator(3)) for sigma in (0.25, 1.0))
    reference = torch.empty_like(standard).normal_(generator=generator(3))
    assert torch.allclose(standard, reference, rtol=1e-12) and torch.allclose(
        noise, reference / 4, rtol=1e-12
    )


@dataclass(frozen=True)
class ChosenWords(GaussianNoise):
    """Noise made from the words ``first`` and ``second`` alone."""

    first: int
    second: int

    def words(self, device, counters, draws, example, first, purpose):
        words = (
            torch.full((draws, counters), word, dtype=torch.int64)
            for word in (self.first, self.second)
        )
        yield slice(0, draws), 2 * tuple(words)


@pytest.mark.parametrize("first", [0, 1, 2**31, 2**32 - 2, 2**32 - 1])
@pytest.mark.parametrize("second", [0, 2**30, 2**32 - 1])
def test_no_words_make_noise_beyond_its_largest_value(first, second):
    noise = ChosenWords(0.5, 0, first, second).stream(0, "cpu").draw(1, torch.zeros(1, 2, 2))
    largest = 0.5 * math.sqrt(-2 * math.log(2.0**-33))
    assert bool((noise.abs() <= largest * (1 + 1e-6)).all()) and largest < 0.5 * 6.8
    assert (first > 0) or noise.norm() == pytest.approx(largest * math.sqrt(2), rel=1e-6)


def test_gaussian_check_rejects_another_distribution_of_the_same_moments():
    uniform = np.random.default_rng(0).uniform(-(3**0.5), 3**0.5, 300_000)
    assert not is_gaussian_sample(uniform, 1.0)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_draws_and_coordinates_are_uncorrelated(axis):
    sample = draws(4_000)
    neighbours = np.roll(sample, 1, axis)
    assert are_uncorrelated(sample, neighbours)
    # A tenth of the neighbour mixed in would be noticed.
    assert not are_uncorrelated(sample + 0.1 * neighbours, neighbours)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"example": 2},
        {"purpose": 2},
        {"seed": 0, "example": 1},
        {"example": 0, "purpose": 1},
    ],
)
def test_another_seed_example_or_purpose_gives_unrelated_draws(other):
    key = {"seed": 1, "example": 0, "purpose": 0}
    assert are_uncorrelated(draws(1_000, **key), draws(1_000, **{**key, **other}))


def test_each_use_of_randomness_has_a_purpose_of_its_own():
    """Two names of one IntEnum value would share their streams, for example training and
    certification.
    """
    assert len(Purpose) == len(Purpose.__members__) == len({int(purpose) for purpose in Purpose})


def test_keys_that_differ_only_in_trailing_zeros_give_different_generators():
    seeds = {
        derive_generator("cpu", *key).initial_seed()
        for key in [(), (0,), (1,), (1, 0), (1, 0, 0), (0, 1)]
    }
    assert len(seeds) == 6


def test_global_generators_are_neither_read_nor_changed():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draws(100)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert (draws(100) == first).all()


def test_draws_can_be_changed_without_changing_later_ones():
    stream = GaussianNoise(0.25, 0).stream(0, "cpu")
    stream.draw(10, IMAGE).zero_()
    assert (stream.draw(90, IMAGE).numpy() == draws(100)[10:]).all()


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_noise_has_copies_for_each_image(copies, dtype):
    noise = training_noise(torch.zeros(4, 3, 5, 6, dtype=dtype), copies, 0.25, generator(0))
    assert noise.shape == (4, copies, 3, 5, 6) and noise.dtype == dtype
    # Every copy of every image is a draw of its own.
    assert len(noise.flatten(0, 1).flatten(1).unique(dim=0)) == 4 * copies


def test_training_noise_of_sigma_zero_is_zero():
    assert torch.equal(
        training_noise(torch.ones(2, 1, 3, 3), 4, 0.0, generator(0)), torch.zeros(2, 4, 1, 3, 3)
    )


def test_training_noise_comes_from_its_generator_alone():
    images = torch.zeros(2, 1, 3, 3)
    source = generator(5)
    torch.manual_seed(1)
    first, second = (training_noise(images, 2, 0.25, source) for _ in range(2))
    torch.manual_seed(2)
    assert torch.equal(training_noise(images, 2, 0.25, generator(5)), first)
    assert not torch.equal(first, second)
