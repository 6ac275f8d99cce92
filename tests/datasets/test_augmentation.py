"""Drawing an augmentation and applying it, against pad, cut and mirror pixel by pixel; every
choice equally likely.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from smoothadv.datasets.images import augmented, draw_augmentation, pixels_of

FALSE_ALARM = 1e-6


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def padded(image: list, padding: int) -> list:
    """One channel, a list of rows, with zeros on all sides."""
    width = len(image[0]) + 2 * padding
    empty = [[0] * width for _ in range(padding)]
    return empty + [[0] * padding + row + [0] * padding for row in image] + empty


def slow_augmentation(
    image: torch.Tensor, padding: int, top: int, left: int, mirrored: bool
) -> list:
    """An image [C, H, W]: pad with zeros, cut H x W at (top, left), mirror; nested lists of
    numbers.
    """
    _, height, width = image.shape
    result = []
    for channel in image.tolist():
        cut = [row[left : left + width] for row in padded(channel, padding)[top : top + height]]
        result.append([row[::-1] for row in cut] if mirrored else cut)
    return result


def slow_batch(
    images: torch.Tensor, padding: int, indices: list[int], chosen: torch.Tensor
) -> torch.Tensor:
    """Images ``indices``, each as ``chosen`` for it among all images."""
    mirrored, *shifts = chosen.tolist()
    tops, lefts = ([padding + shift for shift in row] for row in shifts)
    result = [
        slow_augmentation(images[one], padding, tops[one], lefts[one], bool(mirrored[one]))
        for one in indices
    ]
    return torch.tensor(result, dtype=images.dtype)


@st.composite
def cases(draw):
    """Images without a black pixel, so that padding shows, an augmentation for each and some
    indices.
    """
    number, channels = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3]))
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.uint8, torch.float32]))
    seed = draw(st.integers(0, 2**32 - 1))
    images = torch.randint(1, 256, (number, channels, *shape), generator=seeded(seed)).to(dtype)
    padding = draw(st.integers(0, 4))
    chosen = draw_augmentation(number, padding, draw(st.booleans()), seeded(seed + 1))
    indices = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=7))
    return images, padding, chosen, indices


@given(cases())
def test_images_are_padded_cut_and_mirrored(case):
    images, padding, chosen, indices = case
    asked = torch.tensor(indices)
    result = augmented(pixels_of(images), tuple(images.shape[2:]), asked, chosen[:, asked])
    expected = slow_batch(images, padding, indices, chosen)
    assert result.dtype == images.dtype and result.shape == (len(indices), *images.shape[1:])
    assert torch.equal(result, expected)
    # Channels last in memory, whatever the strides of dimensions of size 1.
    assert result.permute(0, 2, 3, 1).is_contiguous()
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_images_in_any_memory_format_have_the_same_pixels():
    images = torch.randint(0, 256, (3, 3, 4, 5), dtype=torch.uint8, generator=seeded(0))
    last = images.contiguous(memory_format=torch.channels_last)
    for each in (last, images.flip(3).flip(3), images.repeat(2, 1, 1, 1)[:3]):
        assert torch.equal(pixels_of(each), pixels_of(images))


def is_uniform(outcomes: list, possibilities: int) -> bool:
    """Chi-square test at level FALSE_ALARM that each of so many outcomes is as likely as any
    other.
    """
    counts, expected = Counter(outcomes), len(outcomes) / possibilities
    assert expected >= 10 and len(counts) <= possibilities
    statistic = sum((count - expected) ** 2 for count in counts.values()) / expected
    statistic += (possibilities - len(counts)) * expected
    return statistic < chi2.ppf(1 - FALSE_ALARM, possibilities - 1)


@pytest.mark.parametrize("padding", [1, 2, 4])
def test_row_column_and_mirror_are_drawn_uniformly_and_independently(padding):
    # A fixed seed; with a random one this would be a false alarm once in a million times.
    number, side = 40_000, 2 * padding + 1
    chosen = draw_augmentation(number, padding, True, seeded(padding))
    flips, *shifts = chosen.tolist()
    outcomes = list(zip(*shifts, flips))
    assert is_uniform(outcomes, 2 * side**2)
    # Negative controls: offsets without the last one, a flip that depends on the crop, rows that
    # equal the columns.
    assert not is_uniform(
        [(min(row, padding - 1), column, flip) for row, column, flip in outcomes], 2 * side**2
    )
    assert not is_uniform(
        [(row, column, row == 0 or flip) for row, column, flip in outcomes], 2 * side**2
    )
    assert not is_uniform([(row, row, flip) for row, _, flip in outcomes], 2 * side**2)


@pytest.mark.parametrize("flip", [False, True])
def test_neighbours_are_drawn_independently(flip):
    # All pairs of choices of two neighbouring images: a false alarm in one of a million seeds.
    chosen = draw_augmentation(80_000, 1, flip, seeded(20 + flip))
    outcomes = list(zip(*chosen.tolist()))
    possibilities = (9 * (1 + flip)) ** 2
    pairs = list(zip(outcomes[::2], outcomes[1::2]))
    assert is_uniform(pairs, possibilities)
    assert not is_uniform([(one, (two[0], one[1], two[2])) for one, two in pairs], possibilities), (
        "the control"
    )


def test_share_of_mirrored_images_is_a_half_without_crops_as_well():
    outcomes = draw_augmentation(40_000, 0, True, seeded(3))[0].tolist()
    assert is_uniform(outcomes, 2)
    assert not is_uniform([flip or index % 20 == 0 for index, flip in enumerate(outcomes)], 2), (
        "the control: 52.5%"
    )
