"""Cascades in the commands and in Python: rows, resuming, attacks and refusals; and what they share
with routers: their logs are continued, merged, verified and attacked.
"""

from pathlib import Path

import numpy as np
import pytest

import smoothadv
from smoothadv.datasets import get_dataset
from smoothadv.records.logs import recorded_settings
from support.commands import call, refused, rows, settings_of, succeed, timeless
from support.models import IntervalClassifier
from support.refusals import refusal
from support.staged import N0, NUMBERS, N, slow_votes, write_stages

MODEL = IntervalClassifier(0.5), 0.5
pytestmark = pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")


@pytest.fixture
def log(logs) -> Path:
    return logs["cascade"]


def test_counts_are_those_of_draws_of_its_own(log, stages):
    """A few votes may differ by rounding. The draws of the model alone are others: they may have
    chosen the stages.
    """
    differ, compared = 0, 0
    for row in [each for each in rows(log) if each["predict"] != "-1"][:8]:
        for place, stage in enumerate(stages[: int(row["stage"])], start=1):
            votes = slow_votes(log, place, stage, int(row["idx"]), N0, N)
            own, rival = int(votes[int(row["predict"])]), row[f"stage_{place}_rival"]
            votes[int(row["predict"])] = 0
            differ, compared = differ + abs(int(votes.max()) - int(rival)), compared + 1
            if place == int(row["stage"]):
                differ += abs(own - int(row["successes"]))
    assert differ <= 2 and compared >= 8
    alone = log.with_name("alone.tsv")
    succeed("certify", "digits", *stages[0], alone, *NUMBERS, "--method", "two-sided")
    pairs = [
        (row["stage_1_rival"], single["rival"])
        for row, single in zip(rows(log), rows(alone))
        if row["predict"] == single["predict"] != "-1"
    ]
    assert sum(abs(int(one) - int(other)) for one, other in pairs) > 20


def test_another_cascade_neither_continues_a_log_nor_is_attacked(stages, log, workplace, capsys):
    before, certify = log.read_bytes(), ("certify", log, *NUMBERS)
    attack = ("attack", "o", "--against", log, "--device", "cpu")
    for order, threshold, (command, *options), words in [
        (stages, 0.8, certify, "threshold was 0.7, now 0.8"),
        (stages[::-1], 0.7, certify, "cannot resume"),
        (stages, 0.8, attack, "certifies something else: threshold was 0.7, now 0.8"),
    ]:
        model = write_stages(Path("other.toml"), order, threshold)
        outcome = call(capsys, command, "digits", model, "stages", *options)
        assert outcome.code == 1 and words in outcome.err
    assert log.read_bytes() == before


FAULTS = {
    "no file": ("", "nowhere.toml is no TOML file with threshold"),
    "a checkpoint": ("", "two or more [[stage]] with checkpoint and sigma: it is no text"),
    "no stages": ("threshold = 0.7", "found stage = None"),
    "one stage": ('[[stage]]\ncheckpoint = "a"\nsigma = 1', "found 1, expected two or more"),
    "no sigma": ('[[stage]]\ncheckpoint = "a"', "c.toml, [[stage]] 1: found {'checkpoint': 'a'}"),
    "unknown": ('sigma = 1\n[[stage]]\ncheckpoint = "a"\nsigma = 1', "found sigma, expected"),
    "no noise": (
        '[[stage]]\ncheckpoint = "a"\nsigma = 1\n[[stage]]\ncheckpoint = "a"\nsigma = 0\n',
        "c.toml, [[stage]] 2, sigma: found 0, '0' would smooth nothing",
    ),
    "threshold": (
        "threshold = 0.4\n" + '[[stage]]\ncheckpoint = "a"\nsigma = 1\n' * 2,
        "c.toml, threshold: found 0.4, expected a probability from 0.5 to 0.999",
    ),
    "no checkpoint": (
        '[[stage]]\ncheckpoint = "a"\nsigma = 1\n' * 2,
        "checkpoint a does not exist",
    ),
}


