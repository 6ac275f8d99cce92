"""Image folders: anyone's images, of one size, or an error that names the file in the way."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from smoothadv.base.errors import UserError
from smoothadv.datasets import describe_dataset, get_dataset
from smoothadv.datasets.imagefolder import _describe_folder, _read
from smoothadv.datasets.images import InMemoryImages
from support import refusals
from support.image_files import chw, random_image, save_image


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


def assert_items_equal(dataset, expected: list[tuple[np.ndarray, int]]) -> None:
    assert len(dataset) == len(expected)
    for index, (pixels, label) in enumerate(expected):
        image, found = dataset[index]
        assert found == label
        assert np.array_equal(image.numpy(), chw(pixels))


def refusal(root, split="train") -> str:
    return refusals.refusal(lambda: get_dataset(f"imagefolder:{root}", split).fingerprint())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("split", ["train", "test"])
def test_images_and_labels_follow_sorted_classes_and_file_names(tmp_path, channels, split):
    pixels = make_folder(tmp_path, channels)
    dataset = get_dataset(f"imagefolder:{tmp_path}", split)
    paths = [f"{split}/{name}/{number}.png" for name in ("ant", "bee", "cat") for number in (0, 1)]
    assert_items_equal(dataset, [(pixels[path], label // 2) for label, path in enumerate(paths)])
    assert dataset.description.class_names == ("ant", "bee", "cat")
    assert dataset.description.image_shape == (channels, 4, 5)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".ppm", ".tif", ".tiff", ".PNG"])
def test_lossless_formats_are_read_exactly(tmp_path, suffix):
    pixels = random_image(seed=1)
    save_image(tmp_path / "test" / "ant" / f"a{suffix}", pixels)
    assert_items_equal(get_dataset(f"imagefolder:{tmp_path}", "test"), [(pixels, 0)])


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".webp", ".pgm"])
def test_other_formats_are_read(tmp_path, suffix):
    channels = 1 if suffix == ".pgm" else 3
    pixels = np.full((8, 8) if channels == 1 else (8, 8, 3), 96, dtype=np.uint8)
    save_image(tmp_path / "test" / "ant" / f"a{suffix}", pixels)
    image, _ = get_dataset(f"imagefolder:{tmp_path}", "test")[0]
    assert image.shape == (channels, 8, 8)
    assert torch.allclose(
        image, torch.tensor(96 / 255), atol=3 / 255
    )  # what lossy compression may change


def test_constants_are_of_the_training_images_per_channel_to_4_decimals(tmp_path):
    pixels = make_folder(tmp_path, images=7)
    training = (
        np.stack([image for path, image in pixels.items() if path.startswith("train/")]) / 255
    )
    description = describe_dataset(f"imagefolder:{tmp_path}")
    for channel in range(3):
        assert description.mean[channel] == pytest.approx(training[..., channel].mean(), abs=5.1e-5)
        assert description.std[channel] == pytest.approx(training[..., channel].std(), abs=5.1e-5)


def test_channel_of_one_value_gets_a_deviation_that_can_divide(tmp_path):
    pixels = random_image(seed=0)
    pixels[..., 1] = 51
    save_image(tmp_path / "train" / "ant" / "a.png", pixels)
    description = describe_dataset(f"imagefolder:{tmp_path}")
    assert description.mean[1] == pytest.approx(0.2)
    assert all(deviation > 0 for deviation in description.std)


def test_test_images_alone_do_but_have_no_constants(tmp_path):
    make_folder(tmp_path, splits=("test",))
    description = get_dataset(f"imagefolder:{tmp_path}", "test").description
    assert description.mean is None and description.std is None
    assert description.class_names == ("ant", "bee", "cat")
    assert str(tmp_path / "train") in refusal(tmp_path, "train")


def test_image_of_another_size_is_named_with_both_sizes(tmp_path):
    make_folder(tmp_path)
    save_image(tmp_path / "train" / "bee" / "wide.png", random_image(seed=0, height=4, width=9))
    message = refusal(tmp_path)
    assert "bee/wide.png" in message and "9x4" in message and "5x4" in message
    (tmp_path / "train" / "bee" / "wide.png").unlink()
    save_image(tmp_path / "test" / "bee" / "turned.png", random_image(seed=0, height=5, width=4))
    assert "bee/turned.png" in refusal(tmp_path, "test")


def test_grey_image_among_colour_images_becomes_colour_but_no_colour_is_lost(tmp_path):
    grey, colour = random_image(seed=1, channels=1), random_image(seed=0)
    for folder, first, second in (("colour", colour, grey), ("grey", grey, colour)):
        save_image(tmp_path / folder / "train" / "ant" / "a.png", first)
        save_image(tmp_path / folder / "train" / "ant" / "b.png", second)
    image, _ = get_dataset(f"imagefolder:{tmp_path / 'colour'}", "train")[1]
    assert np.array_equal(image.numpy(), np.repeat(chw(grey), 3, axis=0))
    message = refusal(tmp_path / "grey")
    assert "ant/b.png is a colour image" in message and "is grey" in message


def test_numbers_of_unknown_range_are_refused(tmp_path):
    (tmp_path / "train" / "ant").mkdir(parents=True)
    for kind in (np.int32, np.float32):
        Image.fromarray(np.full((4, 5), 40_000, dtype=kind)).save(
            tmp_path / "train" / "ant" / "deep.tif"
        )
        message = refusal(tmp_path)
        assert "ant/deep.tif" in message and "16 bits" in message


def png_with_broken_chunk(whole: bytes) -> bytes:
    """A PNG whose pixel data break off in favour of something with no chunk's name."""
    start = whole.index(b"IDAT") + 4
    return (
        whole[: start - 8]
        + b"\0\0\0\x10IDAT"
        + whole[start : start + 16]
        + bytes(4)
        + b"\0\0\0\4\1\2\3\4"
    )


