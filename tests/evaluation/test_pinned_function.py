"""One log, one function: kernels that round the logits differently are noticed, and refused with
--sound.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from smoothadv.base.distributed import Processes
from smoothadv.voting.counter import VoteCounter
from support.commands import call, manifest_of, place_of, refused, rows

MODES = [[], ["--sound"]]
HERE, ELSEWHERE, TOO_SMALL = "a" * 64, "b" * 64, "c" * 64


def digests(log: Path) -> list[str]:
    """The digest of the logits in the settings of a log, then those of its runs."""
    manifest = manifest_of(log)
    return [part["logits_sha256"] for part in (manifest["settings"], *manifest["runs"])]


@pytest.fixture
def at(checkpoint, workplace, capsys, monkeypatch) -> Callable:
    """Runs a command of evaluation on the shared classifier at a place where the logits have this
    digest.
    """

    def run(place: str, command: str, *options: object):
        def digest(counter: VoteCounter, shape: tuple[int, ...], stage: int) -> str:
            counter.batch //= 1 + (place == TOO_SMALL)
            return place

        monkeypatch.setattr(VoteCounter, "logits_digest", digest)
        common = ["digits", checkpoint, 0.25, *options, "--N", 60, "--device", "cpu"]
        return call(capsys, command, *common)

    return run


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_different_functions_do_not_share_a_sound_log(at, workplace, mode):
    log = workplace / "log.tsv"
    assert [at(HERE, "certify", log.name, "--max", count, *mode).err for count in (1, 2)] == [
        ""
    ] * 2
    outcome = at(ELSEWHERE, "certify", log.name, "--max", 3, *mode)
    if mode:
        assert refused(outcome, "logits_sha256 was") and len(rows(log)) == 2
    else:
        assert outcome.err.startswith("warning: log.tsv was made where the logits")
        assert digests(log) == [*[HERE] * 3, ELSEWHERE] and len(rows(log)) == 3


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_shards_of_different_functions_are_not_merged_with_sound(at, capsys, workplace, mode):
    for shard, place in enumerate([HERE, ELSEWHERE]):
        outcome = at(place, "certify", "log.tsv", "--max", 4, "--shard", f"{shard}/2", *mode)
    if mode:
        assert refused(outcome, "logits_sha256 was", f"'{ELSEWHERE[:12]}...'")
        # As if both had been made in different folders, where neither sees the other.
        shards = workplace / "log.tsv.shards"
        paths = [shards.rename(workplace / "elsewhere") / "0-of-2.tsv", shards / "1-of-2.tsv"]
        assert at(ELSEWHERE, "certify", "log.tsv", "--max", 4, "--shard", "1/2", *mode).code == 0
        assert refused(
            call(capsys, "certify", "merge", "whole.tsv", *paths),
            "logits_sha256 was",
            f"'{HERE[:12]}...'",
        )
        assert not (workplace / "whole.tsv").exists()
    else:
        assert outcome.code == 0 and outcome.err.startswith("warning: ")
        merged = call(capsys, "certify", "merge", "log.tsv")
        assert merged.code == 0 and merged.err.startswith("warning: ")
        assert digests(workplace / "log.tsv") == [HERE, HERE, ELSEWHERE]


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_certificates_of_another_function_are_not_attacked_with_sound(at, workplace, mode):
    assert at(HERE, "certify", "log.tsv", "--max", 3, "--batch", 48, *mode).code == 0
    place_of(workplace / "log.tsv", "certified", lambda row: row["predict"] != "-1")
    other = at(HERE, "attack", "batch", "--against", "log.tsv", "--batch", 16, "--num-steps", 2)
    assert refused(other, "--sound and --batch 48, not 16") if mode else other.code == 0
    attack = ["--against", "log.tsv", "--num-steps", 2, "--num-noise-vec", 2]
    assert at(HERE, "attack", "same", *attack).err == ""
    outcome = at(ELSEWHERE, "attack", "other", *attack)
    if mode:
        assert refused(outcome, "certifies something else", "logits_sha256 was") and not list(
            workplace.glob("other/*")
        )
        assert manifest_of(workplace / "same/against.tsv")["settings"]["batch"] == 48, (
            "the same function votes"
        )
    else:
        assert outcome.code == 0 and outcome.err.startswith(
            "warning: log.tsv was made where the logits"
        )


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_a_worker_that_rounds_differently_does_not_join_with_sound(
    at, workplace, monkeypatch, mode
):
    class Second(Processes):
        def received(self, content):
            return HERE if content == ELSEWHERE else content

    monkeypatch.setattr("smoothadv.evaluation.setup.Processes", Second)
    outcome = at(ELSEWHERE, "certify", "log.tsv", "--max", 3, *mode)
    if mode:
        assert refused(outcome, "process 0", "--sound") and not (workplace / "log.tsv").exists()
    else:
        assert outcome.code == 0 and "warning: process 0 rounds" in outcome.err
        assert digests(workplace / "log.tsv") == [ELSEWHERE, ELSEWHERE]
    assert at(HERE, "certify", "agreed.tsv", "--max", 3, *mode).err == ""


def test_a_digest_that_was_removed_is_a_difference(at, workplace):
    at(HERE, "certify", "log.tsv", "--max", 2, "--sound")
    manifest = manifest_of(workplace / "log.tsv")
    del manifest["settings"]["logits_sha256"], manifest["runs"][0]["logits_sha256"]
    (workplace / "log.tsv.manifest.json").write_text(json.dumps(manifest))
    assert refused(at(HERE, "certify", "log.tsv", "--max", 4, "--sound"), "logits_sha256 was None")


def test_memory_that_is_too_small_for_the_batch_is_no_other_function(at, workplace):
    """Then the digest would be that of a smaller batch, which says nothing about this one."""
    assert at(HERE, "certify", "log.tsv", "--max", 2).err == ""

    outcome = at(TOO_SMALL, "certify", "log.tsv", "--max", 4)
    assert (outcome.code, outcome.err) == (0, "")
    assert digests(workplace / "log.tsv") == [HERE, HERE, None]
