"""Published arrays: pseudo-labelled images in any layout, and pickles, which neither run code nor
fill memory.
"""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.datasets import CIFAR_TRAINING, DatasetDescription
from smoothadv.datasets.arrays import load_pseudo_labelled, plain_array, read_arrays
from support import refusals
from support.traps import Trap

COLOUR, GREY = (3, 2, 4), (1, 4, 5)
NUMBER, CLASSES = 7, 5
LABELS = np.array([4, 0, 3, 3, 1, 2, 0])


def described(shape: tuple[int, int, int] = COLOUR) -> DatasetDescription:
    names, channels = tuple("abcde"), shape[0]
    statistics = (0.5,) * channels
    return DatasetDescription(
        "toys", names, shape, statistics, statistics, CIFAR_TRAINING, crop_padding=1
    )


def pixels(shape: tuple[int, int, int] = COLOUR) -> np.ndarray:
    """Images uint8 [N, C, H, W]."""
    return np.random.default_rng(0).integers(0, 256, (NUMBER, *shape), dtype=np.uint8)


def write_npz(path: Path, content: dict) -> Path:
    path = path.with_suffix(".npz")
    np.savez(path, **content)
    return path


def write_pickle(protocol: int):
    def write(path: Path, content: object) -> Path:
        path = path.with_suffix(".pickle")
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        return path

    return write


FORMATS = {
    "npz": write_npz,
    **{f"pickle {protocol}": write_pickle(protocol) for protocol in (0, 2, 3, 4, 5)},
}
every_format = pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)

LAYOUTS = {
    "channels last": (COLOUR, lambda images: images.transpose(0, 2, 3, 1)),
    "channels first": (COLOUR, lambda images: images),
    "one channel, last": (GREY, lambda images: images.transpose(0, 2, 3, 1)),
    "one channel, first": (GREY, lambda images: images),
    "one channel, not spelled out": (GREY, lambda images: images[:, 0]),
    "in Fortran order": (COLOUR, lambda images: np.asfortranarray(images.transpose(0, 2, 3, 1))),
    "every second image": (COLOUR, lambda images: images.repeat(2, axis=0)[::2]),
}


@every_format
@pytest.mark.parametrize("shape, arrange", LAYOUTS.values(), ids=LAYOUTS)
def test_images_and_labels_are_read_in_any_layout(tmp_path, write, shape, arrange):
    path = write(
        tmp_path / "extra", {"data": arrange(pixels(shape)), "extrapolated_targets": LABELS}
    )
    loaded = load_pseudo_labelled(path, described(shape))
    assert loaded.images.dtype == torch.uint8 and np.array_equal(loaded.images, pixels(shape))
    assert loaded.labels.dtype == torch.int64 and loaded.labels.tolist() == LABELS.tolist()
    assert loaded.description.name == f"pseudo-labelled {path.name}"
    assert (
        loaded.description.class_names == described().class_names
        and loaded.description.image_shape == shape
    )


@every_format
@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("data extrapolated_targets", "u1"),
        ("images labels", "i1"),
        *(("data labels", dtype) for dtype in ("<i2", ">i4", ">i8", "<u8", "list")),
    ],
)
def test_arrays_have_either_name_and_labels_are_any_whole_numbers(tmp_path, write, names, dtype):
    labels = LABELS.tolist() if dtype == "list" else LABELS.astype(dtype)
    content = dict(zip(names.split(), (pixels(), labels)), note=np.zeros(3))
    loaded = load_pseudo_labelled(write(tmp_path / "extra", content), described())
    assert np.array_equal(loaded.images, pixels())
    assert loaded.labels.dtype == torch.int64 and loaded.labels.tolist() == LABELS.tolist()


def refusal(path: Path, description: DatasetDescription | None = None) -> str:
    message = refusals.refusal(load_pseudo_labelled, path, description or described(), names=path)
    assert message.startswith("--use-unlabelled: ")
    return message


FAULTS = {
    "no images": ({"labels": LABELS}, "lacks data or images; it holds labels"),
    "no labels": ({"data": pixels()}, "lacks extrapolated_targets or labels; it holds data"),
    "nothing": ({}, "holds nothing"),
    "images as floats": ({"data": pixels() / 255, "labels": LABELS}, "data is float64"),
    "images as signed bytes": (
        {"data": pixels().astype(np.int8), "labels": LABELS},
        "data is int8",
    ),
    "images of another size": (
        {"data": pixels()[:, :, :1], "labels": LABELS},
        r"\[7, 3, 1, 4\].*uint8 \[N, 3, 2, 4\]",
    ),
    "a number for images": ({"data": np.array(3, np.uint8), "labels": LABELS}, r"uint8 \[\]"),
    "fewer labels": ({"data": pixels(), "labels": LABELS[:-1]}, r"int64 \[6\], expected 7"),
    "logits": ({"data": pixels(), "labels": np.eye(5)[LABELS]}, r"float64 \[7, 5\], expected 7"),
    "labels as booleans": ({"data": pixels(), "labels": LABELS > 2}, "bool.*whole number"),
    "a label too many": (
        {"data": pixels(), "labels": LABELS + 1},
        "found 1 to 5, expected 0 to 4",
    ),
    "a negative label": ({"data": pixels(), "labels": LABELS - 1}, "whole numbers from 0"),
    "no images at all": ({"data": pixels()[:0], "labels": LABELS[:0]}, r"uint8 \[0, 3, 2, 4\]"),
}


