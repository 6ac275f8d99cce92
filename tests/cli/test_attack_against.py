"""attack --against: true certificates withstand it, false ones do not, and each flip can be
repeated.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from smoothadv.attacks.pgd import PGD
from smoothadv.checkpoints import load_classifier
from smoothadv.evaluation.falsify import (
    CertificatePolls,
    Certificates,
    Claim,
    read_certificates,
    verdict,
)
from smoothadv.evaluation.log import Example
from smoothadv.evaluation.specs import FalsifySpec
from smoothadv.noise import Noise, Purpose
from smoothadv.statistics.bounds import certified_radius
from support.attack_runs import (
    SIGMA,
    archive,
    l2_norms,
    noisy_logits,
    predicted,
)
from support.commands import (
    Outcome,
    call,
    header,
    manifest_of,
    place_of,
    refused,
    rows,
    snapshot,
    succeed,
    timeless,
)
from support.refusals import refusal

USUAL = ["--device", "cpu", "--N", 100, "--num-steps", 3, "--num-noise-vec", 4]
COLUMNS = [
    "idx",
    "label",
    "predict",
    "basePredict",
    "correct",
    "time",
    "attack_norm",
    "epsilon",
    "abstain",
    "certified",
    "radius",
    "flipped",
]
LOG = "out/against.tsv"


@pytest.fixture(scope="module")
def certified(checkpoint, tmp_path_factory) -> Path:
    """Certificates of 45 images from 1000 draws: some abstain, some are of a wrong class."""
    log = tmp_path_factory.mktemp("certified") / "true.tsv"
    succeed(
        "certify", "digits", checkpoint, SIGMA, log, "--N", 1000, "--skip", 8, "--device", "cpu"
    )
    return log


def forged(
    log: Path, target: Path, factor: float, manifest: bool = True, **settings: object
) -> Path:
    """A copy whose radii are ``factor`` times as large, of a run with so many draws that they are
    possible.
    """
    kept = header(log)[:6]
    lines = [
        [str(factor * float(row[name])) if name == "radius" else row[name] for name in kept]
        for row in rows(log)
    ]
    target.write_text("".join("\t".join(line) + "\n" for line in [kept, *lines]))
    if manifest:
        content = manifest_of(log)
        content["settings"] |= {"N": 10**15, **settings}
        target.with_name(target.name + ".manifest.json").write_text(json.dumps(content))
    return target


@pytest.fixture
def attack(checkpoint, workplace, capsys) -> Callable[..., Outcome]:
    """Attack the certificates of a log into out/; options given later win."""

    return lambda log, *options, outdir="out": call(
        capsys, "attack", "digits", checkpoint, SIGMA, outdir, *USUAL, "--against", log, *options
    )


def certifies(row: dict[str, str]) -> bool:
    return row["predict"] != "-1" and float(row["radius"]) > 0


def claims(log: Path) -> dict[str, dict[str, str]]:
    """The rows of a certification log that claim a radius."""
    return {row["idx"]: row for row in rows(log) if certifies(row)}


def test_true_certificates_withstand_the_attack(attack, certified, workplace):
    """Each of 45 images flips with probability <= 0.002, so more flips than tolerated have
    probability <= 0.001.
    """
    outcome = attack(certified)
    assert (outcome.code, outcome.err) == (0, "")
    table = rows(workplace / LOG)
    count = len(claims(certified))
    images = len(rows(certified))
    tolerated = next(k for k in range(count) if stats.binom.sf(k, images, 0.002) <= 0.001)
    assert 30 < len(table) == count < 45, "abstentions claim nothing"
    assert sum(row["flipped"] == "1" for row in table) <= tolerated
    assert (
        outcome.out.count("\n") == 1
        and f"{count} certificates attacked at 0.999 of their radii" in outcome.out
    )
    assert (
        f"up to {tolerated} of {images} images may flip" in outcome.out
        and "alpha 0.001 + 0.001" in outcome.out
    )


def test_rows_tell_the_certificate_and_the_attack_within_it(attack, certified, workplace):
    attack(certified, "--fraction", 0.5)
    assert header(workplace / LOG) == COLUMNS
    expected, arrays = claims(certified), archive(workplace / LOG)
    assert {"certified", "radius", "flipped", "label", "predict"} <= arrays.keys()
    np.testing.assert_allclose(l2_norms(arrays), arrays["attack_norm"], rtol=1e-6)
    for row in rows(workplace / LOG):
        claim = expected.pop(row["idx"])
        assert (row["certified"], row["label"]) == (claim["predict"], claim["label"])
        assert float(row["radius"]) == float(claim["radius"])
        assert float(row["epsilon"]) == 0.5 * float(claim["radius"])
        # The sum of image and perturbation is rounded to float32: 2^-25 for a pixel of 1.
        assert float(row["attack_norm"]) <= float(row["epsilon"]) * (1 + 1e-5) + 1e-7
        assert row["correct"] == str(int(row["predict"] == row["label"]))
        assert row["flipped"] == str(int(row["predict"] not in ("-1", row["certified"])))
    assert not expected and (arrays["attack_norm"] > 0.9 * arrays["epsilon"]).all()
    wrong = arrays["certified"] != arrays["label"]
    assert wrong.any(), "certificates of a wrong class are claims as well"


def test_attack_goes_away_from_the_certified_class_not_from_the_label(
    attack, checkpoint, certified, workplace
):
    attack(certified)
    classifier, arrays = load_classifier(checkpoint, "digits"), archive(workplace / LOG)

    def confidence(row: int, kind: str) -> float:
        logits = noisy_logits(
            classifier, arrays[kind][row], int(arrays["idx"][row]), Purpose.ATTACK_NOISE, 4
        )
        return float(logits.double().softmax(1).mean(0)[arrays["certified"][row]])

    for row in range(len(arrays["idx"])):
        assert confidence(row, "adversarial") < confidence(row, "image")


def test_predictions_are_on_draws_that_nobody_saw(
    attack, checkpoint, certified, workplace, monkeypatch
):
    asked, stream = [], Noise.stream

    def recorded(self: Noise, example: int, device: object, purpose: int = Purpose.VOTES):
        asked.append(purpose)
        return stream(self, example, device, purpose)

    monkeypatch.setattr(Noise, "stream", recorded)
    attack(certified)
    assert set(asked) == {Purpose.ATTACK_NOISE, Purpose.ATTACKED_VOTES}
    classifier, arrays = load_classifier(checkpoint, "digits"), archive(workplace / LOG)
    for image, index, prediction in zip(
        arrays["adversarial"], arrays["idx"].tolist(), arrays["predict"]
    ):
        assert prediction == predicted(classifier, image, index, Purpose.ATTACKED_VOTES, 100)


@pytest.fixture
def false(certified, workplace) -> Path:
    return forged(certified, workplace / "false.tsv", 3)


def printed_flips(outcome: Outcome) -> dict[int, tuple[re.Match[str], str]]:
    """The printed flips by image: the match of the line, and the command that repeats the
    attack.
    """
    pattern = (
        r"flipped: image (\d+) \(class (\d+)\), certified as (\d+) within ([\d.e-]+), "
        r"is predicted as (\d+) at a distance of ([\d.e-]+); again with\n  (smoothadv attack .*)\n"
    )
    return {int(match[1]): (match, match[7]) for match in re.finditer(pattern, outcome.out)}


def test_radii_three_times_too_large_are_found_out(attack, false, workplace):
    """The negative control: the same attack on the same model, of certificates that are false."""
    outcome = attack(false)
    assert outcome.code == 1 and outcome.err.count("\n") == 1 and outcome.err.startswith("error: ")
    flipped = {int(row["idx"]): row for row in rows(workplace / LOG) if row["flipped"] == "1"}
    assert (
        len(flipped) > 15 and str(false) in outcome.err and f"{len(flipped)} flipped" in outcome.err
    )
    flips = printed_flips(outcome)
    assert flips.keys() == flipped.keys() and outcome.out.count("\n") == 2 * len(flipped)
    for index, (match, _) in flips.items():
        row = flipped[index]
        assert match.group(2, 3, 5) == (row["label"], row["certified"], row["predict"])
        told_radius, told_norm = float(match[4]), float(match[6])
        assert told_radius == pytest.approx(float(row["radius"]), rel=1e-5)
        assert (
            told_norm == pytest.approx(float(row["attack_norm"]), rel=1e-5)
            and told_norm < told_radius
        )


OPTIONS = {
    "none": [],
    "part": ["--skip", 3, "--max", 6],
    "settings": [
        "--max=5",
        "--attack",
        "DDN",
        "--seed",
        5,
        "--restarts",
        2,
        "--alpha",
        0.01,
        "--fraction",
        0.9,
    ],
    "only": ["--png", 2, "--overwrite", "--only"],
    "targets": ["--max", 4, "--target", "every", "--attack-batch", 6, "--batch", 30],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_flip_is_repeated_by_the_command_printed_with_it(
    attack, false, workplace, capsys, options
):
    claimed = list(claims(false))[:4] if "--only" in options else []
    flips = printed_flips(attack(false, *options, *claimed))
    before = {row["idx"]: row for row in timeless(workplace / LOG)}
    assert flips, "there must be flips for this test to say anything"
    for index, (_, command) in list(flips.items())[:4]:
        words = shlex.split(command)
        assert words[:2] == ["smoothadv", "attack"]
        (repeated,) = printed_flips(call(capsys, "attack", *words[2:]))
        assert repeated == index
        assert timeless(workplace / f"out_{index}/against.tsv") == [before[str(index)]]


@pytest.mark.parametrize("outdir", ["digits", "cpu"])
def test_finished_falsification_is_judged_again_without_work(attack, false, outdir, workplace):
    """Also where other words on the command line equal the folder's name."""
    first = attack(false, "--max", 5, outdir=outdir)
    index, (_, command) = next(iter(printed_flips(first).items()))
    words = shlex.split(command)
    assert (
        words[2] == "digits"
        and words[5] == f"{outdir}_{index}"
        and words[words.index("--device") + 1] == "cpu"
    )
    before = snapshot(workplace)
    assert attack(false, "--max", 5, outdir=outdir) == first and snapshot(workplace) == before


