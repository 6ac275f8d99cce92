"""Streams of noise: Philox as published, addresses that share no draws, and the distribution of the
draws.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoothadv.noise import (
    GaussianNoise,
    Noise,
    Purpose,
    RoundedGaussianNoise,
    Rows,
    derive_generator,
    streams,
    training_noise,
)
from smoothadv.noise.philox import philox
from support import slow_noise
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
    sample = (
        training_noise(torch.zeros(100, 1, 20, 20), 8, sigma, generator(0)).numpy()
        if of_training
        else draws(5_000, sigma)
    )
    assert is_gaussian_sample(sample, sigma)
    # A scale 1 % off would be noticed, in either direction.
    assert not is_gaussian_sample(sample, 1.01 * sigma)
    assert not is_gaussian_sample(sample, 0.99 * sigma)


def test_training_noise_is_scaled_standard_noise():
    images = torch.zeros(5, 1, 30, 40, dtype=torch.float64)
    noise, standard = (training_noise(images, 2, sigma, generator(3)) for sigma in (0.25, 1.0))
    reference = torch.empty_like(standard).normal_(generator=generator(3))
    assert torch.allclose(standard, reference, rtol=1e-12) and torch.allclose(
        noise, reference / 4, rtol=1e-12
    )
    assert not training_noise(images, 2, 0.0, generator(3)).any()


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


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_draws_and_coordinates_are_uncorrelated(axis):
    sample = draws(4_000)
    neighbours = np.roll(sample, 1, axis)
    assert are_uncorrelated(sample, neighbours)
    # A tenth of the neighbour mixed in would be noticed.
    assert not are_uncorrelated(sample + 0.1 * neighbours, neighbours)


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


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_noise_has_copies_for_each_image(copies, dtype):
    noise = training_noise(torch.zeros(4, 3, 5, 6, dtype=dtype), copies, 0.25, generator(0))
    assert noise.shape == (4, copies, 3, 5, 6) and noise.dtype == dtype
    # Every copy of every image is a draw of its own.
    assert len(noise.flatten(0, 1).flatten(1).unique(dim=0)) == 4 * copies


words = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
keys = st.tuples(words, words)
counters = st.tuples(words, words, words, words)

# Random123, tests/kat_vectors: zeros, ones and digits of pi.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def fast(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    return tuple(
        int(word) for word in philox(tuple(torch.tensor([value]) for value in counter), key)
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert fast(counter, key) == expected
    assert slow_noise.philox(counter, key) == expected
    # Another number of rounds would be noticed.
    assert expected not in [slow_noise.philox(counter, key, rounds) for rounds in (7, 9, 11)]


@given(counters, keys)
def test_words_are_those_of_a_slow_implementation(counter, key):
    assert fast(counter, key) == slow_noise.philox(counter, key)


KINDS = [GaussianNoise, RoundedGaussianNoise]
MOST = 2**32
many = settings(max_examples=50)
kinds = st.sampled_from([kind(0.25, 3) for kind in KINDS])
# Odd numbers of coordinates leave words over; the last is an image of CIFAR-10.
shapes = st.sampled_from([(1, 1, 1), (1, 2, 3), (3, 5, 1), (1, 8, 8), (3, 5, 7), (3, 32, 32)])
numbers = st.integers(0, 1000) | st.sampled_from([2**16, 2**31, MOST - 50])
cpu = torch.device("cpu")


def image_of(shape: tuple[int, ...]) -> torch.Tensor:
    """A random 8-bit image, whose pixels nearly all differ from their neighbours."""
    grey = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(5))
    return grey.to(torch.float32) / 255


def one_by_one(
    noise: Noise, image: torch.Tensor, example: int, first: int, count: int, purpose: int = 0
):
    """``count`` noisy copies, each requested separately."""
    out = torch.zeros(count, *image.shape)
    for row in range(count):
        noise.stream(example, "cpu", purpose).fill(out[row : row + 1], image, first + row)
    return out


def buffer(rows: int, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A tensor of sevens: contiguous, channels last, or every second row of a larger tensor."""
    if layout == "every second row":
        return torch.full((2 * rows, *shape), 7.0)[::2]
    memory = torch.channels_last if layout == "channels last" else torch.contiguous_format
    return torch.full((rows, *shape), 7.0).contiguous(memory_format=memory)


layouts = st.sampled_from(["contiguous", "channels last", "every second row"])


