"""Datasets known by name: their facts, and digits, imagenet32 and imagenet as they were published;
other names, locations and files are refused.
"""

import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from smoothadv.datasets import DATASETS, SPLITS, describe_dataset, get_dataset
from smoothadv.datasets.sources.imagenet import SYNSETS
from support.image_files import assert_holds, random_image, save_image
from support.refusals import refusal


@pytest.mark.parametrize("ask", [describe_dataset, lambda name: get_dataset(name, "test")])
def test_unknown_name_lists_the_known_ones_and_suggests_the_close_one(ask):
    message = refusal(ask, "cifa10", names="'cifa10'")
    assert "did you mean 'cifar10'" in message
    assert all(name in message for name in DATASETS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(
            (f"{name}:{location}", "imagefolder:PATH")
            for name in DATASETS
            if not DATASETS[name].takes_location
            for location in ("foo", "")
        ),
        *(
            (name + end, f"{name}:{DATASETS[name].location}")
            for name in [name for name in DATASETS if DATASETS[name].takes_location]
            for end in ("", ":")
        ),
    ],
)
def test_location_after_a_plain_name_is_refused_and_a_missing_one_asked_for(name, words):
    assert words in refusal(describe_dataset, name, names=f"'{name}'")


@pytest.mark.parametrize("split", ["val", "Train", ""])
def test_unknown_split_lists_the_known_ones(split):
    refusal(get_dataset, "digits", split, names=f"unknown split '{split}'; known: train, test")


def grey_levels(dataset) -> np.ndarray:
    """The images [N, 8, 8] on scikit-learn's scale 0..16."""
    return np.stack([image.numpy()[0] for image, _ in dataset]) * 16


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


@pytest.mark.parametrize("split", SPLITS)
def test_split_is_fixed_and_keeps_the_order_of_the_file_and_its_17_grey_levels(split):
    members, dataset = expected_members(split), get_dataset("digits", split)
    assert [label for _, label in dataset] == load_digits().target[members].tolist()
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


# The published order, label 0 first.
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


TRAINING_FILES = [f"train_data_batch_{number}" for number in range(1, 11)]


def imagenet32_batch(seed: int, images: int = 3) -> dict:
    """A batch as published: 'data' uint8 [N, 3072], 'labels' a list of 1..1000, 'mean' the mean
    image.
    """
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (images, 3072), dtype=np.uint8)
    return {"data": data, "labels": random.integers(1, 1001, images).tolist(), "mean": data.mean(0)}


def write(path, content):
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def published(contents: list[dict]) -> tuple[np.ndarray, list[int]]:
    """The images of batches, of which a row is 1,024 red, green and blue values, and labels."""
    rows = np.concatenate([content["data"] for content in contents])
    labels = [label - 1 for content in contents for label in content["labels"]]
    return rows.reshape(-1, 3, 32, 32), labels


def test_validation_file_is_read_with_labels_counted_from_0(tmp_path):
    content = imagenet32_batch(0)
    content["labels"][:2] = [1, 1000]
    write(tmp_path / "val_data", content)
    assert_holds(get_dataset("imagenet32", "test", tmp_path), *published([content]))


@pytest.mark.parametrize("folder", [".", "Imagenet32_train"])
def test_the_ten_training_files_follow_each_other_in_numerical_order(tmp_path, folder):
    """In one folder with val_data, or beside it as for the released code."""
    contents = [imagenet32_batch(seed, images=2) for seed in range(10)]
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, content in zip(TRAINING_FILES, contents):
        write(tmp_path / folder / name, content)
    assert_holds(get_dataset("imagenet32", "train", tmp_path), *published(contents))


def test_a_missing_training_file_is_named(tmp_path):
    for name in TRAINING_FILES[:-1]:
        write(tmp_path / name, imagenet32_batch(0))
    message = refusal(get_dataset, "imagenet32", "train", tmp_path, names="train_data_batch_10")
    assert "--data-dir" in message


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
    write(tmp_path / "val_data", {**imagenet32_batch(0), **fault})
    refusal(get_dataset, "imagenet32", "test", tmp_path, names="val_data")


