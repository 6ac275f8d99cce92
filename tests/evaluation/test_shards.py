"""Shards: how a user writes one, and that every example is in exactly one."""

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smoothadv.cli.options.smoothing import shard

from smoothadv.evaluation.shards import Shard


@pytest.mark.parametrize("text", ["0/1", "0/8", "7/8", "999999998/999999999"])
def test_shard_is_written_as_its_number_and_how_many_there_are(text):
    assert str(shard(text)) == text and shard(text) == Shard(*map(int, text.split("/")))


ODD = "|1|/|1/|/2|2/2|8/4|0/0|-1/4|1/-4|1.0/4|1/4/2| 1/4|1/4\n|a/b|1:4|0/9999999999"


@pytest.mark.parametrize("text", ODD.split("|"))
def test_anything_else_is_refused_with_the_way_to_write_it(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        shard(text)
    assert all(word in str(error.value) for word in (f"'{text}'", "K/N", "0/8"))


selections = st.builds(range, st.just(0), st.integers(0, 400), st.integers(1, 50))


@given(selections, st.integers(1, 60))
def test_every_example_is_in_exactly_one_shard_whose_record_says_so(examples, count):
    shares = [Shard(index, count).of(examples) for index in range(count)]
    assert sorted(index for share in shares for index in share) == list(examples)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1, "nobody has more than a fair share"
    for index, share in enumerate(shares):
        record = json.loads(json.dumps(Shard(index, count).record(examples)))
        again = Shard(record["index"], record["count"]).of(range(*record["examples"]))
        assert list(again) == list(share)
