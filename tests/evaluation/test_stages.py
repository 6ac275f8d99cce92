"""What cascades and routers share: their logs are continued, merged, verified and attacked."""

from pathlib import Path

import pytest

from support.commands import call, refused, rows, settings_of, succeed, timeless
from support.staged import NUMBERS

pytestmark = [
    pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning"),
    pytest.mark.parametrize("kind", ["cascade", "router"]),
]


def test_a_torn_log_is_continued_and_shards_are_merged(kind, files, logs, workplace):
    log, certify = logs[kind], ("certify", "digits", files[kind], "stages")
    lines = log.read_bytes().splitlines(keepends=True)
    Path("torn.tsv").write_bytes(b"".join(lines[:7]) + lines[7][:11])
    manifest = Path(f"{log}.manifest.json")
    Path("torn.tsv.manifest.json").write_bytes(manifest.read_bytes())
    succeed(*certify, "torn.tsv", *NUMBERS)
    assert timeless(Path("torn.tsv")) == timeless(log)
    for shard in ("0/2", "1/2"):
        succeed(*certify, "all.tsv", *NUMBERS, "--shard", shard)
    succeed("certify", "merge", "all.tsv")
    assert timeless(Path("all.tsv")) == timeless(log)


@pytest.mark.parametrize("options", [["--method", "sequential"], ["--sound"]])
def test_logs_are_verified_by_new_draws(kind, files, workplace, options, capsys):
    succeed("certify", "digits", files[kind], "stages", "log.tsv", *NUMBERS, *options)
    verify = ["certify", "verify", "log.tsv", "--rows", 5, "--device", "cpu"]
    found = call(capsys, *verify)
    assert found.code == 0 and "all are equal" in found.out
    if "--method" in options:
        radii = {float(row["radius"]) for row in rows(Path("log.tsv"))}
        assert radii <= {*settings_of("log.tsv")["radii"]}


def test_predictions_are_those_of_the_certificates(kind, files, logs, workplace, capsys):
    predict = ("predict", "digits", files[kind], "stages")
    succeed(*predict, "p.tsv", "--N", 2000, *NUMBERS[4:])
    pairs = [(a["predict"], b["predict"]) for a, b in zip(rows(Path("p.tsv")), rows(logs[kind]))]
    both = [(a, b) for a, b in pairs if "-1" not in (a, b)]
    assert len(both) > 15 and all(a == b for a, b in both)
    outcome = call(capsys, *predict, "q.tsv", "--top-k", 2)
    assert refused(outcome, f"--top-k is not for {kind}s", code=2)


def test_no_certificate_is_contradicted_by_an_attack_that_knows_the_stages(
    kind, files, logs, workplace, capsys
):
    options = ["--N", 1000, "--num-noise-vec", 8, "--num-steps", 5, "--device", "cpu"]
    attack = ("attack", "digits", files[kind], "stages", "out", "--against", logs[kind], *options)
    outcome = call(capsys, *attack)
    assert outcome.code == 0 and ", 0 flipped" in outcome.out
