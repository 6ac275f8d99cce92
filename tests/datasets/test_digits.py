"""The digits are all of scikit-learn's 1,797 images, split once and for all, without loss."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from smoothadv.datasets import SPLITS, describe_dataset, get_dataset


def grey_levels(dataset) -> np.ndarray:
    """The images [N, 8, 8] on scikit-learn's scale 0..16."""
    return np.stack([dataset[index][0].numpy()[0] for index in range(len(dataset))]) * 16


def labels(dataset) -> np.ndarray:
    return np.array([dataset[index][1] for index in range(len(dataset))])


def expected_members(split: str) -> list[int]:
    """The images of a split by their position in scikit-learn's file: of each class, the last
    fifth is for testing.
    """
    target = load_digits().target
    members = []
    for label in range(10):
        of_class = [index for index in range(len(target)) if target[index] == label]
        tested = round(len(of_class) / 5)
        members += of_class[-tested:] if split == "test" else of_class[:-tested]
    return sorted(members)


def test_no_image_occurs_in_both_splits():
    contents = {
        split: {image.tobytes() for image in grey_levels(get_dataset("digits", split))}
        for split in SPLITS
    }
    assert len(contents["train"]) + len(contents["test"]) == 1797
    assert not contents["train"] & contents["test"]


@pytest.mark.parametrize("split", SPLITS)
def test_split_is_fixed_and_keeps_the_order_of_the_file_and_its_17_grey_levels(split):
    members, dataset = expected_members(split), get_dataset("digits", split)
    assert labels(dataset).tolist() == load_digits().target[members].tolist()
    levels, original = grey_levels(dataset), load_digits().images[members]
    assert np.array_equal(np.rint(levels), original)
    assert set(np.rint(levels).ravel()) == set(range(17))
    # The nearest of 255 levels is at most half a level away.
    assert np.abs(levels - original).max() <= 0.5 * 16 / 255 + 1e-6


def test_documented_constants_are_those_of_the_training_images():
    description = describe_dataset("digits")
    pixels = grey_levels(get_dataset("digits", "train")).astype(np.float64) / 16
    assert description.mean == (pytest.approx(pixels.mean(), abs=5e-5),)
    assert description.std == (pytest.approx(pixels.std(), abs=5e-5),)
    assert description.image_shape == (1, 8, 8)
    assert description.class_names == tuple("0123456789")
    assert not description.horizontal_flip, "a mirrored digit is none"