@many
@given(kinds, shapes, numbers, numbers, st.integers(0, 40), layouts, st.integers(1, 5000))
def test_a_draw_is_the_same_in_every_batch_buffer_and_chunk(
    noise, shape, example, first, count, layout, chunk
):
    image = image_of(shape)
    rows = buffer(count + 5, shape, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_CHUNK", chunk)
        noise.stream(example, "cpu").fill(rows[2 : 2 + count], image, first)
    assert torch.equal(rows[2 : 2 + count], one_by_one(noise, image, example, first, count))
    assert (rows[:2] == 7).all() and (rows[2 + count :] == 7).all(), (
        "the other rows are someone else's"
    )


def test_noise_fills_only_rows_of_its_own():
    image, (one, other) = image_of((3, 5, 7)), (GaussianNoise(0.25, seed) for seed in (3, 4))
    with pytest.raises(ValueError, match="several noises"):
        one.fill(
            torch.empty(4, 3, 5, 7),
            [Rows(noise.stream(4, "cpu"), image, 9, 2) for noise in (one, other)],
        )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_left_over_repeat_the_first(kind):
    image, noise, rows = image_of((3, 5, 7)), kind(0.25, 3), torch.full((5, 3, 5, 7), 7.0)
    noise.fill(rows, [Rows(noise.stream(4, "cpu"), image, 9, 2)])
    assert torch.equal(rows, one_by_one(noise, image, 4, 9, 2)[[0, 1, 0, 0, 0]])


@many
@given(
    kinds,
    shapes,
    st.permutations(range(4)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=12),
)
def test_draws_are_the_same_in_every_order_and_interleaving(noise, shape, order, requests):
    image = image_of(shape)
    open_streams = {example: noise.stream(example, "cpu") for example in order}
    pieces = {example: [torch.zeros(0, *shape)] for example in order}
    for example, count in requests:
        pieces[example].append(open_streams[example].noisy(count, image))
    for example, parts in pieces.items():
        found = torch.cat(parts)
        assert torch.equal(found, one_by_one(noise, image, example, 0, len(found)))


@many
@given(shapes, numbers, numbers, st.sampled_from(Purpose), st.floats(0.05, 2))
def test_gaussian_draws_are_those_of_a_slow_implementation(shape, example, draw, purpose, sigma):
    found = one_by_one(GaussianNoise(sigma, 11), torch.zeros(shape), example, draw, 1, purpose)[0]
    dimension = found.numel()
    for coordinate in {0, dimension // 4, dimension // 2, dimension - 1}:
        expected = slow_noise.gaussian_coordinate(
            coordinate, dimension, sigma, 11, example, purpose, draw
        )
        # Float32 has 24 bits for an angle of up to 2 pi, and for a radius close to 0.
        assert float(found.flatten()[coordinate]) == pytest.approx(
            expected, abs=4e-6 * sigma, rel=1e-5
        )


@many
@given(shapes, numbers, numbers, st.sampled_from(slow_noise.SIGMAS))
def test_the_image_is_added_as_one_sum_of_float32(shape, example, draw, sigma):
    image = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    noise = GaussianNoise(sigma, 4)
    alone = one_by_one(noise, torch.zeros(shape), example, draw, 3)
    expected = image.numpy()[None] + alone.numpy()
    assert expected.dtype == np.float32
    assert (one_by_one(noise, image, example, draw, 3).numpy() == expected).all()


def words_at(noise: Noise, examples, purposes, firsts, draws: int, counters: int) -> torch.Tensor:
    """The four words of every counter of every draw: [number, 4]."""
    return torch.cat(
        [
            torch.stack(words, dim=-1).reshape(-1, 4)
            for example, purpose, first in itertools.product(examples, purposes, firsts)
            for _, words in noise.words(cpu, counters, draws, example, first, purpose)
        ]
    )


def test_no_two_addresses_share_their_words():
    noise = GaussianNoise(0.25, 0)
    numbers = [0, 1, 2, 255, 256, 2**16, 2**16 + 1, 2**31, MOST - 9]
    words = words_at(noise, numbers, Purpose, [0, 20, 2**16, MOST - 8], 8, 16)
    assert len(words) == 9 * len(Purpose) * 4 * 8 * 16
    # Philox is a permutation of the counters, so that no two blocks can be equal, however many
    # there are.
    assert len(words.unique(dim=0)) == len(words)
    # Single words, where a shifted stream would show, have as many equal pairs as chance gives,
    # within 6 deviations.
    single = words.flatten()
    pairs = len(single) ** 2 / 2 / MOST
    assert abs(len(single) - len(single.unique()) - pairs) < 6 * pairs**0.5 + 1
    overlapping = words_at(noise, [3], [0], [0, 7], 8, 16)
    assert len(overlapping.unique(dim=0)) == len(overlapping) - 16, "a control"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("example", "first", "purpose"),
    [
        (-1, 0, 0),
        (MOST, 0, 0),
        (0, -1, 0),
        (0, MOST - 1, 0),
        (0, MOST, 0),
        (0, 0, -1),
        (0, 0, MOST),
    ],
)
def test_addresses_outside_of_their_range_are_refused(kind, example, first, purpose):
    """A number that wrapped around would be the address of another draw."""
    stream = kind(0.25, 0).stream(example, "cpu", purpose)
    with pytest.raises(ValueError, match="address"):
        stream.fill(torch.zeros(2, 1, 2, 2), torch.zeros(1, 2, 2), first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("example", "first", "purpose"), [(MOST - 1, 0, 0), (0, MOST - 2, 0), (0, 0, MOST - 1)]
)
def test_the_last_addresses_are_in_use(kind, example, first, purpose):
    image = image_of((1, 2, 2))
    rows = torch.full((2, 1, 2, 2), 7.0)
    kind(0.25, 0).stream(example, "cpu", purpose).fill(rows, image, first)
    assert torch.equal(rows, one_by_one(kind(0.25, 0), image, example, first, 2, purpose))


def test_no_draws_are_no_error_on_an_accelerator():
    """torch's meta device takes the accelerators' path."""
    assert list(GaussianNoise(0.25, 0).words(torch.device("meta"), 4, 0, 0, 0, 0)) == []


def test_an_image_of_too_many_coordinates_has_no_addresses():
    with pytest.raises(ValueError, match="address"):
        next(GaussianNoise(0.25, 0).words(cpu, MOST + 1, 1, 0, 0, 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sigma", "seed"), [(0.0, 0), (-1.0, 0), (float("nan"), 0), (float("inf"), 0), (0.25, -1)]
)
def test_noise_that_cannot_be_drawn_is_refused(kind, sigma, seed):
    with pytest.raises(ValueError, match="sigma|seed"):
        kind(sigma, seed)


def test_seeds_of_any_size_have_keys_of_their_own():
    image = torch.zeros(1, 4, 4)
    seeds = [0, 1, MOST - 1, MOST, MOST + 1, 2**62, 2**64, 2**128]
    drawn = {
        GaussianNoise(0.25, seed).stream(0, "cpu").draw(1, image).numpy().tobytes()
        for seed in seeds
    }
    assert len(drawn) == len(seeds)