@pytest.mark.parametrize("write", [write_npz, write_pickle(4)], ids=["npz", "pickle"])
@pytest.mark.parametrize("content, words", FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, write, content, words):
    message = refusal(write(tmp_path / "extra", content))
    assert re.search(words, message), message


def nested_in_itself() -> list:
    outer: list = []
    outer.append(outer)
    return outer


PICKLED = {
    "a list": [pixels(), LABELS],
    "an array": pixels(),
    "a number": 3,
    "labels of different lengths": {"data": pixels(), "labels": [[0], [1, 2]]},
    "images of different lengths": {"data": [[[0]], [1]], "labels": LABELS},
    "labels that contain themselves": {"data": pixels(), "labels": nested_in_itself()},
    "labels as objects": {"data": pixels(), "labels": LABELS.astype(object)},
    "labels beyond any integer": {"data": pixels(), "labels": [10**30] * NUMBER},
    "labels in a dict": {"data": pixels(), "labels": {"first": 1}},
    "no labels but None": {"data": pixels(), "labels": None},
    "names that are no text": {0: pixels(), None: LABELS},
    "a name of two lines": {"da\nta": pixels(), "labels": LABELS},
    "very many names": {f"batch {number}": 0 for number in range(5_000)},
}


DAMAGED = {
    "nothing": b"",
    "text": b"not a data set\nbut two lines\n",
    "zeros": bytes(100),
    # Also what an .npz file is under another name.
    "an archive without an end": b"PK\x03\x04\x14\x00\x00\x00\x00\x00some archive",
    "a torn pickle": pickle.dumps({"data": pixels(), "labels": LABELS})[:-40],
    "a pickle of a class with line breaks in its name": b"\x80\x04\x8c\x05o\ns\nx\x8c\x03abc\x93.",
    "a persistent object": b"\x80\x04\x8c\x01xQ.",
    **{what: pickle.dumps(content, 4) for what, content in PICKLED.items()},
}


@pytest.mark.parametrize("suffix", [".NPZ", ".pickle", ""], ids=["NPZ", "pickle", "no suffix"])
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_and_pickle_of_something_else_are_refused_in_one_line(
    tmp_path, content, suffix
):
    path = tmp_path / f"extra{suffix}"
    path.write_bytes(content)
    refusal(path)


@pytest.mark.parametrize("path", ["none.npz", "."])
def test_missing_file_and_folder_are_refused(tmp_path, path):
    assert "does not exist" in refusal(tmp_path / path)


def trapped_contents(marker: Path) -> dict[str, object]:
    trap = Trap(marker)
    objects = np.array([trap] * NUMBER, dtype=object)
    return {
        "beside the arrays": {"data": pixels(), "labels": LABELS, "more": trap},
        "as a name": {"data": pixels(), "labels": LABELS, trap: 0},
        "as the images": {"data": trap, "labels": LABELS},
        "within an array": {"data": pixels(), "labels": objects},
        "alone": trap,
    }