def test_few_flips_are_credible_and_how_many_is_a_matter_of_false_alarm(
    attack, false, certified, workplace
):
    """With alpha 0.4 for the certificates and 0.001 for PREDICT, about 28 flips of 45 images are
    tolerated.
    """
    generous = forged(certified, workplace / "generous.tsv", 3, alpha=0.4)
    outcome = attack(generous)
    images = len(rows(certified))
    flips = sum(row["flipped"] == "1" for row in rows(workplace / LOG))
    for level in (0.001, 0.4, 1 - 1e-9):
        outcome = attack(generous, "--false-alarm", level)
        tolerated = next(k for k in range(images + 1) if stats.binom.sf(k, images, 0.401) <= level)
        assert f"up to {tolerated} of {images} images may flip" in outcome.out + outcome.err
        assert outcome.code == int(flips > tolerated)


def test_manifest_names_the_certificates_and_others_are_not_taken_for_these(
    attack, certified, false, workplace
):
    some = place_of(certified, "certified", certifies) + 1
    attack(certified, "--max", some, "--fraction", 0.9)
    settings, before = manifest_of(workplace / LOG)["settings"], snapshot(workplace)
    assert settings["against"].keys() == {"sha256", "fraction", "alpha"}
    assert settings["against"]["fraction"] == 0.9 and settings["against"]["alpha"] == 0.001
    assert settings["attack"]["epsilon"] is None, "each image has its own"
    assert refused(attack(certified, "--max", some), "against.fraction was 0.9, now 0.999")
    assert refused(attack(false, "--max", some, "--fraction", 0.9), "against.sha256")
    assert snapshot(workplace) == before


