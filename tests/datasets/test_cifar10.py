"""CIFAR-10 goes through torchvision's own code, here on a tiny archive in the published format."""

import hashlib
import pickle
import tarfile
import urllib.error
import urllib.request

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from smoothadv.base.errors import UserError
from smoothadv.datasets import describe_dataset, get_dataset
from support.refusals import refusal

# The published order, label 0 first.
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = [
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
]
IMAGES_PER_BATCH = 3


def batch_content(name: str) -> dict:
    """A batch as published: rows of 1,024 red, 1,024 green and 1,024 blue values, and a list of
    labels.
    """
    random = np.random.default_rng(BATCHES.index(name))
    return {
        "batch_label": name,
        "data": random.integers(0, 256, (IMAGES_PER_BATCH, 3072), dtype=np.uint8),
        "labels": random.integers(0, 10, IMAGES_PER_BATCH).tolist(),
    }


def md5(path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def offline(monkeypatch):
    """Any attempt to download fails the way it does without a network."""

    def refuse(*arguments, **options):
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def published(tmp_path, monkeypatch, offline):
    """A folder with cifar-10-batches-py/ and cifar-10-python.tar.gz, which torchvision takes for
    the published ones.
    """
    folder = tmp_path / "published" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in BATCHES:
        (folder / name).write_bytes(pickle.dumps(batch_content(name), protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(CLASSES)}, protocol=2))
    archive = folder.parent / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive))
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5(folder / name)] for name in BATCHES[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5(folder / "test_batch")]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5(folder / "batches.meta")})
    return folder.parent


@pytest.mark.parametrize("form", ["archive", "extracted"])
@pytest.mark.parametrize("split, batches", [("train", BATCHES[:5]), ("test", BATCHES[5:])])
def test_images_and_labels_are_those_of_the_batches_in_order(
    published, tmp_path, form, split, batches
):
    folder = tmp_path / "data"
    folder.mkdir()
    name = "cifar-10-python.tar.gz" if form == "archive" else "cifar-10-batches-py"
    (published / name).rename(folder / name)
    dataset = get_dataset("cifar10", split, folder)
    rows = np.concatenate([batch_content(batch)["data"] for batch in batches])
    labels = [label for batch in batches for label in batch_content(batch)["labels"]]
    assert [dataset[index][1] for index in range(len(dataset))] == labels
    for index, row in enumerate(rows):
        red, green, blue = (
            row[:1024].reshape(32, 32),
            row[1024:2048].reshape(32, 32),
            row[2048:].reshape(32, 32),
        )
        expected = np.stack([red, green, blue]).astype(np.float32) / np.float32(255)
        assert np.array_equal(dataset[index][0].numpy(), expected)


def test_description_states_the_published_class_order_and_the_papers_constants_and_schedule():
    description = describe_dataset("cifar10")
    assert description.class_names == CLASSES
    assert description.image_shape == (3, 32, 32)
    assert description.mean == (0.4914, 0.4822, 0.4465)
    assert description.std == (0.2023, 0.1994, 0.2010)
    defaults = description.defaults
    assert (defaults.batch, defaults.epochs) == (256, 150)
    assert (defaults.learning_rate, defaults.learning_rate_step) == (0.1, 50)


def test_nothing_there_and_no_network_is_one_line_that_says_what_to_do(tmp_path, offline):
    message = refusal(get_dataset, "cifar10", "test", tmp_path / "empty", names=tmp_path / "empty")
    assert "cifar-10-python.tar.gz" in message and "--data-dir" in message


def test_damaged_archive_is_not_used(published):
    for file in (published / "cifar-10-batches-py").iterdir():
        file.unlink()
    archive = published / "cifar-10-python.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(UserError, match="could not be downloaded"):
        get_dataset("cifar10", "test", published)


@pytest.mark.parametrize("name", ["cifar-10-batches-py/data_batch_3", "cifar-10-python.tar.gz"])
def test_a_damaged_file_is_named_and_not_said_to_be_absent(published, offline, name):
    (published / "cifar-10-batches-py/test_batch").unlink()
    for other in list(published.glob("*.tar.gz")):
        if other != published / name:
            other.unlink()
    (published / name).write_bytes((published / name).read_bytes()[:-100])
    message = refusal(get_dataset, "cifar10", "test", published, names=published / name)
    assert (
        message.startswith("cifar10 is damaged: ")
        and "is not the published file, by its MD5" in message
    )


def test_images_are_looked_for_in_the_data_folder_of_the_working_folder(
    published, tmp_path, monkeypatch
):
    published.rename(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert len(get_dataset("cifar10", "test")) == IMAGES_PER_BATCH
