"""Prepared image folders: files of every kind, layouts, what is read when, what the fingerprint
covers.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from smoothadv.datasets import describe_dataset, get_dataset
from smoothadv.datasets.image_files import open_image
from support.image_files import random_image, save_image
from support.refusals import refusal

CPU = torch.device("cpu")
COLOURS, GREY = random_image(1, 6, 6), random_image(2, 6, 6, channels=1)
DEEP = np.random.default_rng(3).integers(0, 2**16, (6, 6), dtype=np.uint16)
ALPHA = random_image(4, 6, 6, channels=1)


def grey(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels[..., None], 3, axis=2)


def palette() -> Image.Image:
    image = Image.new("P", (6, 6))
    image.putdata((GREY % 4).ravel().tolist())
    image.putpalette(COLOURS[0, :4].ravel().tolist())
    return image


def turned() -> Image.Exif:
    """The data of a camera that was held so that the image has to be turned by 90 degrees
    clockwise.
    """
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


# Image, suffix, options of saving; the pixels that must be read.
LOSSLESS = {
    "8-bit grey": (Image.fromarray(GREY), ".png", {}, grey(GREY)),
    "16-bit grey": (Image.fromarray(DEEP), ".png", {}, grey((DEEP // 256).astype(np.uint8))),
    "16-bit TIFF": (Image.fromarray(DEEP), ".tif", {}, grey((DEEP // 256).astype(np.uint8))),
    "bilevel": (Image.fromarray(GREY > 99), ".png", {}, grey((GREY > 99) * np.uint8(255))),
    "palette": (palette(), ".png", {}, COLOURS[0, :4][GREY % 4]),
    "palette with one transparent colour": (
        palette(),
        ".png",
        {"transparency": 1},
        COLOURS[0, :4][GREY % 4],
    ),
    "palette with alpha": (
        palette(),
        ".png",
        {"transparency": bytes([0, 80, 255])},
        COLOURS[0, :4][GREY % 4],
    ),
    "grey with alpha": (Image.fromarray(np.dstack([GREY, ALPHA])), ".png", {}, grey(GREY)),
    "colours with alpha": (Image.fromarray(np.dstack([COLOURS, ALPHA])), ".png", {}, COLOURS),
    "one transparent colour": (
        Image.fromarray(COLOURS),
        ".png",
        {"transparency": (1, 2, 3)},
        COLOURS,
    ),
    "WebP": (Image.fromarray(COLOURS), ".webp", {"lossless": True}, COLOURS),
    "first of two in a GIF": (
        palette(),
        ".gif",
        {"save_all": True, "append_images": [Image.new("P", (6, 6))]},
        None,
    ),
    "turned PNG": (Image.fromarray(COLOURS), ".png", {"exif": turned()}, np.rot90(COLOURS, -1)),
    "turned WebP": (
        Image.fromarray(COLOURS),
        ".webp",
        {"lossless": True, "exif": turned()},
        np.rot90(COLOURS, -1),
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("image, suffix, options, expected", LOSSLESS.values(), ids=LOSSLESS)
def test_every_kind_of_file_becomes_three_channels_of_8_bits(
    tmp_path, image, suffix, options, expected
):
    (tmp_path / "ant").mkdir()
    image.save(tmp_path / "ant" / f"a{suffix}", **options)
    found, _ = get_dataset(f"imagefolder:{tmp_path}@6,6", "test")[
        0
    ]  # its own size: nothing is resized
    expected = COLOURS[0, :4][GREY % 4] if expected is None else expected
    assert np.array_equal((found * 255).round().numpy(), expected.transpose(2, 0, 1))


@pytest.mark.parametrize(
    "ink, colour", [((0, 0, 0, 0), (255, 255, 255)), ((0, 255, 255, 0), (255, 0, 0))]
)
def test_jpeg_in_the_colours_of_printers(tmp_path, ink, colour):
    (tmp_path / "ant").mkdir()
    Image.new("CMYK", (16, 16), ink).save(tmp_path / "ant" / "a.jpg", quality=100)
    found, _ = get_dataset(f"imagefolder:{tmp_path}@16,16", "test")[0]
    assert torch.allclose(found, (torch.tensor(colour) / 255).view(3, 1, 1), atol=3 / 255)


DAMAGES = {
    "empty": (".jpg", lambda whole: b""),
    "text": (".jpg", lambda whole: b"a photograph of a cat\n"),
    "JPEG cut in half": (".jpg", lambda whole: whole[: len(whole) // 2]),
    "PNG cut in half": (".png", lambda whole: whole[: len(whole) // 2]),
    "WebP cut in half": (".webp", lambda whole: whole[: len(whole) // 2]),
}


@pytest.mark.parametrize("suffix, damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_named_by_whoever_reads_it(tmp_path, suffix, damage):
    file = save_image(tmp_path / "train" / "ant" / f"a{suffix}", random_image(1, 40, 50))
    file.write_bytes(damage(file.read_bytes()))
    dataset = get_dataset(f"imagefolder:{tmp_path}@8", "train")
    batches = [torch.tensor([0])]
    for read in (
        lambda: dataset[0],
        lambda: next(iter(dataset.evaluation_batches(batches, CPU))),
        lambda: next(iter(dataset.training_batches(batches, CPU, torch.Generator()))),
    ):
        assert "cannot be read as an image" in refusal(read, names=file)


@pytest.fixture
def photos(tmp_path):
    """Photographs of several sizes in two classes, and a file of the system's that is none."""
    for number, (width, height) in enumerate([(30, 20), (18, 40), (25, 25), (60, 31)]):
        save_image(
            tmp_path / "photos" / "ab"[number % 2] / f"{number}.png",
            random_image(number, height, width),
        )
    (tmp_path / "photos" / "a" / "._0.png").write_bytes(b"of a Mac")
    return tmp_path / "photos"


