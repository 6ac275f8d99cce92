"""Augmentation, against pad, cut and mirror pixel by pixel; batches and fingerprints of images in
memory; preparations: what their text means, and that torchvision and timm make the same pixels.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import chi2
from torchvision.transforms import InterpolationMode, v2

from smoothadv.datasets import CIFAR_TRAINING, DatasetDescription, get_dataset
from smoothadv.datasets.images import (
    InMemoryImages,
    augmented,
    draw_augmentation,
    pixels_of,
)
from smoothadv.datasets.preparation import (
    INTERPOLATIONS,
    SQUASH,
    Preparation,
    split_location,
)
from support.image_files import random_image, save_image
from support.refusals import refusal

CPU = torch.device("cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def in_memory(
    images: np.ndarray, labels: list[int], padding: int = 1, flip: bool = True
) -> InMemoryImages:
    description = DatasetDescription(
        "made up",
        ("a", "b", "c"),
        tuple(images.shape[1:]),
        (0.5,),
        (0.5,),
        CIFAR_TRAINING,
        crop_padding=padding,
        horizontal_flip=flip,
    )
    return InMemoryImages(torch.from_numpy(images.copy()), torch.tensor(labels), description)


def shuffled(number: int, batch_size: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return torch.randperm(number, generator=seeded(seed)).split(batch_size)


@pytest.mark.parametrize("batch_size", [1, 7, 99])
def test_training_batches_are_augmented_as_the_description_says(batch_size):
    images = np.random.default_rng(0).integers(1, 256, (20, 3, 4, 4), dtype=np.uint8)
    batches, chosen = shuffled(20, batch_size), draw_augmentation(20, 2, True, seeded(0))
    dataset = in_memory(images, [index % 3 for index in range(20)], padding=2)
    shown = dataset.training_batches(batches, CPU, seeded(0))
    for batch, (found, labels) in zip(batches, shown, strict=True):
        expected = slow_batch(torch.from_numpy(images), 2, batch.tolist(), chosen)
        assert found.dtype == torch.float32 and labels.dtype == torch.int64
        assert torch.equal((found * 255).round().to(torch.uint8), expected)
        assert torch.equal(labels, batch % 3)


def test_augmentation_of_an_image_does_not_depend_on_the_batches():
    """Nor on which batches are requested: a resumed run, and each of several processes, gets the
    same images.
    """
    pixels = np.random.default_rng(0).integers(1, 256, (12, 3, 4, 5), dtype=np.uint8)
    dataset = in_memory(pixels, [0] * 12, padding=2)
    (whole, _), *_ = dataset.training_batches([torch.arange(12)], CPU, seeded(4))
    for seed, size, wanted in [(1, 1, slice(None)), (2, 5, slice(None)), (3, 5, slice(1, 2))]:
        batches = shuffled(12, size, seed)[wanted]
        for indices, (images, _) in zip(
            batches, dataset.training_batches(batches, CPU, seeded(4)), strict=True
        ):
            assert torch.equal(images, whole[indices])
    (other, _), *_ = dataset.training_batches([torch.arange(12)], CPU, seeded(5))
    assert not torch.equal(other, whole)


@pytest.mark.parametrize("batch_size", [1, 4, 99])
def test_evaluation_shows_the_images_in_order_and_untouched(batch_size):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 3, 4, 5), dtype=np.uint8)
    dataset = in_memory(pixels, [index % 3 for index in range(10)])
    batches = list(dataset.evaluation_batches(torch.arange(10).split(batch_size), CPU))
    shown = torch.cat([images for images, _ in batches]).numpy()
    assert np.array_equal(shown, pixels.astype(np.float32) / np.float32(255))
    assert torch.cat([labels for _, labels in batches]).tolist() == [
        index % 3 for index in range(10)
    ]
    assert len(batches[0][0]) == min(batch_size, 10)


PIXELS = np.random.default_rng(0).integers(0, 256, (3, 1, 2, 8), dtype=np.uint8)
ONE_PIXEL = (np.arange(PIXELS.size) == 40).astype(np.uint8).reshape(PIXELS.shape)
CHANGES = {
    "one level of one pixel": lambda images, labels: (images + ONE_PIXEL, labels),
    "a label": lambda images, labels: (images, [0, 1, 1]),
    "the order of the images": lambda images, labels: (images[::-1], labels),
    "the order of the labels": lambda images, labels: (images, labels[::-1]),
    "one image less": lambda images, labels: (images[:2], labels[:2]),
    "the same bytes as images of another shape": lambda images, labels: (
        images.reshape(3, 1, 4, 4),
        labels,
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_fingerprint_changes_with(change):
    before = in_memory(PIXELS, [0, 1, 2]).fingerprint()
    assert in_memory(PIXELS, [0, 1, 2]).fingerprint() == before
    assert in_memory(*change(PIXELS, [0, 1, 2])).fingerprint() != before


FALSE_ALARM = 1e-6


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


# Preparations


def picture(height: int, width: int) -> Image.Image:
    """Large shapes with sharp edges and some noise, as photographs have."""
    blocks = np.kron(
        random_image(1, 5, 5), np.ones((height // 5 + 1, width // 5 + 1, 1), dtype=np.uint8)
    )
    return Image.fromarray(blocks[:height, :width] // 2 + random_image(2, height, width) // 2)


# Heights and widths; one is enlarged.
@pytest.mark.parametrize("shape", [(50, 70), (71, 48), (20, 33), (40, 40)])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("resize", [36, 40, SQUASH])
def test_pixels_are_those_of_torchvision_and_timm(shape, interpolation, resize):
    timm = pytest.importorskip("timm.data", reason="timm is not installed")
    image, mode = picture(*shape), InterpolationMode(interpolation)
    found = Preparation(32, resize, interpolation).evaluation(image)
    steps = [
        v2.Resize((32, 32) if resize == SQUASH else resize, mode),
        v2.CenterCrop(32),
        v2.PILToTensor(),
    ]
    assert found.dtype == torch.uint8 and torch.equal(found, v2.Compose(steps)(image))
    crop = (
        {"crop_mode": "squash", "crop_pct": 1.0}
        if resize == SQUASH
        else {"crop_pct": {36: 0.875, 40: 0.8}[resize]}
    )
    of_timm = timm.create_transform(
        32, is_training=False, interpolation=interpolation, normalize=False, **crop
    )
    assert torch.equal(found, of_timm(image))


MEANT = {
    "224": Preparation(224, None),
    "224,235": Preparation(224, 235),
    "224,235,bicubic": Preparation(224, 235, "bicubic"),
    "224,squash": Preparation(224, SQUASH),
}


@pytest.mark.parametrize("text", MEANT)
def test_name_and_preparation_are_each_others_inverse(text):
    assert split_location(f"photos@{text}") == ("photos", MEANT[text])
    assert str(MEANT[text]) == text
    assert Preparation(224).shorter_side == 256 and MEANT["224,squash"].shorter_side is None


@pytest.mark.parametrize(
    "text", ["0", "224,200", "224,235,cubic", "224,,bicubic", "224x224", "100000"]
)
def test_preparation_that_cannot_be_meant_is_refused(text):
    assert "224,256,bicubic" in refusal(split_location, f"photos@{text}", names=f"'{text}'")


@pytest.mark.parametrize("path", ["me@home", "backup@2/photos", "plain", "photos@224"])
def test_paths_are_no_preparations(path, workplace):
    (workplace / "photos@224").mkdir()
    assert split_location(path) == (path, None)


def test_line_of_pixels_that_would_fill_the_memory_is_refused(tmp_path):
    thin = save_image(tmp_path / "ant" / "thin.png", np.zeros((1, 9000, 3), dtype=np.uint8))
    dataset = get_dataset(f"imagefolder:{tmp_path}@224", "test")
    assert "9000x1 pixels" in refusal(dataset.__getitem__, 0, names=thin)
    assert get_dataset(f"imagefolder:{tmp_path}@224,squash", "test")[0][0].shape == (3, 224, 224)
