"""A noisy image is a function of its address (seed, example, purpose, draw): nothing else in a run
can change a bit.

The tests cover both kinds of noise that votes are counted with.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smoothadv.noise import GaussianNoise, Noise, Purpose, RoundedGaussianNoise, Rows, streams
from support import slow_noise

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_draws_are_the_same_with_any_number_of_threads(kind, threads):
    image, noise, before = image_of((3, 32, 32)), kind(0.5, 1), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = noise.stream(0, "cpu").noisy(100, image)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, one_by_one(noise, image, 0, 0, 100))


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


@pytest.mark.parametrize("kind", KINDS)
def test_noisy_copies_and_draws_are_the_same_numbers_of_a_stream(kind):
    """``draw`` is ``noisy`` on a black image, and both advance the stream."""
    image, noise = image_of((1, 4, 4)), kind(0.25, 0)
    stream = noise.stream(6, "cpu")
    black, whole = torch.zeros(1, 4, 4), noise.stream(6, "cpu").noisy(9, image)
    assert torch.equal(stream.noisy(2, image), whole[:2])
    assert torch.equal(stream.draw(3, image), noise.stream(6, "cpu").noisy(9, black)[2:5])
    assert stream.reserve(1) == 5
    assert torch.equal(stream.noisy(3, image), whole[6:])


def words_at(noise: Noise, examples, purposes, firsts, draws: int, counters: int) -> torch.Tensor:
    """The four words of every counter of every draw: [number, 4]."""
    found = []
    for example in examples:
        for purpose in purposes:
            for first in firsts:
                for _, words in noise.words(cpu, counters, draws, example, first, purpose):
                    found.append(torch.stack(words, dim=-1).reshape(-1, 4))
    return torch.cat(found)


def test_no_two_addresses_share_their_words():
    numbers = [0, 1, 2, 255, 256, 2**16, 2**16 + 1, 2**31, MOST - 9]
    words = words_at(GaussianNoise(0.25, 0), numbers, Purpose, [0, 20, 2**16, MOST - 8], 8, 16)
    assert len(words) == 9 * len(Purpose) * 4 * 8 * 16
    # Philox is a permutation of the counters, so that no two blocks can be equal, however many
    # there are.
    assert len(words.unique(dim=0)) == len(words)
    # Single words, where a shifted stream would show, have as many equal pairs as chance gives,
    # within 6 deviations.
    single = words.flatten()
    pairs = len(single) ** 2 / 2 / MOST
    assert abs(len(single) - len(single.unique()) - pairs) < 6 * pairs**0.5 + 1


def test_overlapping_streams_would_be_noticed():
    noise = GaussianNoise(0.25, 0)
    words = torch.cat([words_at(noise, [3], [0], [first], 8, 16) for first in (0, 7)])
    assert len(words.unique(dim=0)) == len(words) - 16


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