@pytest.mark.parametrize("size", ["", "@16"])
def test_classes_without_train_and_test_are_for_testing(tmp_path, size):
    for label, name in enumerate("ab"):
        save_image(tmp_path / name / "0.png", random_image(label, 16, 16))
    dataset = get_dataset(f"imagefolder:{tmp_path}{size}", "test")
    assert [label for _, label in dataset] == [0, 1] if size else len(dataset) == 2
    assert dataset.description.class_names == ("a", "b")
    assert "for testing alone" in refusal(
        get_dataset, f"imagefolder:{tmp_path}{size}", "train", names="train/CLASS/"
    )


@pytest.mark.parametrize("place", [".", "test"])
def test_images_outside_of_classes_are_refused_with_what_to_do(tmp_path, place):
    save_image(tmp_path / place / "0.png", random_image(0))
    assert "folder per class" in refusal(
        get_dataset, f"imagefolder:{tmp_path}@8", "test", names="0.png"
    )


def test_images_of_several_sizes_need_a_preparation(photos):
    (photos / "a" / "._0.png").unlink()
    assert "--image-size" in refusal(
        get_dataset(f"imagefolder:{photos}", "test").fingerprint, names="2.png"
    )


def test_only_what_is_asked_for_is_decoded_and_bytes_are_hashed_once(photos, monkeypatch):
    opened, hashed = [], []
    monkeypatch.setattr(
        "smoothadv.datasets.image_files.open_image",
        lambda *file: opened.append(file) or open_image(*file),
    )
    plain = "smoothadv.datasets.imagefolder.read_regular"
    monkeypatch.setattr(plain, lambda path: hashed.append(path) or path.read_bytes())
    monkeypatch.setenv("SMOOTHADV_CACHE", str(photos.parent / "cache"))
    description = describe_dataset(f"imagefolder:{photos}@8")
    assert (
        description.image_shape == (3, 8, 8)
        and description.mean == describe_dataset("imagenet").mean
    )
    fingerprints = {get_dataset(f"imagefolder:{photos}@8", "test").fingerprint() for _ in range(2)}
    assert (len(fingerprints), len(hashed), len(opened)) == (1, 4, 0)
    assert (
        get_dataset(f"imagefolder:{photos}@8", "test")[2][0].shape == (3, 8, 8) and len(opened) == 1
    )


CHANGES = {
    "a byte of a file": lambda photos: (photos / "a" / "0.png").write_bytes(
        (photos / "a" / "0.png").read_bytes() + b"0"
    ),
    "a name": lambda photos: (photos / "a" / "0.png").rename(photos / "a" / "1.png"),
    "a class": lambda photos: (photos / "a").rename(photos / "c"),
    "one image less": lambda photos: (photos / "a" / "0.png").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_fingerprint_changes_with(photos, change):
    name = f"imagefolder:{photos}@8"
    before = get_dataset(name, "test").fingerprint()
    change(photos)
    assert get_dataset(name, "test").fingerprint() != before


def test_fingerprint_is_of_the_preparation_and_not_of_the_place(photos):
    preparations = ("8", "9", "8,9", "8,squash", "8,9,bicubic")
    prints = [
        get_dataset(f"imagefolder:{photos}@{text}", "test").fingerprint() for text in preparations
    ]
    assert len({*prints}) == 5
    photos.rename(photos.parent / "moved")
    assert get_dataset(f"imagefolder:{photos.parent}/moved@8", "test").fingerprint() == prints[0]


def test_file_that_changes_while_it_is_in_use_is_noticed(photos):
    dataset, file = get_dataset(f"imagefolder:{photos}@8", "test"), photos / "a" / "0.png"
    dates = file.stat()
    save_image(file, random_image(77, 20, 30))
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert "changed while it was in use" in refusal(dataset.__getitem__, 0, names=file)


def test_training_sees_random_parts_mirrored_only_if_that_is_asked_for(tmp_path):
    """Of a picture that becomes brighter from the left to the right every part does, unless it
    is mirrored.
    """
    ramp = np.repeat(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], 40, axis=0).repeat(
        3, axis=2
    )
    for number in range(24):
        save_image(tmp_path / "train" / "a" / f"{number:02}.png", ramp)
    dataset = get_dataset(f"imagefolder:{tmp_path}@8,9,bicubic", "train")
    batches = torch.arange(24).split(7)

    def mirrored(flip: bool) -> int:
        dataset.description = replace(dataset.description, horizontal_flip=flip)
        images = torch.cat(
            [
                each
                for each, _ in dataset.training_batches(
                    batches, CPU, torch.Generator().manual_seed(1)
                )
            ]
        )
        assert images.shape == (24, 3, 8, 8) and len(images.flatten(1).unique(dim=0)) > 12
        return int((images[..., 0] > images[..., -1]).any(dim=(1, 2)).sum())

    assert mirrored(False) == 0 < mirrored(True) < 24
