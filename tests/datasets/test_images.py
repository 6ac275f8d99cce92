"""Augmentation, batches and fingerprints: what in-memory and streamed images share."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import PILToTensor

from smoothadv.datasets.description import CIFAR_TRAINING, DatasetDescription
from smoothadv.datasets.images import InMemoryImages, StreamedImages
from support.augmenting import augment
from support.image_files import random_image, save_image

CPU = torch.device("cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def crop_and_flip(image: np.ndarray, padding: int, top: int, left: int, flip: bool) -> np.ndarray:
    """One augmentation of an image [C, H, W], pixel by pixel: pad with zeros, cut H x W out, mirror."""
    channels, height, width = image.shape
    result = np.zeros_like(image)
    for channel, row, column in product(range(channels), range(height), range(width)):
        source_row = row + top - padding
        source_column = (width - 1 - column if flip else column) + left - padding
        if 0 <= source_row < height and 0 <= source_column < width:
            result[channel, row, column] = image[channel, source_row, source_column]
    return result


def all_augmentations(image: np.ndarray, padding: int, horizontal_flip: bool) -> dict[bytes, tuple]:
    """Every outcome that the augmentation may have, by its bytes."""
    shifts = range(2 * padding + 1)
    return {
        crop_and_flip(image, padding, top, left, flip).tobytes(): (top, left, flip)
        for top, left, flip in product(shifts, shifts, (False, True) if horizontal_flip else (False,))
    }


@given(
    channels=st.integers(1, 3),
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    batch=st.integers(1, 4),
    padding=st.integers(0, 3),
    horizontal_flip=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_image_becomes_one_of_its_crops_and_flips(channels, height, width, batch, padding, horizontal_flip, seed):
    images = np.random.default_rng(seed).integers(1, 256, (batch, channels, height, width), dtype=np.uint8)
    augmented = augment(torch.from_numpy(images), padding, horizontal_flip, seeded(seed)).numpy()
    assert augmented.shape == images.shape and augmented.dtype == images.dtype
    for before, after in zip(images, augmented):
        assert after.tobytes() in all_augmentations(before, padding, horizontal_flip)


def test_without_padding_and_flips_images_stay_as_they_are():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 5, 6), dtype=np.uint8))
    assert torch.equal(augment(images, 0, False, seeded(0)), images)


def is_uniform(outcomes: list, possibilities: int) -> bool:
    """Chi-square test at level 1e-6: each of the possible outcomes is as frequent as any other."""
    counts = Counter(outcomes)
    expected = len(outcomes) / possibilities
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    statistic += (possibilities - len(counts)) * expected
    return statistic < chi2.ppf(1 - 1e-6, possibilities - 1)


def outcomes_of_copies(copies: int, seed: int, padding: int = 1, horizontal_flip: bool = True) -> list[tuple]:
    """(top, left, flip) that a batch of copies of one image underwent."""
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 3, 3)
    known = all_augmentations(image, padding, horizontal_flip)
    batch = torch.from_numpy(image).expand(copies, 1, 3, 3)
    return [known[after.tobytes()] for after in augment(batch, padding, horizontal_flip, seeded(seed)).numpy()]


def test_all_crops_and_flips_are_equally_likely():
    # A fixed seed; with a random one this would be a false alarm once in a million times.
    outcomes = outcomes_of_copies(9_000, seed=1)
    assert is_uniform(outcomes, 18)
    # Negative controls: crops without flips, and flips in two of three cases.
    assert not is_uniform([(top, left, False) for top, left, _ in outcomes], 18)
    assert not is_uniform([(top, left, flip or top == 0) for top, left, flip in outcomes], 18)


def test_images_of_a_batch_are_augmented_independently_of_each_other():
    # Neighbours in a batch: all 18 x 18 pairs equally likely. False alarm once in a million seeds.
    outcomes = outcomes_of_copies(20_000, seed=2)
    pairs = list(zip(outcomes[::2], outcomes[1::2]))
    assert is_uniform(pairs, 324)
    # Negative control: pairs that share their flip.
    assert not is_uniform([(one, (*two[:2], one[2])) for one, two in pairs], 324)


def in_memory(images: np.ndarray, labels: list[int], padding: int = 1, flip: bool = True) -> InMemoryImages:
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
    """Batches of indices, all of them in a random order."""
    return torch.randperm(number, generator=seeded(seed)).split(batch_size)


def distinct_images(number: int = 10) -> InMemoryImages:
    """Images of one nonzero grey level each: flips do not change them, and the level identifies the image."""
    images = np.arange(1, number + 1, dtype=np.uint8).repeat(9).reshape(number, 1, 3, 3)
    return in_memory(images, [index % 3 for index in range(number)])


@pytest.mark.parametrize("batch_size", [1, 3, 10, 99])
def test_an_epoch_shows_every_image_once_with_its_label(batch_size):
    batches = list(distinct_images().training_batches(shuffled(10, batch_size), CPU, seeded(0)))
    # The centre pixel survives any crop after padding by one.
    levels = [round(float(image[0, 1, 1]) * 255) for images, _ in batches for image in images]
    labels = [int(label) for _, labels in batches for label in labels]
    assert sorted(levels) == list(range(1, 11)) and levels != sorted(levels)
    assert labels == [(level - 1) % 3 for level in levels]
    assert [len(images) for images, _ in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert all(images.dtype == torch.float32 and labels.dtype == torch.int64 for images, labels in batches)


def test_training_batches_are_augmented_as_the_description_says():
    images = np.random.default_rng(0).integers(1, 256, (20, 3, 4, 4), dtype=np.uint8)
    dataset = in_memory(images, [0] * 20, padding=2, flip=True)
    known = [all_augmentations(image, 2, True) for image in images]
    shown = [
        (image * 255).round().to(torch.uint8).numpy().tobytes()
        for batch, _ in dataset.training_batches(shuffled(20, 7), CPU, seeded(0))
        for image in batch
    ]
    assert all(any(image in outcomes for outcomes in known) for image in shown)
    assert len(set(shown) - {image.tobytes() for image in images}) > 10  # 49 of 50 outcomes change an image


def epoch(dataset: InMemoryImages, generator: torch.Generator) -> torch.Tensor:
    return torch.cat([images for images, _ in dataset.training_batches(shuffled(len(dataset), 3), CPU, generator)])


def test_an_epoch_is_a_function_of_the_generator():
    dataset = distinct_images()
    torch.manual_seed(0)
    first = epoch(dataset, seeded(5))
    torch.manual_seed(1)  # the global generator must not matter
    assert torch.equal(epoch(dataset, seeded(5)), first)
    assert not torch.equal(epoch(dataset, seeded(6)), first)


def test_augmentation_of_an_image_does_not_depend_on_the_batches():
    """Nor on which batches are requested: a resumed run, and each of several processes, gets the same images."""
    pixels = np.random.default_rng(0).integers(1, 256, (12, 3, 4, 5), dtype=np.uint8)
    dataset = in_memory(pixels, [0] * 12, padding=2)
    (whole, _), *_ = dataset.training_batches([torch.arange(12)], CPU, seeded(4))
    for seed, size, wanted in [(1, 1, slice(None)), (2, 5, slice(None)), (3, 5, slice(1, 2))]:
        batches = shuffled(12, size, seed)[wanted]
        for indices, (images, _) in zip(batches, dataset.training_batches(batches, CPU, seeded(4)), strict=True):
            assert torch.equal(images, whole[indices])
    (other, _), *_ = dataset.training_batches([torch.arange(12)], CPU, seeded(5))
    assert not torch.equal(other, whole)


def test_training_leaves_the_images_as_they_were():
    dataset = distinct_images()
    before = dataset.images.clone()
    epoch(dataset, seeded(0))
    assert torch.equal(dataset.images, before)


@pytest.mark.parametrize("batch_size", [1, 4, 99])
def test_evaluation_shows_the_images_in_order_and_untouched(batch_size):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 3, 4, 5), dtype=np.uint8)
    dataset = in_memory(pixels, [index % 3 for index in range(10)])
    batches = list(dataset.evaluation_batches(torch.arange(10).split(batch_size), CPU))
    shown = torch.cat([images for images, _ in batches]).numpy()
    assert np.array_equal(shown, pixels.astype(np.float32) / np.float32(255))
    assert torch.cat([labels for _, labels in batches]).tolist() == [index % 3 for index in range(10)]
    assert len(batches[0][0]) == min(batch_size, 10)


PIXELS = np.random.default_rng(0).integers(0, 256, (3, 1, 2, 8), dtype=np.uint8)
ONE_PIXEL = (np.arange(PIXELS.size) == 40).astype(np.uint8).reshape(PIXELS.shape)
CHANGES = {
    "one level of one pixel": lambda images, labels: (images + ONE_PIXEL, labels),
    "a label": lambda images, labels: (images, [0, 1, 1]),
    "the order of the images": lambda images, labels: (images[::-1], labels),
    "the order of the labels": lambda images, labels: (images, labels[::-1]),
    "one image less": lambda images, labels: (images[:2], labels[:2]),
    "the same bytes as images of another shape": lambda images, labels: (images.reshape(3, 1, 4, 4), labels),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_fingerprint_changes_with(change):
    before = in_memory(PIXELS, [0, 1, 2]).fingerprint()
    assert in_memory(PIXELS, [0, 1, 2]).fingerprint() == before
    assert in_memory(*change(PIXELS, [0, 1, 2])).fingerprint() != before


@pytest.fixture
def streamed(tmp_path):
    """Makes StreamedImages of two files under a folder; ``edit`` may change the list of (path, label) first."""

    def make(root="one", edit=lambda files: files):
        files = [
            (str(save_image(tmp_path / root / f"class{label}" / "a.png", random_image(label))), label)
            for label in (0, 1)
        ]
        description = DatasetDescription("made up", ("0", "1"), (3, 4, 5), (0.5,) * 3, (0.5,) * 3, CIFAR_TRAINING)
        return StreamedImages(edit(files), pil_loader, PILToTensor(), PILToTensor(), description)

    return make


def test_streamed_fingerprint_does_not_depend_on_where_the_folder_lies(streamed):
    assert streamed("one").fingerprint() == streamed("two").fingerprint()


STREAMED_CHANGES = {
    "a label": lambda files: [files[0], (files[1][0], 0)],
    "the order": lambda files: files[::-1],
    "one image less": lambda files: files[:1],
    "another file": lambda files: [files[0], (files[0][0], files[1][1])],
}


@pytest.mark.parametrize("change", STREAMED_CHANGES.values(), ids=STREAMED_CHANGES)
def test_streamed_fingerprint_changes_with(streamed, change):
    assert streamed(edit=change).fingerprint() != streamed().fingerprint()


def test_streamed_fingerprint_changes_with_the_size_of_a_file(streamed):
    dataset = streamed()
    before = dataset.fingerprint()
    path, _ = streamed()._evaluation.files[0]
    with open(path, "ab") as file:
        file.write(b"x")
    assert dataset.fingerprint() != before
