"""ImageNet: folders of classes read image by image, labels in the order of the sorted class
names.
"""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from smoothadv.base.errors import UserError
from smoothadv.datasets import describe_dataset, get_dataset
from support.image_files import random_image, save_image
from support.refusals import refusal

CLASSES = [f"n{number:08d}" for number in range(5000, 7000, 2)]


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
            save_image(root / folder / CLASSES[label] / "image.bmp", pixels)
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


def test_evaluation_batches_come_in_order(imagenet):
    dataset = get_dataset("imagenet", "test", imagenet)
    images, labels = next(iter(dataset.evaluation_batches([torch.arange(16)], torch.device("cpu"))))
    assert labels.tolist() == list(range(16)) and labels.dtype == torch.int64
    assert images.dtype == torch.float32
    assert all(holds(image, label, "test") for label, image in enumerate(images))


def test_training_batches_hold_the_images_asked_for(imagenet):
    dataset, asked = (
        get_dataset("imagenet", "train", imagenet),
        [torch.tensor([7, 999, 0]), torch.tensor([500])],
    )
    batches = list(
        dataset.training_batches(asked, torch.device("cpu"), torch.Generator().manual_seed(1))
    )
    assert [labels.tolist() for _, labels in batches] == [[7, 999, 0], [500]]
    assert all(
        holds(image, int(label), "train")
        for images, labels in batches
        for image, label in zip(images, labels)
    )


def test_augmentation_depends_on_seed_epoch_and_image_not_on_the_number_of_workers(
    imagenet, monkeypatch
):
    """The images of one colour show no crop; random pixels in their place do."""
    dataset, random_picture = (
        get_dataset("imagenet", "train", imagenet),
        Image.fromarray(random_image(0, 64, 64)),
    )
    monkeypatch.setattr(
        "smoothadv.datasets.image_files.open_image", lambda path, name: random_picture.copy()
    )
    state = torch.get_rng_state()

    def first_batch(seed: int, workers: int) -> torch.Tensor:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(workers), raising=False)
        source, batches = torch.Generator().manual_seed(seed), [torch.arange(8)]
        return next(iter(dataset.training_batches(batches, torch.device("cpu"), source)))[0]

    images = first_batch(1, workers=1)
    assert torch.equal(images, first_batch(1, workers=3))
    assert not torch.equal(images, first_batch(2, workers=1))
    assert not torch.equal(images[0], images[1]), "each image has a crop of its own"
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_takes_the_central_224_of_the_image_scaled_to_256(tmp_path, imagenet):
    root = tmp_path / "imagenet"
    for name in CLASSES:
        (root / "val" / name).mkdir(parents=True)
        (root / "val" / name / "image.bmp").symlink_to(imagenet / "val" / name / "image.bmp")
    pixels = random_image(seed=0, height=300, width=400)
    save_image(root / "val" / CLASSES[0] / "a.png", pixels)
    dataset = get_dataset("imagenet", "test", root)
    # 400x300 becomes 341x256, of which 58 columns and 16 rows are cut away at the left and the top.
    scaled = Image.fromarray(pixels).resize((341, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(scaled.crop((58, 16, 58 + 224, 16 + 224))).transpose(2, 0, 1) / 255
    batch, _ = next(iter(dataset.evaluation_batches([torch.arange(2)], torch.device("cpu"))))
    for image in (dataset[0][0], batch[0]):
        assert np.allclose(image.numpy(), expected, atol=1e-6)


def test_description_has_the_usual_constants_and_the_papers_schedule():
    description = describe_dataset("imagenet")
    assert (description.num_classes, description.image_shape) == (1000, (3, 224, 224))
    assert description.mean == (0.485, 0.456, 0.406) and description.std == (0.229, 0.224, 0.225)
    defaults = description.defaults
    assert (defaults.batch, defaults.epochs) == (400, 90)
    assert (defaults.learning_rate, defaults.learning_rate_step) == (0.1, 30)


def test_environment_variable_names_the_folder_unless_data_dir_does(
    imagenet, tmp_path, monkeypatch
):
    monkeypatch.setenv("IMAGENET_DIR", str(tmp_path / "elsewhere"))
    assert len(get_dataset("imagenet", "test", imagenet)) == 1000
    monkeypatch.setenv("IMAGENET_DIR", str(imagenet))
    assert len(get_dataset("imagenet", "test")) == 1000
    with pytest.raises(UserError, match="elsewhere"):
        get_dataset("imagenet", "test", tmp_path / "elsewhere")


def test_missing_folder_is_named_with_the_two_ways_to_state_it(tmp_path, monkeypatch):
    monkeypatch.delenv("IMAGENET_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data/imagenet/val.*IMAGENET_DIR.*--data-dir"):
        get_dataset("imagenet", "test")


@pytest.mark.parametrize("number", [1, 999, 1001])
def test_another_number_of_classes_is_refused(imagenet, tmp_path, number):
    for label in range(number):
        folder = tmp_path / "val" / f"{label:04d}"
        folder.mkdir(parents=True)
        (folder / "image.bmp").symlink_to(imagenet / "val" / CLASSES[0] / "image.bmp")
    with pytest.raises(UserError, match=f"{number} class folders, not 1000"):
        get_dataset("imagenet", "test", tmp_path)


def test_class_without_images_is_named(tmp_path):
    (tmp_path / "val" / "n01440764").mkdir(parents=True)
    refusal(get_dataset, "imagenet", "test", tmp_path, names="n01440764")


def test_torn_image_is_named_in_one_line(imagenet, tmp_path):
    """The first image was not copied to its end."""
    torn = save_image(
        tmp_path / "val" / CLASSES[0] / "torn.bmp", random_image(seed=0, height=64, width=64)
    )
    torn.write_bytes(torn.read_bytes()[:500])
    for name in CLASSES[1:]:
        (tmp_path / "val" / name).symlink_to(imagenet / "val" / name)
    dataset = get_dataset("imagenet", "test", tmp_path)
    batches = dataset.evaluation_batches([torch.arange(4)], torch.device("cpu"))
    for read in (lambda: dataset[0], lambda: next(iter(batches))):
        refusal(read, names="torn.bmp")
