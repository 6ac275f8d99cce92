"""Cascades in the commands and in Python: rows, resuming, verification, attacks and refusals."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import smoothadv
from smoothadv.base.errors import UserError
from smoothadv.records.logs import recorded_settings
from smoothadv.statistics.bounds import threshold_radius, two_sided_radius
from support.commands import call, header, refused, rows, succeed, timeless
from support.models import IntervalClassifier
from support.staged import slow_votes, write_stages

N, N0, SIGMAS = 600, 60, (0.25, 0.12)
NUMBERS = ["--N", N, "--N0", N0, "--skip", 12, "--device", "cpu"]
pytestmark = pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")


@pytest.fixture(scope="module")
def cascade(tmp_path_factory, checkpoints) -> Path:
    path = tmp_path_factory.mktemp("cascade") / "cascade.toml"
    return write_stages(path, [(checkpoints["PGD"], 0.25), (checkpoints["gaussian"], 0.12)], 0.7)


@pytest.fixture(scope="module")
def log(cascade) -> Path:
    path = cascade.parent / "log.tsv"
    succeed("certify", "digits", cascade, "stages", path, *NUMBERS)
    return path


def test_rows_follow_from_their_counts(log):
    expected = "idx label predict radius correct time successes trials stage".split()
    assert header(log) == [*expected, "stage_1_rival", "stage_2_rival"]
    seen = set()
    for row in rows(log):
        stage, own = int(row["stage"]), int(row["successes"])
        rivals = [int(row[f"stage_{number}_rival"]) for number in (1, 2)]
        if row["predict"] == "-1":
            assert row["radius"] == "0.0"
            continue
        seen.add(stage)
        if stage == 1:
            radius = threshold_radius(own, N, 0.25, 1e-3, 0.7)
            assert rivals[1] == 0
        else:
            first = threshold_radius(N - rivals[0], N, 0.25, 1e-3, 1 - 0.7)
            last = two_sided_radius(own, rivals[1], N, 0.12, 1e-3, 0.9)
            radius = min(first, last)
        assert int(row["trials"]) == N and 0 <= float(row["radius"]) <= radius
        assert float(row["radius"]) == pytest.approx(radius, abs=1e-12)
    assert seen == {1, 2}, "both kinds of certificates"


def test_counts_are_those_of_draws_of_its_own(log, checkpoints):
    """A few votes may differ by rounding. The draws of the model alone are others: they may have
    chosen the stages.
    """
    stages = [(checkpoints[name], sigma) for name, sigma in zip(("PGD", "gaussian"), SIGMAS)]
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


def test_manifest_has_both_stages(log, checkpoints):
    settings = recorded_settings(log)
    assert (settings["sigmas"], settings["sigma"], settings["threshold"]) == ([*SIGMAS], 0.25, 0.7)
    assert settings["method"] == "cascade" and len(settings["checkpoint_sha256"]["stages"]) == 2
    assert len({*settings["checkpoint_sha256"]["stages"]}) == 2
    assert [each["objective"]["name"] for each in settings["training"]] == ["SmoothAdv", "Gaussian"]


def test_a_torn_log_is_continued_and_shards_are_merged(cascade, log, workplace):
    lines = log.read_bytes().splitlines(keepends=True)
    torn = Path("torn.tsv")
    torn.write_bytes(b"".join(lines[:7]) + lines[7][:11])
    manifest = Path(f"{log}.manifest.json")
    Path("torn.tsv.manifest.json").write_bytes(manifest.read_bytes())
    succeed("certify", "digits", cascade, "stages", torn, *NUMBERS)
    assert timeless(torn) == timeless(log)
    for shard in ("0/2", "1/2"):
        succeed("certify", "digits", cascade, "stages", "all.tsv", *NUMBERS, "--shard", shard)
    succeed("certify", "merge", "all.tsv")
    assert timeless(Path("all.tsv")) == timeless(log)


@pytest.mark.parametrize("options", [["--method", "sequential"], ["--sound"]])
def test_logs_are_verified_by_new_draws(cascade, workplace, options, capsys):
    succeed("certify", "digits", cascade, "stages", "log.tsv", *NUMBERS, *options)
    found = call(capsys, "certify", "verify", "log.tsv", "--rows", 5, "--device", "cpu")
    assert found.code == 0 and "all are equal" in found.out
    if "--method" in options:
        grid = recorded_settings(Path("log.tsv"))["radii"]
        assert {float(row["radius"]) for row in rows(Path("log.tsv"))} <= {*grid}


def test_another_cascade_does_not_continue_a_log(cascade, log, workplace, capsys, checkpoints):
    before = log.read_bytes()
    order = write_stages(
        Path("order.toml"), [(checkpoints["gaussian"], 0.12), (checkpoints["PGD"], 0.25)], 0.7
    )
    for model, words in [
        (
            write_stages(
                Path("p0.toml"), [(checkpoints["PGD"], 0.25), (checkpoints["gaussian"], 0.12)], 0.8
            ),
            "threshold was 0.7, now 0.8",
        ),
        (order, "cannot resume"),
    ]:
        outcome = call(capsys, "certify", "digits", model, "stages", log, *NUMBERS)
        assert outcome.code == 1 and words in outcome.err
    assert log.read_bytes() == before


FAULTS = {
    "no file": ("nowhere.toml", "nowhere.toml is no TOML file with threshold"),
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


def test_a_checkpoint_is_no_file_of_stages(checkpoints, workplace, capsys):
    outcome = call(capsys, "certify", "digits", checkpoints["PGD"], "stages", "log.tsv")
    assert refused(outcome, "two or more [[stage]] with checkpoint and sigma: it is no text")


def test_a_rehearsal_counts_the_draws_of_all_stages(cascade, workplace, capsys):
    outcome = call(capsys, "certify", "digits", cascade, "stages", "x.tsv", *NUMBERS, "--dry-run")
    assert "at most 2 times 60 + 600 draws each, 39,600 in all" in outcome.out


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_is_no_cascade_is_refused_in_one_line(name, workplace, capsys):
    text, words = FAULTS[name]
    if not text.endswith(".toml"):
        Path("c.toml").write_text(text)
    model = text if text.endswith(".toml") else "c.toml"
    outcome = call(capsys, "certify", "digits", model, "stages", "log.tsv", *NUMBERS)
    assert refused(outcome, words, code=outcome.code) and not Path("log.tsv").exists()


@pytest.mark.parametrize(
    ("sigma", "options", "words"),
    [
        ("stages", ["--method", "adaptive"], "--method adaptive is not for cascades"),
        ("stages", ["--denoiser", "x"], "--denoiser is for one sigma"),
        ("stages", ["--alpha-share", "1"], "--alpha-share"),
        ("0.25", ["--method", "cascade"], "--method cascade is for cascades"),
        ("0.25", ["--threshold", "0.7"], "--threshold is for cascades"),
        ("stages", ["--threshold", "0.3"], "a probability from 0.5 to 0.999"),
    ],
)
def test_contradictions_are_usage_errors(cascade, workplace, sigma, options, words, capsys):
    outcome = call(capsys, "certify", "digits", cascade, sigma, "log.tsv", *NUMBERS, *options)
    assert refused(outcome, words, code=2)


def test_a_cascade_given_as_a_checkpoint_is_answered(cascade, workplace, capsys):
    outcome = call(capsys, "certify", "digits", cascade, 0.25, "log.tsv", *NUMBERS)
    assert refused(outcome, "it is a cascade, or a router: write stages in place of sigma")


def test_predictions_are_those_of_the_cascade_and_few_are_wrong(cascade, log, workplace, capsys):
    succeed("predict", "digits", cascade, "stages", "p.tsv", "--N", 2000, *NUMBERS[4:])
    pairs = [(a["predict"], b["predict"]) for a, b in zip(rows(Path("p.tsv")), rows(log))]
    both = [(a, b) for a, b in pairs if "-1" not in (a, b)]
    assert len(both) > 15 and all(a == b for a, b in both)
    low = Path("low.toml")
    low.write_text(cascade.read_text().replace("threshold = 0.7", "threshold = 0.1"))
    outcome = call(capsys, "predict", "digits", low, "stages", "q.tsv")
    assert refused(outcome, "threshold: found 0.1, expected a probability from 0.5")
    outcome = call(capsys, "predict", "digits", cascade, "stages", "q.tsv", "--top-k", 2)
    assert refused(outcome, "--top-k is not for cascades", code=2)


def test_no_certificate_is_contradicted_by_an_attack_that_knows_the_cascade(
    cascade, log, workplace, capsys
):
    options = ["--N", 1000, "--num-noise-vec", 8, "--num-steps", 5, "--device", "cpu"]
    outcome = call(capsys, "attack", "digits", cascade, "stages", "out", "--against", log, *options)
    assert outcome.code == 0 and ", 0 flipped" in outcome.out
    other = Path("other.toml")
    other.write_text(cascade.read_text().replace("threshold = 0.7", "threshold = 0.8"))
    outcome = call(capsys, "attack", "digits", other, "stages", "o", "--against", log, *options)
    assert outcome.code == 1
    assert "certifies something else: threshold was 0.7, now 0.8" in outcome.err


def test_an_attack_makes_the_accuracy_smaller(cascade, workplace):
    options = ["--attack", "PGD", "--epsilon", 0.2, 1.0, "--num-steps", 5, "--num-noise-vec", 8]
    succeed("attack", "digits", cascade, "stages", "out", *options, "--N", 500, *NUMBERS[4:])
    small, large = (
        np.mean([int(row["correct"]) for row in rows(Path(f"out/epsilon_{size}.tsv"))])
        for size in ("0.2", "1")
    )
    assert large < small


def images() -> tuple[torch.Tensor, torch.Tensor]:
    grey = torch.linspace(0.1, 0.9, 12)
    pictures = torch.full((12, 1, 2, 2), 0.5)
    pictures[:, 0, 0, 0] = grey
    return pictures, (grey > 0.5).long()


def test_stages_in_python_are_modules_or_paths(workplace):
    """Two classes by a threshold on one pixel: linear, so that the true radius is the distance."""
    pictures, labels = images()
    wide, narrow = IntervalClassifier(0.5), IntervalClassifier(0.5)
    found = smoothadv.certify(
        images=pictures,
        labels=labels,
        stages=[(wide, 0.5), (narrow, 0.25)],
        n=2000,
        threshold=0.8,
        log="log.tsv",
    )
    distance = np.abs(pictures[:, 0, 0, 0].numpy() - 0.5)
    assert (found.predict == found.label).sum() >= 10
    assert (found.radius <= distance).all() and (found.radius > distance * 0.5 - 0.1).all()
    again = smoothadv.certify(
        images=pictures,
        labels=labels,
        stages=[(wide, 0.5), (narrow, 0.25)],
        n=2000,
        threshold=0.8,
        log="log.tsv",
    )
    pd.testing.assert_frame_equal(found, again)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([(IntervalClassifier(0.5), 0.5)], "found 1, expected two or more"),
        ([IntervalClassifier(0.5)] * 2, "expected a pair"),
        (3, "expected pairs"),
        ([(IntervalClassifier(0.5), 0)] * 2, "would smooth nothing"),
        ([(IntervalClassifier(0.5), 0.5), (IntervalClassifier(0.2, 0.5), 0.25)], "classes"),
    ],
)
def test_stages_that_are_none_are_refused(stages, words):
    pictures, labels = images()
    with pytest.raises(UserError, match=words):
        smoothadv.certify(images=pictures, labels=labels, stages=stages, n=100)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": IntervalClassifier(0.5)}, "found a model or a sigma beside them"),
        ({"sigma": 0.25}, "found a model or a sigma beside them"),
        ({"settings": {"threshold": 0.9}}, "found 'threshold', expected alpha_share"),
        ({"settings": {"sigmas": (1, 2)}}, "found 'sigmas', expected alpha_share"),
    ],
)
def test_nothing_beside_stages_is_ignored(more, words):
    pictures, labels = images()
    stages = [(IntervalClassifier(0.5), 0.5)] * 2
    with pytest.raises(UserError, match=words):
        smoothadv.certify(images=pictures, labels=labels, stages=stages, n=100, **more)


def test_integers_are_stages(workplace, checkpoints):
    """Without a bound on rounding they certify the program that runs, on any machine."""
    for name, sigma in (("PGD", 0.25), ("gaussian", 0.12)):
        succeed("quantize", "digits", checkpoints[name], sigma, f"{name}.pth.tar")
    path = write_stages(Path("c.toml"), [("PGD.pth.tar", 0.25), ("gaussian.pth.tar", 0.12)])
    succeed("certify", "digits", path, "stages", "log.tsv", *NUMBERS, "--sound")
    settings = recorded_settings(Path("log.tsv"))
    assert settings["sound"] and "torch" not in settings
    assert max(float(row["radius"]) for row in rows(Path("log.tsv"))) > 0.2
    succeed("certify", "verify", "log.tsv", "--rows", 5)


def test_a_sigma_or_stages_are_needed():
    pictures, labels = images()
    with pytest.raises(TypeError, match="missing a required argument: 'sigma'"):
        smoothadv.certify(IntervalClassifier(0.5), pictures, labels)
