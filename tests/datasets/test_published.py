"""Datasets read from files in their published form: pixels, labels and their order, or what is
wrong.
"""

import gzip
import hashlib
import pickle
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from smoothadv.datasets import SPLITS, describe_dataset, get_dataset
from smoothadv.datasets.sources.imagenet import OF_TINY
from support.image_files import assert_holds
from support.refusals import refusal

# By split: images uint8 [N, C, H, W], and labels [N].
Splits = dict[str, tuple[np.ndarray, np.ndarray]]


def drawn(classes: int, *shape: int) -> Splits:
    """Random images of this shape, and labels, of which the first two are the smallest and the
    largest.
    """
    random, found = np.random.default_rng(classes), {}
    for split, count in {"train": 40, "test": 12}.items():
        labels = np.r_[0, classes - 1, random.integers(0, classes, count - 2)]
        found[split] = random.integers(0, 256, (count, *shape), dtype=np.uint8), labels
    return found


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def _cifar(kind: type, labels: str, classes: int) -> Callable[..., Splits]:
    """An archive of pickled batches: rows of 1,024 red, 1,024 green and 1,024 blue values."""

    def publish(folder: Path, monkeypatch) -> Splits:
        splits = drawn(classes, 3, 32, 32)
        inside = folder / "made" / kind.base_folder
        inside.mkdir(parents=True)

        def write(name: str, content: dict) -> list[str]:
            (inside / name).write_bytes(pickle.dumps(content, protocol=2))
            return [name, md5(inside / name)]

        for split, (images, numbers) in splits.items():
            names = [name for name, _ in getattr(kind, f"{split}_list")]
            rows = np.split(images.reshape(len(images), 3072), len(names))
            parts = zip(names, rows, np.split(numbers, len(names)))
            listed = [write(name, {"data": x, labels: y.tolist()}) for name, x, y in parts]
            monkeypatch.setattr(kind, f"{split}_list", listed)
        _, meta = write(kind.meta["filename"], {kind.meta["key"]: ["a name"] * classes})
        monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": meta})
        with tarfile.open(folder / kind.filename, "w:gz") as tar:
            tar.add(inside, kind.base_folder)
        monkeypatch.setattr(kind, "tgz_md5", md5(folder / kind.filename))
        return splits

    return publish


def _idx(kind: type) -> Callable[..., Splits]:
    """Four compressed files, each a header of big-endian numbers and then bytes."""

    def publish(folder: Path, monkeypatch) -> Splits:
        splits, raw, listed = drawn(10, 1, 28, 28), folder / kind.__name__ / "raw", []
        raw.mkdir(parents=True)
        arrays = [part for split in splits.values() for part in split]
        for (name, _), array in zip(kind.resources, arrays):
            array = array[:, 0] if array.ndim == 4 else array
            header = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
            with gzip.open(raw / name, "wb") as file:
                file.write(header + array.astype(np.uint8).tobytes())
            listed.append((name, md5(raw / name)))
        monkeypatch.setattr(kind, "resources", listed)
        return splits

    return publish


def _svhn(folder: Path, monkeypatch) -> Splits:
    """Two files of MATLAB with images [32, 32, 3, N]; the digit 0 has the label 10."""
    splits, listed = drawn(10, 3, 32, 32), {}
    for split, (images, labels) in splits.items():
        path = folder / f"{split}_32x32.mat"
        numbers = np.where(labels == 0, 10, labels)[:, None]
        savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": numbers.astype(np.uint8)})
        listed[split] = ["http://nowhere", path.name, md5(path)]
    monkeypatch.setattr(datasets.SVHN, "split_list", listed)
    return splits


DOWNLOADED = {
    "cifar10": _cifar(datasets.CIFAR10, "labels", 10),
    "cifar100": _cifar(datasets.CIFAR100, "fine_labels", 100),
    "mnist": _idx(datasets.MNIST),
    "fashion-mnist": _idx(datasets.FashionMNIST),
    "svhn": _svhn,
}


def tiny_imagenet(folder: Path) -> dict[str, list[tuple[Path, int]]]:
    """The folder tiny-imagenet-200 with one training image of each class, one of them grey; the
    files and labels of each split, in their order.
    """
    root, names = folder / "tiny-imagenet-200", OF_TINY
    random = np.random.default_rng(0)

    def save(path: Path, *channels: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (64, 64, *channels), np.uint8)).save(path)
        return path

    trained = [
        (save(root / "train" / name / "images" / f"{name}_0.JPEG", *[3] * (label != 5)), label)
        for label, name in enumerate(names)
    ]
    tested = [
        (save(root / "val/images" / f"val_{number}.JPEG", 3), label)
        for number, label in enumerate((199, 0, 7))
    ]
    lines = [f"{path.name}\t{names[label]}\t0\t0\t63\t63\n" for path, label in tested]
    (root / "val/val_annotations.txt").write_text("".join(lines))
    (root / "words.txt").write_text("".join(f"{name}\tsomething\n" for name in names))
    return {"train": trained, "test": tested}


