"""certify from end to end: the log's columns and numbers, reproducibility, resuming, and what it
refuses.
"""

import hashlib
import os
from pathlib import Path

import pytest
import torch

from smoothadv.voting.classifier import VotingClassifier
from support.commands import call, header, manifest_of, refused, rows, snapshot, succeed, timeless

N, ALPHA, SIGMA, EXAMPLES = 100, 0.001, 0.5, 40


@pytest.fixture(scope="module")
def log(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty examples under more noise than the classifier was trained for: right, wrong and
    abstaining.
    """
    path = tmp_path_factory.mktemp("logs") / "digits.tsv"
    succeed(
        "certify", "digits", checkpoint, SIGMA, path, "--N", N, "--max", EXAMPLES, "--device", "cpu"
    )
    return path


@pytest.fixture
def certify(checkpoint, workplace, capsys):
    """Certify the shared classifier with few draws; returns what the command did."""

    few = ["--N", 20, "--device", "cpu"]
    return lambda outfile, *options, sigma=0.25, model=checkpoint: call(
        capsys, "certify", "digits", model, sigma, outfile, *few, *options
    )


@pytest.mark.parametrize(
    ("options", "indices"),
    [
        (["--skip", 50], range(0, 359, 50)),
        (["--skip", 7, "--max", 3], [0, 7, 14]),
        (["--skip", 100, "--max", -1], [0, 100, 200, 300]),
        (["--skip", 100, "--max", 99], [0, 100, 200, 300]),
        (["--split", "train", "--skip", 400], [0, 400, 800, 1200]),
    ],
)
def test_skip_is_a_stride_and_max_counts_examples(certify, workplace, options, indices):
    assert certify("out.tsv", *options).code == 0
    assert [int(row["idx"]) for row in rows(workplace / "out.tsv")] == list(indices)


def test_manifest_says_what_made_the_log(log, checkpoint):
    manifest = manifest_of(log)
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    settings = {
        "dataset": "digits",
        "split": "test",
        "arch": "digits_resnet8",
        "input_layer": "normalize",
        "sigma": SIGMA,
        "N0": 100,
        "N": N,
        "alpha": ALPHA,
        "seed": 0,
        "method": "exact",
        "checkpoint_sha256": digest,
        "num_classes": 10,
    }
    assert settings.items() <= manifest["settings"].items()
    assert "plugins" not in manifest["settings"]
    (run,) = manifest["runs"]
    assert {"started", "command", "git_commit", "python", "smoothadv", "packages"} <= run.keys()
    assert (run["skip"], run["max"], run["device"], run["first_row"]) == (1, EXAMPLES, "cpu", 0)
    assert run["command"][:3] == ["smoothadv", "certify", "digits"]


def test_log_may_have_any_name(certify, workplace):
    name = "deep/er/log.tar"
    assert certify(name, "--max", 1).code == 0
    assert header(workplace / name)[:6] == ["idx", "label", "predict", "radius", "correct", "time"]


def test_released_checkpoint_certifies_like_ours_once_its_input_layer_is_told(
    certify, workplace, checkpoint
):
    """The shared classifier as the released code would have saved it: four keys."""
    content, released = torch.load(checkpoint, weights_only=True), workplace / "released.pth.tar"
    torch.save(
        {key: content[key] for key in ("epoch", "arch", "state_dict", "optimizer")}, released
    )
    assert refused(
        certify("theirs.tsv", "--max", 5, model=released), "--input-layer", "center", "normalize"
    )
    assert not (workplace / "theirs.tsv").exists()
    certify("ours.tsv", "--max", 5)
    assert certify("theirs.tsv", "--max", 5, "--input-layer", "normalize", model=released).code == 0
    assert timeless(workplace / "theirs.tsv") == timeless(workplace / "ours.tsv")


@pytest.mark.parametrize(
    ("command", "options", "few", "enough", "advice"),
    [
        ("certify", [], 9, 10, "--N 10 "),
        ("predict", [], 10, 11, "--N 11 "),
        ("certify", ["--method", "adaptive"], 5, 600, "larger --N"),
    ],
)
def test_too_few_draws_are_warned_about(
    checkpoint, workplace, capsys, command, options, few, enough, advice
):
    """alpha^(1/n) >= 1/2 from n = 10 on at alpha = 0.001: with fewer draws every image abstains.

    The two-sided test of n equal votes has p = 2^(1-n) <= 0.001 from n = 11 on.
    """
    for draws, warning in ((few, advice), (enough, "")):
        usual = ["--max", 1, "--device", "cpu", "--N", draws, *options]
        outcome = call(capsys, command, "digits", checkpoint, 0.25, f"{draws}.tsv", *usual)
        assert outcome.code == 0 and warning in outcome.err
        assert outcome.err.startswith("warning: ") == bool(warning) == bool(outcome.err)


def test_another_sigma_than_in_training_is_warned_about(certify):
    outcome = certify("out.tsv", "--max", 1, sigma=1.0)
    assert outcome.code == 0 and outcome.err.startswith("warning: ") and "0.25" in outcome.err


def test_a_batch_that_no_memory_can_hold_is_refused(certify, workplace, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1000)
    outcome = certify("large.tsv", "--max", 2, "--batch", 1000)
    assert refused(outcome, "--batch 1000: a pass needs at least", "GiB of memory, there are 0.0")
    assert not Path("large.tsv").exists()


def test_dry_run_says_what_is_left_and_writes_nothing(certify, workplace, monkeypatch):
    outcome = certify("log.tsv", "--max", 5, "--dry-run")
    assert outcome.code == 0 and not [*workplace.glob("log.tsv*")]
    begin = "5 of 5 images of digits are to be certified by exact: 100 + 20 draws each, 600 in all;"
    assert outcome.out.startswith(begin) and " per second in batches of " in outcome.out
    assert certify("log.tsv", "--max", 2).code == 0
    # Measuring takes two seconds each time.
    monkeypatch.setattr("smoothadv.evaluation.certify._draws_per_second", lambda *given: 1000.0)
    before = snapshot(workplace)
    outcome = certify("log.tsv", "--max", 5, "--dry-run")
    assert outcome.out.startswith("3 of 5 images of digits")
    assert "log.tsv has 2 rows" in certify("log.tsv", "--max", 2, "--dry-run").out
    assert certify("log.tsv", "--max", 2, "--dry-run", "--overwrite").out.startswith(
        "2 of 2 images"
    )
    outcome = certify("log.tsv", "--max", 5, "--dry-run", "--method", "sequential")
    assert refused(outcome, "cannot resume", "method was 'exact'")
    assert snapshot(workplace) == before
    outcome = certify(
        "other.tsv", "--max", 5, "--method", "sequential", "--shard", "1/2", "--dry-run"
    )
    assert outcome.out.startswith("2 of 2 images") and "at most 100 + 20 draws" in outcome.out


@pytest.mark.parametrize(
    "begun, now, words",
    [
        ([], ["--shard", "0/2"], "log.tsv exists already, without shards"),
        (["--shard", "0/2"], [], "holds 1 shard of"),
        (["--shard", "0/2"], ["--shard", "1/2", "--N", "30"], "N was 20, now 30"),
        (["--shard", "0/2"], ["--shard", "0/2", "--max", "6"], "shard.examples was"),
        ([], ["--max", "3"], "holds example 3"),
        ([], ["--method", "two-sided"], "method was 'exact'"),
        (None, ["--overwrite"], "holds no log"),
        (None, [], "holds no log"),
    ],
)
def test_dry_run_refuses_what_the_run_would(certify, workplace, begun, now, words):
    if begun is None:
        Path("log.tsv").write_text("text\n")
    else:
        assert certify("log.tsv", "--max", 4, *begun).code == 0
    before = snapshot(workplace)
    rehearsed, run = (certify("log.tsv", "--max", 4, *now, *more) for more in (["--dry-run"], []))
    assert refused(rehearsed, words) and rehearsed.err == run.err
    assert snapshot(workplace) == before


METHODS = {
    "exact": ["--N", 300],
    "adaptive": ["--method", "adaptive", "--N", 800, "--radii", 0, 0.25, 0.5],
}
OTHER_SETTINGS = [
    ("exact", ["--seed", 1], "seed was 0, now 1"),
    ("exact", ["--N", 301], "N was 300, now 301"),
    ("exact", ["--N0", 10], "N0 was 100, now 10"),
    ("exact", ["--alpha", 0.01], "alpha was 0.001, now 0.01"),
    ("exact", ["--batch", 50], "batch was 200, now 50"),
    ("exact", ["--precision", "bf16"], "precision was 'fp32', now 'bf16'"),
    ("exact", ["--compile"], "compiled was False, now True"),
    ("exact", ["--split", "train"], "split was 'test', now 'train'"),
    ("exact", ["--method", "adaptive"], "method was 'exact', now 'adaptive'"),
    ("adaptive", ["--radii", 0.25], "radii was [0.0, 0.25, 0.5], now [0.0, 0.25]"),
    ("adaptive", ["--ladder"], "ladder was False, now True"),
    ("adaptive", ["--label-aware"], "label_aware was False, now True"),
]


def test_the_same_log_under_other_settings_is_refused_naming_them(certify, workplace, monkeypatch):
    """Without --resume too, and before any pass; a later option replaces an earlier one."""
    for method, options in METHODS.items():
        assert certify(f"{method}.tsv", "--max", 3, *options).code == 0
    before = snapshot(workplace)
    monkeypatch.delattr(VotingClassifier, "forward")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for method, change, field in OTHER_SETTINGS:
        options = [] if change[0] == "--method" else METHODS[method]
        outcome = certify(f"{method}.tsv", "--max", 5, *options, *change)
        last = outcome.err.splitlines()[-1]
        assert outcome.code == 1 and last.startswith("error: ") and field in last
    assert snapshot(workplace) == before