def test_a_rehearsal_counts_the_draws_of_all_stages(cascade, workplace, capsys):
    outcome = call(capsys, "certify", "digits", cascade, "stages", "x.tsv", *NUMBERS, "--dry-run")
    assert "at most 2 times 60 + 600 draws each, 39,600 in all" in outcome.out


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_is_no_cascade_is_refused_in_one_line(name, checkpoints, workplace, capsys):
    text, words = FAULTS[name]
    Path("c.toml").write_text(text)
    others = {"no file": "nowhere.toml", "a checkpoint": checkpoints["PGD"]}
    model = others.get(name, "c.toml")
    outcome = call(capsys, "certify", "digits", model, "stages", "log.tsv", *NUMBERS)
    assert refused(outcome, words, code=outcome.code) and not Path("log.tsv").exists()


@pytest.mark.parametrize(
    ("kind", "sigma", "options", "words"),
    [
        ("cascade", "stages", ["--method", "adaptive"], "--method adaptive is not for cascades"),
        ("cascade", "stages", ["--denoiser", "x"], "--denoiser is for one sigma"),
        ("cascade", "stages", ["--alpha-share", "1"], "--alpha-share"),
        ("cascade", "0.25", ["--method", "cascade"], "--method cascade is for cascades"),
        ("cascade", "0.25", ["--threshold", "0.7"], "--threshold is for cascades"),
        ("cascade", "stages", ["--threshold", "0.3"], "a probability from 0.5 to 0.999"),
        ("router", "stages", ["--method", "adaptive"], "--method adaptive is not for cascades"),
        (
            *("router", "stages", ["--method", "sequential-cascade"]),
            "--method sequential-cascade is for cascades",
        ),
        ("router", "stages", ["--threshold", "0.7"], "--threshold is for cascades"),
        ("cascade", "0.25", [], "it is a cascade, or a router: write stages in place of sigma"),
    ],
)
def test_contradictions_are_usage_errors(files, workplace, kind, sigma, options, words, capsys):
    outcome = call(capsys, "certify", "digits", files[kind], sigma, "log.tsv", *NUMBERS, *options)
    assert refused(outcome, words, code=2 if options else 1)


def test_an_attack_makes_the_accuracy_smaller(cascade, workplace):
    options = ["--attack", "PGD", "--epsilon", 0.2, 1.0, "--num-steps", 4, "--num-noise-vec", 4]
    few = ["--N", 300, "--skip", 24, "--device", "cpu"]
    succeed("attack", "digits", cascade, "stages", "out", *options, *few)
    small, large = (
        np.mean([int(row["correct"]) for row in rows(Path(f"out/epsilon_{size}.tsv"))])
        for size in ("0.2", "1")
    )
    assert large < small


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stages": [MODEL]}, "found 1, expected two or more"),
        ({"stages": [MODEL[0]] * 2}, "expected a pair"),
        ({"stages": 3}, "expected pairs"),
        ({"stages": [(MODEL[0], 0)] * 2}, "would smooth nothing"),
        ({"stages": [MODEL, (IntervalClassifier(0.2, 0.5), 0.25)]}, "classes"),
        # Nothing beside stages is ignored.
        ({"model": MODEL[0]}, "found a model or a sigma beside them"),
        ({"sigma": 0.25}, "found a model or a sigma beside them"),
        ({"settings": {"threshold": 0.9}}, "found 'threshold', expected alpha_share"),
        ({"settings": {"sigmas": (1, 2)}}, "found 'sigmas', expected alpha_share"),
        ({"router": MODEL[0]}, "router: found IntervalClassifier"),
        ({"router": ()}, "router: found (), expected a pair"),
        ({"router": (None, 0.5)}, "router: found no model"),
        ({"router": (MODEL[0], 0)}, "would smooth nothing"),
        (
            {"router": (IntervalClassifier(0.2, 0.5), 0.5)},
            "has 3 classes, the images of 'images by stage'",
        ),
        (
            {"stages": None, "model": MODEL[0], "sigma": 0.5, "router": MODEL},
            "found one without stages",
        ),
    ],
)
def test_stages_and_routers_that_are_none_are_refused(pictures, given, words):
    images, labels = pictures
    usual = {"images": images, "labels": labels, "stages": [MODEL] * 2, "n": 100}
    assert words in refusal(smoothadv.certify, **{**usual, **given})


