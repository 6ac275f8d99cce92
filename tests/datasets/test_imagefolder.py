"""Image folders: anyone's images, of one size or prepared, or an error that names the file in the
way.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from smoothadv.datasets import describe_dataset, get_dataset, sources
from smoothadv.datasets.images import InMemoryImages
from smoothadv.datasets.stored import StoredImages
from support.image_files import assert_holds, random_image, save_image
from support.refusals import refusal

CPU = torch.device("cpu")


def make_folder(
    root, channels=3, splits=("train", "test"), classes=("ant", "bee", "cat"), images=2
) -> dict:
    """Image folders of random pixels; the pixels of every file by its path relative to ``root``."""
    pixels = {}
    for split in splits:
        for name in reversed(classes):
            for number in range(images):
                path = f"{split}/{name}/{number}.png"
                pixels[path] = random_image(seed=len(pixels), channels=channels)
                save_image(root / path, pixels[path])
    return pixels


def stacked(pixels: list[np.ndarray]) -> np.ndarray:
    """Images [H, W, C] or [H, W], as [N, C, H, W]."""
    return np.stack([*map(np.atleast_3d, pixels)]).transpose(0, 3, 1, 2)


def folder_refusal(root, split="train") -> str:
    return refusal(lambda: get_dataset(f"imagefolder:{root}", split).fingerprint())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("split", ["train", "test"])
def test_images_and_labels_follow_sorted_classes_and_file_names(tmp_path, channels, split):
    pixels = make_folder(tmp_path, channels)
    for other in ("train", "test"):  # what is hidden, or no image, is left out
        (tmp_path / other / ".ipynb_checkpoints").mkdir()
        (tmp_path / other / "__MACOSX").mkdir()
        (tmp_path / other / "__MACOSX" / "._0.png").write_bytes(b"of a Mac")
        (tmp_path / other / "README.txt").write_text("not a class")
        (tmp_path / other / "ant" / "Thumbs.db").write_text("not an image")
    dataset = get_dataset(f"imagefolder:{tmp_path}", split)
    paths = [f"{split}/{name}/{number}.png" for name in ("ant", "bee", "cat") for number in (0, 1)]
    assert_holds(dataset, stacked([pixels[path] for path in paths]), [0, 0, 1, 1, 2, 2])
    assert dataset.description.class_names == ("ant", "bee", "cat")
    assert dataset.description.image_shape == (channels, 4, 5)


def test_a_path_means_another_folder_in_another_working_directory(tmp_path, monkeypatch):
    for channels in (1, 3):
        root = tmp_path / f"place{channels}"
        make_folder(root / "images", channels)
        monkeypatch.chdir(root)
        assert describe_dataset("imagefolder:images").image_shape[0] == channels


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The names of the files that are decoded from now on, by this process as if it was a new
    one.
    """
    names: list[str] = []

    def read(images, index, shape=None, read=StoredImages.pixels):
        names.append(images.file(index).name)
        return read(images, index, shape)

    monkeypatch.setattr(StoredImages, "pixels", read)
    sources._described.cache_clear()
    return names


def test_constants_are_of_the_training_images_per_channel_to_4_decimals(tmp_path, decoded):
    """A channel of one value has a deviation that can divide. Later processes do not compute them
    again.
    """
    pixels = make_folder(tmp_path, images=7)
    for path, image in pixels.items():
        image[..., 1] = 51
        save_image(tmp_path / path, image)
    training = (
        np.stack([image for path, image in pixels.items() if path.startswith("train/")]) / 255
    )
    description = describe_dataset(f"imagefolder:{tmp_path}")
    for channel in range(3):
        assert description.mean[channel] == pytest.approx(training[..., channel].mean(), abs=5.1e-5)
        deviation = 1 if channel == 1 else training[..., channel].std()
        assert description.std[channel] == pytest.approx(deviation, abs=5.1e-5)
    sources._described.cache_clear()
    assert len(decoded) == 1 + 21
    assert describe_dataset(f"imagefolder:{tmp_path}") == description and len(decoded) == 1 + 21 + 1


@pytest.mark.parametrize("size", ["", "@16"])
@pytest.mark.parametrize("place", ["test", "."])
def test_test_images_alone_do_but_have_no_constants_of_their_own(tmp_path, size, place):
    make_folder(tmp_path, splits=(place,))
    dataset = get_dataset(f"imagefolder:{tmp_path}{size}", "test")
    assert [label for _, label in dataset] == [0, 0, 1, 1, 2, 2]
    assert dataset.description.class_names == ("ant", "bee", "cat")
    imagenet = describe_dataset("imagenet")
    constants = (imagenet.mean, imagenet.std) if size else (None, None)
    assert (dataset.description.mean, dataset.description.std) == constants
    refusal(
        get_dataset,
        f"imagefolder:{tmp_path}{size}",
        "train",
        names="train/CLASS/ in it, or the folder above it if it is itself one split",
    )