@pytest.mark.parametrize(
    ("factor", "fraction"), [(1, 0.999999999), (1e-4, 0.999)], ids=["fraction 1", "tiny radii"]
)
def test_attacks_stay_within_the_radius(attack, certified, workplace, factor, fraction):
    """Rounding to float32 falsifies nothing."""
    attack(forged(certified, workplace / "log.tsv", factor), "--fraction", fraction)
    assert all(float(row["attack_norm"]) < float(row["radius"]) for row in rows(workplace / LOG))


def test_log_without_a_manifest_is_attacked_with_a_warning(attack, certified, workplace):
    """As released logs: it is unknown which model they certify."""
    outcome = attack(forged(certified, Path("log.tsv"), 1, manifest=False), "--max", 4)
    assert outcome.code == 0 and outcome.err.count("\n") == 1
    assert outcome.err.startswith("warning: log.tsv has no manifest")


def test_sound_certificates_are_attacked_by_images_of_8_bits_within_the_radius(
    attack, checkpoint, workplace
):
    """Checked in whole numbers: the squared distance in grey levels is below (255 radius)^2."""
    sound, few = workplace / "sound.tsv", ["--N", 300, "--max", 8, "--device", "cpu"]
    succeed("certify", "digits", checkpoint, SIGMA, sound, "--sound", *few)
    outcome = attack(sound)
    assert (outcome.code, outcome.err) == (0, "")
    arrays, claimed = archive(workplace / LOG), claims(sound)
    levels = {name: arrays[name].astype(np.float64) * 255 for name in ("image", "adversarial")}
    for name, values in levels.items():
        assert np.abs(values - values.round()).max() < 1e-4, "whole grey levels"
        assert (values.round() / 255).astype(np.float32).tobytes() == arrays[name].tobytes()
    squares = ((levels["adversarial"].round() - levels["image"].round()).astype(int) ** 2).sum(
        (1, 2, 3)
    )
    radii = [float(claimed[str(index)]["radius"]) for index in arrays["idx"].tolist()]
    assert all(square < (255 * radius) ** 2 for square, radius in zip(squares.tolist(), radii))
    assert (squares > 0).sum() >= len(radii) - 1, "the attack moves"
    assert manifest_of(workplace / LOG)["settings"]["noise"] == "RoundedGaussianNoise"