FACTS = {
    "digits": (tuple("0123456789"), (1, 8, 8), (0.3054,), (0.3753,), (128, 60, 0.1, 20)),
    "cifar10": (CLASSES, (3, 32, 32), CIFAR_MEAN, CIFAR_STD, (256, 150, 0.1, 50)),
    "cifar100": (
        100,
        (3, 32, 32),
        (0.5071, 0.4867, 0.4408),
        (0.2675, 0.2565, 0.2761),
        (256, 150, 0.1, 50),
    ),
    "mnist": (tuple("0123456789"), (1, 28, 28), (0.1307,), (0.3081,), (256, 90, 0.01, 30)),
    "fashion-mnist": (10, (1, 28, 28), (0.2860,), (0.3530,), (256, 150, 0.01, 50)),
    "svhn": (
        tuple("0123456789"),
        (3, 32, 32),
        (0.4377, 0.4438, 0.4728),
        (0.1980, 0.2010, 0.1970),
        (256, 150, 0.1, 50),
    ),
    "tiny-imagenet": (
        200,
        (3, 64, 64),
        (0.4802, 0.4481, 0.3975),
        (0.2770, 0.2691, 0.2821),
        (256, 150, 0.1, 50),
    ),
    "imagenet32": (1000, (3, 32, 32), CIFAR_MEAN, CIFAR_STD, (256, 150, 0.1, 50)),
    "imagenet": (
        SYNSETS,
        (3, 224, 224),
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
        (400, 90, 0.1, 30),
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_description_has_the_published_classes_constants_and_schedule(name):
    description = describe_dataset(name)
    assert description.horizontal_flip == (name not in ("digits", "mnist", "fashion-mnist", "svhn"))
    classes, *facts, schedule = FACTS[name]
    found = description.num_classes if isinstance(classes, int) else description.class_names
    assert found == classes
    assert [description.image_shape, description.mean, description.std] == facts
    defaults = description.defaults
    assert schedule == (
        defaults.batch,
        defaults.epochs,
        defaults.learning_rate,
        defaults.learning_rate_step,
    )


def colour_of(label: int, split: str) -> tuple[int, int, int]:
    """One colour per label and split, so that an image of one colour reveals both at any size."""
    return label % 256, label // 256, {"train": 40, "test": 80}[split]


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """train/ and val/, each with 1,000 classes of one tiny image; the folders are not made in
    sorted order.
    """
    root = tmp_path_factory.mktemp("imagenet")
    for label in np.random.default_rng(0).permutation(1000):
        for split, folder in (("train", "train"), ("test", "val")):
            pixels = np.full((8, 8, 3), colour_of(int(label), split), dtype=np.uint8)
            save_image(root / folder / SYNSETS[label] / "image.bmp", pixels)
    return root


def holds(image: torch.Tensor, label: int, split: str) -> bool:
    expected = torch.tensor(colour_of(label, split)).float()[:, None, None] / 255
    return image.shape == (3, 224, 224) and torch.allclose(
        image, expected.expand(3, 224, 224), atol=1e-6
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_number_the_sorted_classes(imagenet, split):
    dataset = get_dataset("imagenet", split, imagenet)
    assert len(dataset) == 1000
    for label in (0, 1, 500, 999):
        image, found = dataset[label]
        assert found == label and holds(image, label, split)


def test_augmentation_depends_on_seed_epoch_and_image_not_on_the_number_of_workers(
    imagenet, monkeypatch
):
    """The images of one colour show no crop; random pixels in their place do."""
    dataset = get_dataset("imagenet", "train", imagenet)
    random_picture = Image.fromarray(random_image(0, 64, 64))
    monkeypatch.setattr(Image, "open", lambda path: random_picture.copy())
    state = torch.get_rng_state()

    def first_batch(seed: int, workers: int) -> torch.Tensor:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(workers), raising=False)
        source, asked = torch.Generator().manual_seed(seed), torch.tensor([7, 999, 0, 500, 1, 2])
        ((found, labels),) = dataset.training_batches([asked], torch.device("cpu"), source)
        assert torch.equal(labels, asked)
        return found

    images = first_batch(1, workers=1)
    assert torch.equal(images, first_batch(1, workers=3))
    assert not torch.equal(images, first_batch(2, workers=1))
    assert not torch.equal(images[0], images[1]), "each image has a crop of its own"
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_takes_the_central_224_of_the_image_scaled_to_256(tmp_path, imagenet):
    root = tmp_path / "imagenet"
    for name in SYNSETS:
        (root / "val" / name).mkdir(parents=True)
        (root / "val" / name / "image.bmp").symlink_to(imagenet / "val" / name / "image.bmp")
    pixels = random_image(seed=0, height=300, width=400)
    save_image(root / "val" / SYNSETS[0] / "a.png", pixels)
    dataset = get_dataset("imagenet", "test", root)
    # 400x300 becomes 341x256, of which 58 columns and 16 rows are cut away at the left and the top.
    scaled = Image.fromarray(pixels).resize((341, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(scaled.crop((58, 16, 58 + 224, 16 + 224))).transpose(2, 0, 1) / 255
    batch, _ = next(iter(dataset.evaluation_batches([torch.arange(2)], torch.device("cpu"))))
    for image in (dataset[0][0], batch[0]):
        assert np.allclose(image.numpy(), expected, atol=1e-6)


def test_environment_variable_or_data_dir_names_the_folder_and_a_missing_one_is_named(
    imagenet, workplace, monkeypatch
):
    monkeypatch.setenv("IMAGENET_DIR", str(workplace / "elsewhere"))
    assert len(get_dataset("imagenet", "test", imagenet)) == 1000
    monkeypatch.setenv("IMAGENET_DIR", str(imagenet))
    assert len(get_dataset("imagenet", "test")) == 1000
    refusal(get_dataset, "imagenet", "test", workplace / "elsewhere", names="elsewhere")
    monkeypatch.delenv("IMAGENET_DIR")
    message = refusal(get_dataset, "imagenet", "test", names="data/imagenet/val")
    assert "IMAGENET_DIR or --data-dir" in message


OTHER_FOLDERS = {
    "numbers from 1": ("{}", range(1, 1001)),
    "one": ("{:04d}", range(1)),
    "one less": ("{:04d}", range(999)),
    "one more": ("{:04d}", range(1001)),
    "some twice": ("{}", [*range(1000), *("000", "001")]),
    "a synset beside numbers": ("{}", [*range(1000), SYNSETS[0]]),
    "words": ("class{}", range(1000)),
    "other synsets": ("n{:08d}", range(1000)),
}


@pytest.mark.parametrize("called, labels", OTHER_FOLDERS.values(), ids=OTHER_FOLDERS)
def test_other_folders_than_those_of_imagenet_are_refused(tmp_path, called, labels):
    for label in labels:
        (tmp_path / "val" / called.format(label)).mkdir(parents=True)
    message = refusal(get_dataset, "imagenet", "test", tmp_path, names="not the 1000 synsets, n014")
    assert f"{len(labels)} class folders, {called.format(labels[0])}," in message


@pytest.mark.parametrize("called", ["{}", "{:04d}"])
def test_folders_called_by_numbers_are_taken_as_numbers_from_0(imagenet, tmp_path, called):
    for label, name in enumerate(SYNSETS):
        folder = tmp_path / "val" / called.format(label)
        folder.mkdir(parents=True)
        (folder / "image.bmp").symlink_to(imagenet / "val" / name / "image.bmp")
    dataset = get_dataset("imagenet", "test", tmp_path)
    for label in (0, 2, 10, 999):
        image, found = dataset[label]
        assert found == label and holds(image, label, "test")


def test_synsets_are_those_of_timm():
    data = pytest.importorskip("timm.data", reason="timm is not installed")
    assert [*SYNSETS] == data.ImageNetInfo().label_names()


def test_fine_classes_of_cifar100_are_in_alphabetical_order():
    names = describe_dataset("cifar100").class_names
    assert list(names) == sorted(names) and (names[0], names[99]) == ("apple", "worm")
    assert len({*names}) == 100
