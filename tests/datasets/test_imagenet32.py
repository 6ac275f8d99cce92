"""ImageNet32: the published pickled batches, and nothing but arrays in them."""

import pickle
import re

import numpy as np
import pytest

from smoothadv.base.errors import UserError
from smoothadv.datasets import describe_dataset, get_dataset
from support.traps import Trap

TRAINING_FILES = [f"train_data_batch_{number}" for number in range(1, 11)]


def batch_content(seed: int, images: int = 3) -> dict:
    """A batch as published: 'data' uint8 [N, 3072], 'labels' a list of 1..1000, 'mean' the mean
    image.
    """
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (images, 3072), dtype=np.uint8)
    return {"data": data, "labels": random.integers(1, 1001, images).tolist(), "mean": data.mean(0)}


def write(path, content):
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def assert_holds(dataset, contents: list[dict]) -> None:
    rows = np.concatenate([content["data"] for content in contents])
    labels = [label - 1 for content in contents for label in content["labels"]]
    assert len(dataset) == len(rows)
    for index, (row, label) in enumerate(zip(rows, labels)):
        image, found = dataset[index]
        red, green, blue = (
            row[:1024].reshape(32, 32),
            row[1024:2048].reshape(32, 32),
            row[2048:].reshape(32, 32),
        )
        assert np.array_equal(
            image.numpy(), np.stack([red, green, blue]).astype(np.float32) / np.float32(255)
        )
        assert found == label


def test_validation_file_is_read_with_labels_counted_from_0(tmp_path):
    content = batch_content(0)
    content["labels"][:2] = [1, 1000]
    write(tmp_path / "val_data", content)
    dataset = get_dataset("imagenet32", "test", tmp_path)
    assert_holds(dataset, [content])
    assert [dataset[0][1], dataset[1][1]] == [0, 999]


@pytest.mark.parametrize("folder", [".", "Imagenet32_train"])
def test_the_ten_training_files_follow_each_other_in_numerical_order(tmp_path, folder):
    """In one folder with val_data, or beside it as for the released code."""
    contents = [batch_content(seed, images=2) for seed in range(10)]
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, content in zip(TRAINING_FILES, contents):
        write(tmp_path / folder / name, content)
    assert_holds(get_dataset("imagenet32", "train", tmp_path), contents)


def test_a_missing_training_file_is_named(tmp_path):
    for name in TRAINING_FILES[:-1]:
        write(tmp_path / name, batch_content(0))
    with pytest.raises(UserError, match="train_data_batch_10.*--data-dir"):
        get_dataset("imagenet32", "train", tmp_path)


def test_a_file_that_asks_to_run_a_command_is_refused_before_it_runs(tmp_path):
    write(tmp_path / "val_data", {**batch_content(0), "mean": Trap(tmp_path / "sprung")})
    with pytest.raises(UserError, match="val_data.*system"):
        get_dataset("imagenet32", "test", tmp_path)
    assert not (tmp_path / "sprung").exists()
    # The same file is no dud: a plain unpickler runs the command.
    pickle.loads((tmp_path / "val_data").read_bytes())
    assert (tmp_path / "sprung").exists()


FAULTS = {
    "label 0": {"labels": [0, 1, 2]},
    "label 1001": {"labels": [1, 2, 1001]},
    "fewer labels than images": {"labels": [1, 2]},
    "no images": {"data": np.zeros((0, 3072), np.uint8), "labels": []},
    "images of another size": {"data": np.zeros((3, 3073), np.uint8)},
    "labels that are no numbers": {"labels": ["cat", "dog", "bird"]},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_inconsistent_content_is_refused_by_file_name(tmp_path, fault):
    write(tmp_path / "val_data", {**batch_content(0), **fault})
    with pytest.raises(UserError, match="val_data"):
        get_dataset("imagenet32", "test", tmp_path)


@pytest.mark.parametrize("label", [0, 1001])
def test_label_out_of_range_is_stated(tmp_path, label):
    write(tmp_path / "val_data", {**batch_content(0), "labels": [5, label, 7]})
    with pytest.raises(UserError) as error:
        get_dataset("imagenet32", "test", tmp_path)
    assert re.search(rf"\b{label}\b", str(error.value).replace(str(tmp_path), ""))


@pytest.mark.parametrize("key", ["data", "labels"])
def test_missing_entry_is_named(tmp_path, key):
    content = batch_content(0)
    del content[key]
    write(tmp_path / "val_data", content)
    with pytest.raises(UserError, match=f"val_data.*{key}"):
        get_dataset("imagenet32", "test", tmp_path)


def test_description_has_1000_classes_and_the_constants_of_cifar10():
    description = describe_dataset("imagenet32")
    assert (description.num_classes, description.image_shape) == (1000, (3, 32, 32))
    assert description.mean == (0.4914, 0.4822, 0.4465) and description.std == (
        0.2023,
        0.1994,
        0.2010,
    )
