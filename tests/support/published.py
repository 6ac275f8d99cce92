"""Small datasets in the form in which the large ones were published, and what is in them."""

import gzip
import hashlib
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from smoothadv.datasets.sources.imagenet import OF_TINY

# By split: images uint8 [N, C, H, W], and labels [N].
Splits = dict[str, tuple[np.ndarray, np.ndarray]]
COUNTS = {"train": 40, "test": 12}


def drawn(classes: int, *shape: int) -> Splits:
    """Random images of this shape, and labels, of which the first two are the smallest and the
    largest.
    """
    random, found = np.random.default_rng(classes), {}
    for split, count in COUNTS.items():
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
