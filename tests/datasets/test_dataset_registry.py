"""Names of datasets: what is known, what takes a location, and what every description must
state.
"""

import pytest

from smoothadv.base.errors import UserError
from smoothadv.datasets import DATASETS, SPLITS, describe_dataset, get_dataset
from support.refusals import refusal

PLAIN = [name for name in DATASETS if not DATASETS[name].takes_location]
LOCATED = [name for name in DATASETS if DATASETS[name].takes_location]


def test_documented_datasets_are_plain_names_but_for_imagefolder():
    assert {"digits", "cifar10", "imagenet", "imagenet32"} <= {*PLAIN} and "imagefolder" in LOCATED


@pytest.mark.parametrize("ask", [describe_dataset, lambda name: get_dataset(name, "test")])
def test_unknown_name_lists_the_known_ones_and_suggests_the_close_one(ask):
    message = refusal(ask, "cifar100", names="'cifar100'")
    assert "did you mean 'cifar10'" in message
    assert all(name in message for name in DATASETS)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("location", ["foo", ""])
def test_location_after_a_plain_name_is_refused(name, location):
    with pytest.raises(UserError, match=f"'{name}:{location}'.*imagefolder:PATH"):
        describe_dataset(f"{name}:{location}")


@pytest.mark.parametrize("name", LOCATED)
@pytest.mark.parametrize("colon", ["", ":"])
def test_missing_location_is_asked_for(name, colon):
    with pytest.raises(UserError, match=f"{name}:PATH"):
        describe_dataset(name + colon)


@pytest.mark.parametrize("split", ["val", "Train", ""])
def test_unknown_split_lists_the_known_ones(split):
    with pytest.raises(UserError, match=f"'{split}'.*train, test"):
        get_dataset("digits", split)


@pytest.mark.parametrize("name", PLAIN)
def test_description_is_complete_without_any_file(name, tmp_path):
    description = describe_dataset(name, tmp_path / "nothing here")
    channels, height, width = description.image_shape
    assert description.name == name
    assert channels in (1, 3) and height > 0 and width > 0
    assert len(description.mean) == len(description.std) == channels
    assert all(0 < mean < 1 for mean in description.mean) and all(
        0 < deviation < 1 for deviation in description.std
    )
    assert description.num_classes == len(set(description.class_names)) > 1
    defaults = description.defaults
    assert (
        min(defaults.batch, defaults.epochs, defaults.learning_rate, defaults.learning_rate_step)
        > 0
    )


@pytest.mark.parametrize("split", SPLITS)
def test_items_are_float_images_in_0_1_and_plain_integer_labels(split):
    dataset = get_dataset("digits", split)
    image, label = dataset[len(dataset) - 1]
    assert str(image.dtype) == "torch.float32" and 0 <= image.min() and image.max() <= 1
    assert type(label) is int
