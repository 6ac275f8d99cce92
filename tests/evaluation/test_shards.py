"""Shards: how a user writes one, and that every example is in exactly one."""

import json

from hypothesis import given
from hypothesis import strategies as st

from smoothadv.evaluation.shards import Shard

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