def arrays_of_images(
    images: Path, labels: Path, count: int, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Files of images [N, 32, 32, 3], only the first and the last ten of each 2,000 of them not
    black, and labels; their content.
    """
    images.parent.mkdir(parents=True, exist_ok=True)
    made = np.lib.format.open_memmap(images, "w+", np.uint8, (count, 32, 32, 3))
    random = np.random.default_rng(count)
    for start in range(0, count, 2000):
        for part in (slice(start, start + 10), slice(start + 1990, start + 2000)):
            made[part] = random.integers(0, 256, made[part].shape, np.uint8)
    numbers = random.integers(0, 10, min(count, 10_000))
    numbers = np.tile(numbers, count // len(numbers))
    np.save(labels, numbers.astype(kind))
    return made, numbers


# A published file that the test images need.
HELD = {
    "cifar10": "cifar-10-python.tar.gz",
    "cifar100": "cifar-100-python.tar.gz",
    "mnist": "MNIST/raw/t10k-images-idx3-ubyte.gz",
    "fashion-mnist": "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz",
    "svhn": "test_32x32.mat",
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Any attempt to download fails the way it does without a network."""

    def refuse(*arguments, **options):
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.mark.parametrize("name", DOWNLOADED)
def test_downloaded_images_and_labels_are_the_published_ones_in_order(name, tmp_path, monkeypatch):
    splits = DOWNLOADED[name](tmp_path, monkeypatch)
    for split in SPLITS:
        assert_holds(get_dataset(name, split, tmp_path), *splits[split])


@pytest.mark.parametrize("name", DOWNLOADED)
def test_what_is_missing_or_damaged_is_one_line_that_says_what_to_do(name, tmp_path, monkeypatch):
    message = refusal(get_dataset, name, "test", tmp_path / "none", names=tmp_path / "none")
    assert HELD[name] in message and "--data-dir" in message and message.startswith(f"{name}: ")
    DOWNLOADED[name](tmp_path, monkeypatch)
    path = tmp_path / HELD[name]
    path.write_bytes(path.read_bytes()[:-1])
    refusal(get_dataset, name, "test", tmp_path, names=f"{path} is damaged")


def test_extracted_batches_are_enough_and_a_damaged_one_is_named(tmp_path, monkeypatch):
    splits, batches = DOWNLOADED["cifar10"](tmp_path, monkeypatch), tmp_path / "made"
    assert_holds(get_dataset("cifar10", "train", batches), *splits["train"])
    batch = batches / "cifar-10-batches-py/data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-1])
    refusal(get_dataset, "cifar10", "test", batches, names=f"{batch} is damaged")


@pytest.mark.parametrize("held", ["images", "labels"])
def test_extracted_files_that_were_cut_are_refused(held, tmp_path, monkeypatch):
    DOWNLOADED["mnist"](tmp_path, monkeypatch)
    get_dataset("mnist", "test", tmp_path)
    (path,) = (tmp_path / "MNIST/raw").glob(f"t10k-{held}*ubyte")
    path.write_bytes(path.read_bytes()[:-1])
    message = refusal(get_dataset, "mnist", "test", tmp_path, names=tmp_path)
    assert "not whole" in message and "t10k-images-idx3-ubyte.gz" in message


def test_tiny_imagenet_numbers_the_sorted_classes(tmp_path):
    for split, files in tiny_imagenet(tmp_path).items():
        pictures = [np.asarray(Image.open(path).convert("RGB")) for path, _ in files]
        images, labels = channels_first(np.stack(pictures), np.array([label for _, label in files]))
        assert_holds(get_dataset("tiny-imagenet", split, tmp_path), images, labels)


@pytest.mark.parametrize("inner", ["", "images"])
def test_tiny_imagenet_may_have_folders_of_classes_to_test_on(tmp_path, inner):
    splits = tiny_imagenet(tmp_path)
    root = tmp_path / "tiny-imagenet-200"
    for name in OF_TINY:
        folder = root / "val" / name / inner
        folder.mkdir(parents=True)
        (folder / f"{name}_boxes.txt").touch()
    for path, label in splits["test"]:
        path.rename(root / "val" / OF_TINY[label] / inner / path.name)
    found = get_dataset("tiny-imagenet", "test", tmp_path)
    assert [found[index][1] for index in range(3)] == sorted(label for _, label in splits["test"])


def test_tiny_imagenet_that_is_not_as_published_is_refused(tmp_path):
    refusal(get_dataset, "tiny-imagenet", "test", tmp_path, names=tmp_path / "tiny-imagenet-200")
    splits = tiny_imagenet(tmp_path)
    root = tmp_path / "tiny-imagenet-200"
    damaged = splits["test"][1][0]
    damaged.write_bytes(damaged.read_bytes()[:99])
    images = get_dataset("tiny-imagenet", "test", tmp_path)
    refusal(images.__getitem__, 1, names=damaged)
    faults = {
        "train": (root / "train" / OF_TINY[7], lambda path: path.rename(root / "other")),
        "test": (root / "val/val_annotations.txt", lambda path: path.write_text("val_0.JPEG\n")),
    }
    for split, (path, spoil) in faults.items():
        spoil(path)
        refusal(get_dataset, "tiny-imagenet", split, tmp_path, names=f"{root} (--data-dir")


@pytest.mark.parametrize("name, version, count", [("", "v6", 2000), ("-v4", "v4", 2021)])
def test_cifar10_1_has_test_images_of_the_classes_of_cifar10(tmp_path, name, version, count):
    files = [tmp_path / f"cifar10.1_{version}_{part}.npy" for part in ("data", "labels")]
    images, labels = arrays_of_images(*files, count, "int32")
    assert_holds(get_dataset(f"cifar10.1{name}", "test", tmp_path), *channels_first(images, labels))


def channels_first(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return images.transpose(0, 3, 1, 2), labels


@pytest.fixture(scope="module")
def corrupted(tmp_path_factory):
    """The folder above CIFAR-10-C, and the content of fog.npy and labels.npy."""
    folder = tmp_path_factory.mktemp("corrupted")
    files = folder / "CIFAR-10-C/fog.npy", folder / "CIFAR-10-C/labels.npy"
    return folder, *arrays_of_images(*files, 50_000, "uint8")


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_severities_follow_each_other_in_a_file(corrupted, severity):
    folder, images, labels = corrupted
    part = slice(10_000 * (severity - 1), 10_000 * severity)
    dataset = get_dataset(f"cifar10-c:fog/{severity}", "test", folder)
    assert len(dataset) == 10_000 and dataset.labels.tolist() == labels[part].tolist()
    assert np.array_equal(dataset.images, images[part].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("location", ["rain/3", "fog/0", "fog/6", "fog/", "fog", "fog/12", "/3"])
def test_unknown_corruptions_and_severities_list_the_known_ones(location):
    message = refusal(describe_dataset, f"cifar10-c:{location}", names=f"cifar10-c:{location}")
    assert "from 1 to 5" in message and "gaussian_noise" in message and "saturate" in message


@pytest.mark.parametrize("name", ["cifar10.1", "cifar10.1-v4", "cifar10-c:fog/3"])
def test_other_test_sets_are_described_as_cifar10_and_have_nothing_to_train_on(name, tmp_path):
    assert describe_dataset(name) == replace(describe_dataset("cifar10"), name=name)
    message = refusal(get_dataset, name, "train", tmp_path, names=name)
    assert "test images only" in message and "cifar10" in message


RIGHT = np.zeros((2000, 32, 32, 3), np.uint8), np.zeros(2000, np.int32)
UNFIT = {
    "missing labels": (RIGHT[0], None, "labels.npy"),
    "fewer images": (RIGHT[0][1:], RIGHT[1], "1,999 images and 2,000 labels, expected 2,000"),
    "another size": (RIGHT[0][:, 1:], RIGHT[1], "uint8 [N, 3, 32, 32]"),
    "floats": (RIGHT[0].astype(np.float32), RIGHT[1], "float32"),
    "no class": (RIGHT[0], RIGHT[1] + 10, "found 10 to 10, expected 0 to 9"),
    "one number": (np.uint8(3), RIGHT[1], "cifar10.1_v6_data.npy"),
}


@pytest.mark.parametrize("images, labels, words", UNFIT.values(), ids=UNFIT)
def test_arrays_that_are_not_the_published_ones_are_refused(tmp_path, images, labels, words):
    for part, array in (("data", images), ("labels", labels)):
        if array is not None:
            np.save(tmp_path / f"cifar10.1_v6_{part}.npy", array)
    assert words in refusal(get_dataset, "cifar10.1", "test", tmp_path, names=tmp_path)


def test_arrays_that_were_cut_are_refused(tmp_path):
    for part, array in zip(("data", "labels"), RIGHT):
        np.save(tmp_path / f"cifar10.1_v6_{part}.npy", array)
    path = tmp_path / "cifar10.1_v6_data.npy"
    for size in (path.stat().st_size - 1, 20, 0):
        with path.open("r+b") as file:
            file.truncate(size)
        refusal(get_dataset, "cifar10.1", "test", tmp_path, names=path.name)