LAYOUTS = {
    "val": ["train/{}", "val/{}"],
    "capitals": ["Train/{}", "Validation/{}"],
    "other words": ["Training/{}", "Testing/{}"],
    "in folders of their own names": ["seg_train/seg_train/{}", "seg_test/seg_test/{}"],
    "val beside test": ["train/{}", "test/{}", "val/{}"],
    "test images without classes": ["train/{}", "val/{}", "test"],
}


@pytest.mark.parametrize("places", LAYOUTS.values(), ids=LAYOUTS)
def test_folders_of_splits_have_the_usual_names(tmp_path, places):
    made = {
        place.format(name): random_image(seed=10 * number + len(name))
        for number, place in enumerate(places)
        for name in ("a", "bc")
    }
    for folder, pixels in made.items():
        save_image(tmp_path / folder / "0.png", pixels)
    for split, place in zip(("train", "test"), places):
        expected = stacked([made[place.format(name)] for name in ("a", "bc")])
        assert_holds(get_dataset(f"imagefolder:{tmp_path}", split), expected, [0, 1])


NO_LAYOUTS = {
    "no folders": (["."], "{0} holds 0.png, neither train/CLASS/ and test/CLASS/ folders nor"),
    "a class": (["."], "nor CLASS/ folders: name {0.parent} if this is a class of it"),
    "no images": (["test/a/b"], "no images under {}/test; expected"),
    "one of several": (["train/a", "val/a", "valid/a"], "val and valid: to test on one of them"),
    "deeper": (["brain/Testing/a"], "brain/Testing, which holds"),
    "no classes": (["val"], "holds val, neither"),
    "splits as classes": (["Training", "Testing"], "holds Testing, Training, neither"),
    "images and masks": (["test/images", "test/masks"], "images, masks, and images is no class"),
    "abbreviated": (["img", "masks"], "{} holds img, masks, and img is no class"),
    "of VOC": (["Annotations", "JPEGImages"], "and JPEGImages is no class"),
}


@pytest.mark.parametrize("folders, words", NO_LAYOUTS.values(), ids=NO_LAYOUTS)
def test_folders_that_are_no_classes_are_named(tmp_path, folders, words):
    for folder in folders:
        save_image(tmp_path / folder / "0.png", random_image(seed=0))
    assert words.format(tmp_path) in folder_refusal(tmp_path, "test")


NO_IMAGES = {
    "deeper": ("ant/sub/0.png", "ant holds sub, and no images: put"),
    "another ending": ("bee/0.jfif", "bee holds 0.jfif, and no images"),
    "annotations": ("annotations/x.json", "annotations holds x.json, and no images"),
    "hidden": ("dog/._0.png", "dog holds ._0.png, and no images"),
    "folders alone": ("dog/sub/sub/0.txt", "dog holds sub, and no images"),
}


@pytest.mark.parametrize("size", ["", "@8"])
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("place, words", NO_IMAGES.values(), ids=NO_IMAGES)
def test_class_without_images_is_named_with_what_it_holds(tmp_path, size, split, place, words):
    for other in ("train", "test"):
        make_folder(tmp_path, splits=(other,), classes=sorted({"ant", "bee", "cat"} - {place[:3]}))
        file = tmp_path / other / place
        file.parent.mkdir(parents=True)
        file.write_bytes(b"no image is read")
    refusal(get_dataset, f"imagefolder:{tmp_path}{size}", split, names=words)


def test_classes_may_be_called_like_splits(tmp_path):
    make_folder(tmp_path / "valid", splits=("valid", "invalid"), classes=(".",))
    assert describe_dataset(f"imagefolder:{tmp_path}/valid").class_names == ("invalid", "valid")


@pytest.mark.parametrize(
    "names, words",
    [
        (["1", "2", "10"], "label 1 is '10', not '2'"),
        (["-1", "a", "b2", "b10"], "label 2 is 'b10', not 'b2'"),
        (["0", "1", "9"], ""),
        (["01", "02", "10"], ""),
        (["0.25", "0.5"], ""),
        (["10.5", "2.5"], "label 0 is '10.5', not '2.5'"),
        (["n01440764", "n02119789"], ""),
        (["only"], "one class, called 'only', so every classifier is right"),
    ],
)
def test_order_of_text_and_single_classes_are_said(tmp_path, names, words):
    make_folder(tmp_path, splits=("test",), classes=names, images=1)
    description = describe_dataset(f"imagefolder:{tmp_path}")
    said = refusal(description.doubts) if len(names) == 1 else "".join(description.doubts())
    assert words in said and bool(words) == bool(said)