def bmp_of_enormous_size(whole: bytes) -> bytes:
    """A BMP whose header claims a width of 8 million and a height of 32 thousand pixels."""
    return whole[:18] + b"\0\0\x7f\0" + b"\0\x7f\0\0" + whole[26:]


DAMAGES = {
    "empty": (".png", lambda whole: b""),
    "text": (".png", lambda whole: b"not an image\n"),
    "PNG cut in half": (".png", lambda whole: whole[: len(whole) // 2]),
    "JPEG cut in half": (".jpg", lambda whole: whole[: len(whole) // 2]),
    "BMP cut in half": (".bmp", lambda whole: whole[: len(whole) // 2]),
    "PPM cut in half": (".ppm", lambda whole: whole[: len(whole) // 2]),
    "PPM cut in its header": (".ppm", lambda whole: whole[:5]),
    "PPM with letters in its header": (".ppm", lambda whole: whole.replace(b"255", b"25x", 1)),
    "PNG with a broken chunk": (".png", png_with_broken_chunk),
    "BMP that claims to be enormous": (".bmp", bmp_of_enormous_size),
}


@pytest.mark.parametrize("suffix, damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_named(tmp_path, suffix, damage):
    make_folder(tmp_path)
    file = save_image(tmp_path / "train" / "bee" / f"damaged{suffix}", random_image(seed=0))
    damaged = damage(file.read_bytes())
    assert damaged != file.read_bytes()
    file.write_bytes(damaged)
    assert f"bee/damaged{suffix}" in refusal(tmp_path)


def test_classes_that_differ_between_the_splits_are_named(tmp_path):
    make_folder(tmp_path)
    save_image(tmp_path / "test" / "dog" / "0.png", random_image(seed=0))
    for split in ("train", "test"):
        message = refusal(tmp_path, split)
        assert "dog" in message and "bee" not in message


def test_hidden_folders_and_other_files_are_ignored(tmp_path):
    make_folder(tmp_path)
    for split in ("train", "test"):
        (tmp_path / split / ".ipynb_checkpoints").mkdir()
        (tmp_path / split / "README.txt").write_text("not a class")
        (tmp_path / split / "ant" / "Thumbs.db").write_text("not an image")
    dataset = get_dataset(f"imagefolder:{tmp_path}", "test")
    assert dataset.description.class_names == ("ant", "bee", "cat")
    assert len(dataset) == 6


def test_folder_without_images_is_refused_with_the_layout_expected(tmp_path):
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")
    save_image(tmp_path / "ant" / "0.png", random_image(seed=0))
    message = refusal(tmp_path)
    assert "train/CLASS" in message and "test/CLASS" in message
    (tmp_path / "train" / "ant").mkdir(parents=True)
    assert str(tmp_path / "train") in refusal(tmp_path)


def test_home_folder_may_be_abbreviated(tmp_path, monkeypatch):
    make_folder(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(get_dataset("imagefolder:~/mine", "train")) == 6


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The names of the files that are decoded from now on, by this process as if it was a new
    one.
    """
    names: list[str] = []

    def read(path, shape=None):
        names.append(path.name)
        return _read(path, shape)

    monkeypatch.setattr("smoothadv.datasets.imagefolder._read", read)
    _describe_folder.cache_clear()
    return names


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
    _describe_folder.cache_clear()
    decoded.clear()
    second = get_dataset(name, "test")
    assert second.fingerprint() == fingerprint and decoded == ["0.png"], "for the shape"
    assert all(torch.equal(second[index][0], image) for index, (image, _) in zip((0, 100), items))
    assert decoded == ["0.png", "0.png", "189.png"]


def test_constants_are_computed_once_for_the_same_files(tmp_path, decoded):
    make_folder(tmp_path)
    first = describe_dataset(f"imagefolder:{tmp_path}")
    assert len(decoded) == 1 + 6
    _describe_folder.cache_clear()
    assert describe_dataset(f"imagefolder:{tmp_path}") == first and len(decoded) == 1 + 6 + 1


def test_changed_file_is_noticed(tmp_path):
    """Also if its size and its date are those of the one before."""
    make_folder(tmp_path)
    name, file = f"imagefolder:{tmp_path}", tmp_path / "test/ant/1.png"
    dataset, before = get_dataset(name, "test"), get_dataset(name, "test").fingerprint()
    dates = file.stat()
    content = file.read_bytes()
    save_image(file, random_image(seed=77))
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert get_dataset(name, "test").fingerprint() != before
    with pytest.raises(UserError, match="ant/1.png was changed while it was in use"):
        dataset[1]
    file.write_bytes(content)
    assert get_dataset(name, "test").fingerprint() == before