# ---- the verdict on certificates that all hold their alpha, simulated ----

# On images with two nearly equally likely classes almost nothing is certified, and about half of
# the certificates are false. That is allowed: before its noise is drawn, each image gets a false
# certificate with probability <= alpha.
ALPHA, N, IMAGES, RUNS = 0.001, 1000, 5000, 60
SPEC = FalsifySpec(
    model=Path("checkpoint.pth.tar"),
    dataset="digits",
    sigma=0.25,
    alpha=ALPHA,
    against=Path("log.tsv"),
    outdir=Path("out"),
    attack=PGD(0.0, 1),
)


@pytest.mark.parametrize(
    ("printed", "least"),
    [
        ((0.123, 0.0456), (0.1225, 0.04555)),
        ((0.1234, 0.5), (0.12335, 0.49995)),
        ((0.12345, 0.5), (0.12345, 0.5)),
    ],
)
def test_radii_that_were_rounded_are_attacked_as_if_they_were_rounded_up(workplace, printed, least):
    """A radius of 0 is no claim, and an image at the distance of the radius itself does not
    count.
    """
    rows = [f"{idx}\t1\t1\t{radius}\t1\t0:00:01\n" for idx, radius in enumerate((*printed, 0.0))]
    Path("log.tsv").write_text("idx\tlabel\tpredict\tradius\tcorrect\ttime\n" + "".join(rows))
    certificates = read_certificates(SPEC)
    radii = [claim.radius for claim in certificates.claims.values()]
    assert radii == pytest.approx(least, rel=1e-12)
    polls = CertificatePolls(None, None, certificates=certificates)
    example = Example(0, torch.zeros(1, 8, 8), 1)
    for answer, norm, flipped in [
        (2, np.nextafter(radii[0], 0), 1),
        (2, radii[0], 0),
        (1, 0.0, 0),
        (-1, 0.0, 0),
    ]:
        assert polls.judged(example, answer, norm)["flipped"] == flipped


