"""Philox4x32-10: the known answers of its authors, and the same integers as a slow
implementation.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smoothadv.noise.philox import philox
from support import slow_noise

words = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
keys = st.tuples(words, words)
counters = st.tuples(words, words, words, words)

# Random123, tests/kat_vectors: zeros, ones and digits of pi.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def fast(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    return tuple(
        int(word) for word in philox(tuple(torch.tensor([value]) for value in counter), key)
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert fast(counter, key) == expected
    assert slow_noise.philox(counter, key) == expected
    # Another number of rounds would be noticed.
    assert expected not in [slow_noise.philox(counter, key, rounds) for rounds in (7, 9, 11)]


@given(counters, keys)
def test_words_are_those_of_a_slow_implementation(counter, key):
    assert fast(counter, key) == slow_noise.philox(counter, key)


@given(
    st.lists(words, min_size=1, max_size=5),
    st.lists(words, min_size=1, max_size=4),
    words,
    words,
    keys,
)
def test_counters_that_broadcast_give_the_words_of_every_combination(
    positions, draws, example, purpose, key
):
    shapes = torch.tensor(positions)[None, :], torch.tensor(draws)[:, None]
    found = philox((*shapes, torch.tensor([[example]]), torch.tensor([[purpose]])), key)
    expected = [
        [slow_noise.philox((p, d, example, purpose), key) for p in positions] for d in draws
    ]
    assert torch.equal(torch.stack(found, dim=-1), torch.tensor(expected))


@pytest.mark.parametrize("place", range(4))
def test_any_one_of_the_four_counters_may_be_the_long_one(place):
    counter = [torch.tensor([[7 + i]]) for i in range(4)]
    counter[place] = torch.arange(5)[None, :]
    found = torch.stack(philox(tuple(counter), (1, 2)), dim=-1)
    columns = [[int(c[0, min(i, c.shape[1] - 1)]) for c in counter] for i in range(5)]
    assert found.tolist() == [
        [list(slow_noise.philox(tuple(column), (1, 2))) for column in columns]
    ]


@given(st.lists(counters, min_size=1, max_size=20), keys)
def test_words_are_int64_within_32_bits_and_leave_the_counters_alone(listed, key):
    counter = tuple(torch.tensor(column) for column in zip(*listed))
    before = [column.clone() for column in counter]
    found = torch.stack(philox(counter, key))
    assert found.dtype == torch.int64
    assert 0 <= int(found.min()) and int(found.max()) < 2**32
    assert all(torch.equal(column, copy) for column, copy in zip(counter, before))