@pytest.mark.parametrize("place", list(trapped_contents(Path("unused"))))
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_pickle_that_would_run_a_command_is_refused_and_does_not(tmp_path, place, protocol):
    marker = tmp_path / "sprung"
    path = write_pickle(protocol)(tmp_path / "extra", trapped_contents(marker)[place])
    assert "asks to load" in refusal(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists(), "the control: the trap works"


def test_npz_with_a_pickle_within_is_refused_and_runs_nothing(tmp_path):
    marker = tmp_path / "sprung"
    objects = np.array([Trap(marker)] * NUMBER, dtype=object)
    path = write_npz(tmp_path / "extra", {"data": pixels(), "labels": objects})
    assert "allow_pickle" in refusal(path) and not marker.exists()
    with np.load(path, allow_pickle=True) as content:
        assert len(content["labels"]) == NUMBER and marker.exists(), "the control: the trap works"
    marker.rmdir()
    refusal(write_npz(tmp_path / "numbers", {"data": pixels(), "labels": LABELS.astype(object)}))
    path.write_bytes(
        pickle.dumps({"data": Trap(marker), "labels": LABELS})
    )  # behind the name of a .npz file
    refusal(path)
    assert not marker.exists()


GENERATOR = np.random.default_rng(0)
ARRAYS = {
    "bytes": GENERATOR.integers(0, 256, (5, 12), dtype=np.uint8),
    "large": GENERATOR.integers(0, 256, (40, 3072), dtype=np.uint8),
    "Fortran": np.asfortranarray(GENERATOR.random((3, 4, 2))),
    "axes in another order": np.ascontiguousarray(GENERATOR.random((3, 4, 2))).transpose(2, 0, 1),
    "big-endian": np.arange(7, dtype=">i4"),
    "little-endian": np.arange(7, dtype="<u2"),
    "bool": np.array([True, False]),
    "half": np.array([1.5, np.nan], dtype=np.float16),
    "number": np.array(3, dtype=np.int64),
    "text": np.array(["cat", "dogs"]),
    "bytes of text": np.array([b"cat", b"dogs"]),
}


# By NumPy 2 and NumPy 1; later protocols state the length of a module's name.
@pytest.mark.parametrize(
    ("protocol", "module"),
    [
        *((protocol, b"numpy._core") for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
        *((protocol, b"numpy.core") for protocol in range(4)),
    ],
)
@pytest.mark.parametrize("name", ARRAYS)
def test_array_comes_back_as_it_was_written(tmp_path, name, protocol, module):
    raw = pickle.dumps({"data": ARRAYS[name], "labels": [3, 1], "again": ARRAYS[name]}, protocol)
    raw = raw.replace(b"numpy._core", module)
    (tmp_path / "file").write_bytes(raw)
    content = read_arrays(tmp_path / "file")
    assert content["labels"] == [3, 1] and content["again"] is content["data"]
    found = plain_array(content["data"])
    kinds = [array.dtype.newbyteorder("=") for array in (found, ARRAYS[name])]
    assert type(found) is np.ndarray and kinds[0] == kinds[1]
    np.testing.assert_array_equal(found, ARRAYS[name])


def test_pickle_of_python_2_is_read(tmp_path):
    """As CIFAR-10 was published: bytes are text of one byte per character, here in the protocols
    0 and 2.
    """
    head = (
        b"(dS'a'\ncnumpy.core.multiarray\n_reconstruct\n"
        b"(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I2\nI2\nt"
    )
    kind = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\n"
    for number, data in enumerate([b"S'\\x00\\xffa\\n'\n", b"U\x04\x00\xffa\n"]):
        path = tmp_path / str(number)
        path.write_bytes(head + kind + data + b"tbs.")
        assert plain_array(read_arrays(path)["a"]).tolist() == [[0, 255], [97, 10]]


class Call:
    """Pickled as a call of ``function`` whose result then gets ``state``."""

    def __init__(self, function, arguments: tuple, state: tuple) -> None:
        self.reduced = function, arguments, state

    def __reduce__(self):
        return self.reduced


def array_of(dtype: object, content: object, shape: tuple = (4,), repeated: bool = False) -> Call:
    reconstruct = np.arange(1).__reduce__()[0]
    return Call(reconstruct, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, content))


def type_of(name: str, *parts: object, flags: int = 0) -> Call:
    fields = parts or (None, None, None)
    return Call(np.dtype, (name, False, True), (3, "|", *fields, -1, -1, flags))


def holding(array: object) -> bytes:
    return pickle.dumps({"data": np.zeros((4, 1, 2, 2), np.uint8), "labels": array}, 2)


POINTERS = b"\x41" * 32
DOCTORED = {
    "objects, flags 0": holding(array_of(type_of("O8"), POINTERS)),
    "objects, flags 1": holding(array_of(type_of("O8", flags=1), POINTERS)),
    "a field of objects": holding(
        array_of(type_of("V8", None, ("a",), {"a": (np.dtype("O"), 0)}), POINTERS)
    ),
    "a part of objects": holding(
        array_of(type_of("V8", (np.dtype("O"), (1,)), None, None), POINTERS)
    ),
    "more entries than bytes": holding(array_of(np.dtype("u1"), POINTERS, (2**40,))),
    "fewer entries than bytes": holding(array_of(np.dtype("u1"), POINTERS, (4,))),
    "a side of -1": holding(array_of(np.dtype("u1"), POINTERS, (-1,))),
    "sides that overflow": holding(array_of(np.dtype("u1"), POINTERS, (2**33, 2**33, 0))),
    "a side that is text": holding(array_of(np.dtype("u1"), POINTERS, (2**33, "a"))),
    "a size of text": holding(array_of(np.dtype("u1"), "x" * 4)).replace(
        b"X\x02\0\0\0u1", b"X\x02\0\0\0u9"
    ),
    "an altered function": b"cnumpy\ndtype\n}U\x0c__defaults__Nsb.",
}
# Forty lists, each of which holds the one before it twice.
DOCTORED["lists in lists beyond any memory"] = pickle.dumps(
    {
        "data": np.zeros((4, 1, 2, 2), np.uint8),
        "labels": (lambda f: f(f, 40))(lambda f, n: [0] if not n else [f(f, n - 1)] * 2),
    }
)


@pytest.mark.parametrize("name", DOCTORED)
def test_doctored_pickle_is_refused_in_one_line(tmp_path, name):
    (tmp_path / "file").write_bytes(DOCTORED[name])
    refusals.refusal(load_pseudo_labelled, tmp_path / "file", described((1, 2, 2)), names="file")