RECORD = (
    "dataset split dataset_fingerprint checkpoint_sha256 module_sha256 denoiser input_layer sigma "
    "precision"
).split()


@pytest.mark.parametrize(
    ("images", "classes", "changed"),
    [(4, 2, None), (5, 1, None), *((5, 2, name) for name in RECORD)],
)
def test_certificates_of_anything_else_are_not_attacked(images, classes, changed):
    recorded = {name: f"one {name}" for name in RECORD}
    certificates = Certificates(SPEC.against, [4], {4: Claim(0, 1, 0.1)}, ALPHA, recorded)

    def check(images: int, classes: int, **settings: object) -> None:
        dataset = mock.MagicMock(
            __len__=lambda dataset: images, description=mock.Mock(num_classes=classes)
        )
        certificates.check_evaluation(mock.Mock(dataset=dataset, settings={**recorded, **settings}))

    check(5, 2)
    words = "it has image 4 and class 1" if changed is None else f"something else: {changed} was"
    assert words in refusal(check, images, classes, **({changed: "another"} if changed else {}))


def certified_and_flipped(seed: int) -> tuple[Certificates, pd.DataFrame]:
    """A log by CERTIFY, whose class was selected from 100 draws; and attacks that PREDICT answers
    without any error.

    The smoothed classifier is class 0 everywhere, with a probability of 0.5001.
    """
    random = np.random.default_rng(seed)
    selected = (random.binomial(100, 0.5001, IMAGES) < 50).astype(int)
    votes = random.binomial(N, np.where(selected == 0, 0.5001, 0.4999))
    images = np.flatnonzero(
        [certified_radius(k, N, 1.0, ALPHA) is not None for k in votes.tolist()]
    ).tolist()
    claims = {index: Claim(0, int(selected[index]), 0.01) for index in images}
    table = pd.DataFrame(
        {"idx": images, "certified": [claim.certified for claim in claims.values()]}
    )
    table = table.assign(label=0, predict=0, radius=0.01, attack_norm=0.0, flipped=table.certified)
    return Certificates(SPEC.against, list(range(IMAGES)), claims, ALPHA, {}), table


def test_a_log_that_holds_its_alpha_is_not_accused():
    """The verdict promises a false alarm in at most 0.001 of all runs: two in 60 would come with
    less than 0.002.
    """
    runs = [certified_and_flipped(seed) for seed in range(RUNS)]
    assert sum(verdict(SPEC, *run).refutes for run in runs) <= 1
    false = np.array([table.flipped.sum() for _, table in runs])
    assert (
        stats.binomtest(int(false.sum()), RUNS * IMAGES, ALPHA, alternative="greater").pvalue > 1e-6
    )
    assert false.sum() > 20, "there are false certificates among them"
    # The negative control, of the certified images alone: far more than a share alpha of these are
    # false.
    alone = [(dataclasses.replace(each, images=sorted(each.claims)), table) for each, table in runs]
    assert sum(verdict(SPEC, *run).refutes for run in alone) > RUNS / 10


def test_one_flip_more_than_is_credible_accuses_a_log():
    """Of 5,000 images ten flip at 0.002 in the mean; the most that more than one log in 1,000
    exceeds is no proof.
    """
    certificates, table = certified_and_flipped(0)
    credible = int(stats.binom.isf(0.001, IMAGES, ALPHA + SPEC.alpha))
    assert (
        stats.binom.sf(credible, IMAGES, 0.002)
        <= 0.001
        < stats.binom.sf(credible - 1, IMAGES, 0.002)
    )
    for flips in (credible, credible + 1):
        claims = {index: Claim(0, 1, 0.01) for index in range(flips)}
        flipped = pd.concat(
            [table.head(1).assign(idx=index, certified=1, flipped=1) for index in claims]
        )
        judged = verdict(SPEC, dataclasses.replace(certificates, claims=claims), flipped)
        assert (judged.tolerated, judged.refutes) == (credible, flips > credible)