def test_integers_are_stages(workplace, integers):
    """Without a bound on rounding they certify the program that runs, on any machine."""
    path = write_stages(Path("c.toml"), [(integers, 0.25), (integers, 0.12)])
    succeed("certify", "digits", path, "stages", "log.tsv", *NUMBERS, "--max", 8, "--sound")
    settings = recorded_settings(Path("log.tsv"))
    assert settings["sound"] and "torch" not in settings
    assert max(float(row["radius"]) for row in rows(Path("log.tsv"))) > 0.2
    succeed("certify", "verify", "log.tsv", "--rows", 2)


def test_a_sigma_or_stages_are_needed(pictures):
    with pytest.raises(TypeError, match="missing a required argument: 'sigma'"):
        smoothadv.certify(IntervalClassifier(0.5), *pictures)


# Cascades and routers


of_both = pytest.mark.parametrize("kind", ["cascade", "router"])
RECORDED = {
    "cascade": {"sigmas": [0.25, 0.12], "threshold": 0.7},
    "router": {"sigmas": [0.25, 0.12, 0.2], "threshold": None},
}


@of_both
def test_the_manifest_has_all_classifiers(kind, logs):
    settings = settings_of(logs[kind])
    expected = {**RECORDED[kind], "sigma": 0.25, "method": kind, "num_classes": 10}
    expected["dataset_fingerprint"] = get_dataset("digits", "test").fingerprint()
    assert {name: settings.get(name) for name in expected} == expected
    digests, objectives = settings["checkpoint_sha256"]["stages"], ["SmoothAdv", "Gaussian"]
    assert len({*digests[:2]}) == 2
    assert [each["objective"]["name"] for each in settings["training"][:2]] == objectives


@of_both
def test_a_torn_log_is_continued_and_shards_are_merged(kind, files, logs, workplace):
    log, certify = logs[kind], ("certify", "digits", files[kind], "stages")
    lines = log.read_bytes().splitlines(keepends=True)
    Path("torn.tsv").write_bytes(b"".join(lines[:25]) + lines[25][:11])
    manifest = Path(f"{log}.manifest.json")
    Path("torn.tsv.manifest.json").write_bytes(manifest.read_bytes())
    succeed(*certify, "torn.tsv", *NUMBERS)
    assert timeless(Path("torn.tsv")) == timeless(log)
    for shard in ("0/2", "1/2"):
        succeed(*certify, "all.tsv", *NUMBERS, "--max", 8, "--shard", shard)
    succeed("certify", "merge", "all.tsv")
    assert timeless(Path("all.tsv")) == timeless(log)[:8]


@of_both
@pytest.mark.parametrize("options", [["--method", "sequential"], ["--sound"]])
def test_logs_are_verified_by_new_draws(kind, files, workplace, options, capsys):
    certify = ["certify", "digits", files[kind], "stages", "log.tsv", *NUMBERS, "--max", 8]
    succeed(*certify, *options)
    found = call(capsys, "certify", "verify", "log.tsv", "--rows", 4, "--device", "cpu")
    assert found.code == 0 and "all are equal" in found.out
    if "--method" in options:
        radii = {float(row["radius"]) for row in rows(Path("log.tsv"))}
        assert radii <= {*settings_of("log.tsv")["radii"]}


@of_both
def test_predictions_are_those_of_the_certificates(kind, files, logs, workplace, capsys):
    predict = ("predict", "digits", files[kind], "stages")
    succeed(*predict, "p.tsv", "--N", 1000, "--skip", 24, "--device", "cpu")
    certified = rows(logs[kind])[::2]
    pairs = [(a["predict"], b["predict"]) for a, b in zip(rows(Path("p.tsv")), certified)]
    both = [(a, b) for a, b in pairs if "-1" not in (a, b)]
    assert len(both) > 7 and all(a == b for a, b in both)
    outcome = call(capsys, *predict, "q.tsv", "--top-k", 2)
    assert refused(outcome, f"--top-k is not for {kind}s", code=2)


@of_both
def test_no_certificate_is_contradicted_by_an_attack_that_knows_the_stages(
    kind, files, logs, workplace, capsys
):
    options = ["--N", 500, "--num-noise-vec", 4, "--num-steps", 4, "--max", 9, "--device", "cpu"]
    attack = ("attack", "digits", files[kind], "stages", "out", "--against", logs[kind], *options)
    outcome = call(capsys, *attack)
    assert outcome.code == 0 and ", 0 flipped" in outcome.out