# A file among others, its pixels, and what is said of it.
ODD = {
    "wide": ("train/bee/a.png", random_image(0, 4, 9), "is 9x4 pixels in colour where the first"),
    "turned": ("test/bee/a.png", random_image(0, 5, 4), "is 4x5 pixels in colour where the first"),
    "a class to train on": ("train/dog/a.png", random_image(0), "differ in dog"),
    "a class to test on": ("test/dog/a.png", random_image(0), "differ in dog"),
    # Of unknown range.
    "numbers of 32 bits": ("train/bee/a.tif", np.full((4, 5), 40_000, np.int32), "16 bits"),
    "floats": ("train/bee/a.tif", np.full((4, 5), 40_000, np.float32), "16 bits"),
}


@pytest.mark.parametrize("place, pixels, words", ODD.values(), ids=ODD)
def test_image_of_another_form_or_of_a_class_of_one_split_is_named(tmp_path, place, pixels, words):
    make_folder(tmp_path)
    save_image(tmp_path / place, pixels)
    message = folder_refusal(tmp_path, place.partition("/")[0])
    assert words in message and ("bee" not in place or place.partition("/")[2] in message)
    assert ("write @224 behind" in message) == ("pixels" in words)


def test_grey_image_among_colour_images_becomes_colour_but_no_colour_is_lost(tmp_path):
    grey, colour = random_image(seed=1, channels=1), random_image(seed=0)
    for folder, first, second in (("colour", colour, grey), ("grey", grey, colour)):
        save_image(tmp_path / folder / "train" / "ant" / "a.png", first)
        save_image(tmp_path / folder / "train" / "ant" / "b.png", second)
    image, _ = get_dataset(f"imagefolder:{tmp_path / 'colour'}", "train")[1]
    assert np.array_equal(image.numpy(), stacked([grey] * 3)[:, 0] / np.float32(255))
    message = folder_refusal(tmp_path / "grey")
    assert "ant/b.png is 5x4 pixels in colour" in message and "is 5x4 pixels in grey" in message


def png_with_broken_chunk(whole: bytes) -> bytes:
    """A PNG whose pixel data break off in favour of something with no chunk's name."""
    start = whole.index(b"IDAT") + 4
    pixels = whole[start : start + 16]
    return whole[: start - 8] + b"\0\0\0\x10IDAT" + pixels + bytes(4) + b"\0\0\0\4\1\2\3\4"


def bmp_of_enormous_size(whole: bytes) -> bytes:
    """A BMP whose header claims a width of 8 million and a height of 32 thousand pixels."""
    return whole[:18] + b"\0\0\x7f\0" + b"\0\x7f\0\0" + whole[26:]


