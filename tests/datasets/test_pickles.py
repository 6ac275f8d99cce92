"""Pickled arrays come back as they were written; a doctored pickle is refused and neither
crashes nor fills memory.
"""

import pickle
import random
import struct

import numpy as np
import pytest

from smoothadv.datasets.pickles import plain_array, read_pickled_arrays
from support.read_elsewhere import messages

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


@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"], ids=["NumPy 2", "NumPy 1"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ARRAYS)
def test_array_comes_back_as_it_was_written(tmp_path, name, protocol, module):
    raw = pickle.dumps({"data": ARRAYS[name], "labels": [3, 1], "again": ARRAYS[name]}, protocol)
    if protocol < 4:  # later ones state the length of a module's name
        raw = raw.replace(b"numpy._core", module.encode())
    (tmp_path / "file").write_bytes(raw)
    content = read_pickled_arrays(tmp_path / "file")
    assert content["labels"] == [3, 1] and content["again"] is content["data"]
    found = plain_array(content["data"])
    assert (
        type(found) is np.ndarray
        and found.dtype == ARRAYS[name].dtype
        and found.shape == ARRAYS[name].shape
    )
    assert found.tobytes() == ARRAYS[name].tobytes()


def test_pickle_of_python_2_is_read(tmp_path):
    """As CIFAR-10 was published: bytes are text of one byte per character, here in the protocols
    0 and 2.
    """
    head, tail = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I2\nI2\nt",
        b"tb.",
    )
    kind = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\n"
    for number, data in enumerate([b"S'\\x00\\xffa\\n'\n", b"U\x04\x00\xffa\n"]):
        path = tmp_path / str(number)
        path.write_bytes(head + kind + data + tail)
        assert plain_array(read_pickled_arrays(path)).tolist() == [[0, 255], [97, 10]]


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
NESTED = b"N" + b"\x85" * 1_000_000
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
    "a memo of a huge number": b"\x80\x02Nr\xff\xff\xff\x07.",
    "bytes of a huge length": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b".",
    "a key of a million tuples": b"\x80\x02}" + NESTED + b"Ns.",
    "a set of a million tuples": b"\x80\x04\x8f(" + NESTED + b"\x90.",
    "an altered function": b"cnumpy\ndtype\n}U\x0c__defaults__Nsb.",
}
# Forty lists, each of which holds the one before it twice.
DOCTORED["lists in lists beyond any memory"] = pickle.dumps(
    {
        "data": np.zeros((4, 1, 2, 2), np.uint8),
        "labels": (lambda f: f(f, 40))(lambda f, n: [0] if not n else [f(f, n - 1)] * 2),
    }
)


def test_doctored_pickles_are_refused_in_one_line(warm, tmp_path):
    for name, content in DOCTORED.items():
        (tmp_path / name).write_bytes(content)
    found = dict(zip(sorted(DOCTORED), messages(warm, tmp_path, "pseudo-labels"), strict=True))
    assert [name for name, message in found.items() if len((message or "").splitlines()) != 1] == []


def test_no_damage_to_a_pickle_ends_a_process(warm, tmp_path):
    """Bytes of good and of doctored files replaced, removed and repeated."""
    chance = random.Random(0)
    small = {"data": np.ones((2, 1, 2, 2), np.uint8), "labels": np.array([1, 0])}
    seeds = [pickle.dumps(small, protocol) for protocol in range(6)] + [
        x for x in DOCTORED.values() if len(x) < 999
    ]
    for number in range(400):
        raw = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(0, 4)):
            place, length = chance.randrange(len(raw)), chance.randint(0, 8)
            piece = [chance.randbytes(length), b"", bytes(raw[place : place + length]) * 2][
                chance.randrange(3)
            ]
            raw[place : place + length] = piece or b"."
        (tmp_path / f"{number:03}").write_bytes(raw)
    found = messages(warm, tmp_path, "pseudo-labels")
    assert len(found) == 400 and all(
        message is None or len(message.splitlines()) == 1 for message in found
    )
    assert 5 < found.count(None) < 395