DAMAGES = {
    "empty": (".png", lambda whole: b""),
    "text": (".png", lambda whole: b"not an image\n"),
    "WebP cut in half": (".webp", lambda whole: whole[: len(whole) // 2]),
    "PNG cut in half": (".png", lambda whole: whole[: len(whole) // 2]),
    "JPEG cut in half": (".jpg", lambda whole: whole[: len(whole) // 2]),
    "BMP cut in half": (".bmp", lambda whole: whole[: len(whole) // 2]),
    "PPM cut in half": (".ppm", lambda whole: whole[: len(whole) // 2]),
    "PPM cut in its header": (".ppm", lambda whole: whole[:5]),
    "PPM with letters in its header": (".ppm", lambda whole: whole.replace(b"255", b"25x", 1)),
    "PNG with a broken chunk": (".png", png_with_broken_chunk),
    "BMP that claims to be enormous": (".bmp", bmp_of_enormous_size),
}


@pytest.mark.parametrize("preparation", ["", "@8"])
@pytest.mark.parametrize("suffix, damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_named_by_whoever_reads_it(tmp_path, suffix, damage, preparation):
    file = save_image(tmp_path / "train" / "ant" / f"a{suffix}", random_image(1, 40, 50))
    damaged = damage(file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    if not preparation:
        refusal(get_dataset, f"imagefolder:{tmp_path}", "train", names=file)
        return
    dataset = get_dataset(f"imagefolder:{tmp_path}@8", "train")
    batches = [torch.tensor([0])]
    for read in (
        lambda: dataset[0],
        lambda: next(iter(dataset.evaluation_batches(batches, CPU))),
        lambda: next(iter(dataset.training_batches(batches, CPU, torch.Generator()))),
    ):
        refusal(read, names=file)


def test_only_what_is_asked_for_is_decoded(tmp_path, decoded):
    """An earlier process has read all files, once; none that is the same is read again but for
    its pixels.
    """
    pixels = make_folder(tmp_path, splits=("test",), classes=("ant",), images=200)
    name = f"imagefolder:{tmp_path}"
    first = get_dataset(name, "test")
    items = [first[index] for index in (0, 100)]
    assert decoded == ["0.png", "0.png", "189.png"], "by its name, the 100th of 200"
    fingerprint = first.fingerprint()
    assert len(decoded) == 3 + 200
    images = torch.tensor(np.stack([pixels[path].transpose(2, 0, 1) for path in sorted(pixels)]))
    again = InMemoryImages(images, torch.zeros(200, dtype=torch.int64), first.description)
    assert again.fingerprint() == fingerprint, (
        "logs and checkpoints of earlier versions can be continued"
    )
    sources._described.cache_clear()
    decoded.clear()
    second = get_dataset(name, "test")
    assert second.fingerprint() == fingerprint and decoded == ["0.png"], "for the shape"
    assert all(torch.equal(second[index][0], image) for index, (image, _) in zip((0, 100), items))
    assert decoded == ["0.png", "0.png", "189.png"]


def test_changed_file_is_noticed(tmp_path):
    """Also if its size and its date are those of the one before."""
    make_folder(tmp_path)
    file = tmp_path / "test/ant/1.png"
    before = get_dataset(f"imagefolder:{tmp_path}", "test").fingerprint()
    dates = file.stat()
    save_image(file, random_image(seed=77))
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert get_dataset(f"imagefolder:{tmp_path}", "test").fingerprint() != before


COLOURS, GREY = random_image(1, 6, 6), random_image(2, 6, 6, channels=1)
DEEP = np.random.default_rng(3).integers(0, 2**16, (6, 6), dtype=np.uint16)
ALPHA = random_image(4, 6, 6, channels=1)


def grey(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels[..., None], 3, axis=2)


PALETTE = Image.fromarray(GREY % 4, "P")
PALETTE.putpalette(COLOURS[0, :4].ravel().tolist())
# Of a camera that was held so that the image has to be turned by 90 degrees clockwise.
TURNED = Image.Exif()
TURNED[0x0112] = 6


# Image, suffix, options of saving; the pixels that must be read.
LOSSLESS = {
    "8-bit grey": (Image.fromarray(GREY), ".png", {}, grey(GREY)),
    "16-bit grey": (Image.fromarray(DEEP), ".png", {}, grey((DEEP // 256).astype(np.uint8))),
    "16-bit TIFF": (Image.fromarray(DEEP), ".tif", {}, grey((DEEP // 256).astype(np.uint8))),
    "bilevel": (Image.fromarray(GREY > 99), ".png", {}, grey((GREY > 99) * np.uint8(255))),
    "palette": (PALETTE, ".png", {}, COLOURS[0, :4][GREY % 4]),
    "palette with one transparent colour": (
        PALETTE,
        ".png",
        {"transparency": 1},
        COLOURS[0, :4][GREY % 4],
    ),
    "palette with alpha": (
        PALETTE,
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
        PALETTE,
        ".gif",
        {"save_all": True, "append_images": [Image.new("P", (6, 6))]},
        COLOURS[0, :4][GREY % 4],
    ),
    "turned PNG": (Image.fromarray(COLOURS), ".png", {"exif": TURNED}, np.rot90(COLOURS, -1)),
    "turned WebP": (
        Image.fromarray(COLOURS),
        ".webp",
        {"lossless": True, "exif": TURNED},
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
    assert np.array_equal((found * 255).round().numpy(), expected.transpose(2, 0, 1))


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


def test_only_what_is_asked_for_is_decoded_and_bytes_are_hashed_once(photos, monkeypatch):
    opened, hashed = [], []
    monkeypatch.setattr(
        Image, "open", lambda file, open_image=Image.open: opened.append(file) or open_image(file)
    )
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: hashed.append(path) or read(path))
    monkeypatch.setenv("SMOOTHADV_CACHE", str(photos.parent / "cache"))
    description = describe_dataset(f"imagefolder:{photos}@8")
    assert (
        description.image_shape == (3, 8, 8)
        and description.mean == describe_dataset("imagenet").mean
    )
    fingerprints = {get_dataset(f"imagefolder:{photos}@8", "test").fingerprint() for _ in range(2)}
    hashed = [path for path in hashed if photos in path.parents]
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
