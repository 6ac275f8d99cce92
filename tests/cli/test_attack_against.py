"""attack --against: true certificates withstand it, false ones do not, and each flip can be
repeated.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from smoothadv.noise import Noise, Purpose
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
# Beside it, another word of the command line is the name of the folder.
LOG = "digits/against.tsv"


@pytest.fixture(scope="module")
def certified(checkpoint, tmp_path_factory) -> Path:
    """Certificates of 45 images from 400 draws: some abstain, some are of a wrong class."""
    log = tmp_path_factory.mktemp("certified") / "true.tsv"
    few = ["--N", 400, "--N0", 50, "--skip", 8, "--device", "cpu"]
    succeed("certify", "digits", checkpoint, SIGMA, log, *few)
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
    """Attack the certificates of a log; options given later win."""

    return lambda log, *options, outdir="digits": call(
        capsys, "attack", "digits", checkpoint, SIGMA, outdir, *USUAL, "--against", log, *options
    )


def certifies(row: dict[str, str]) -> bool:
    return row["predict"] != "-1" and float(row["radius"]) > 0


def claims(log: Path) -> dict[str, dict[str, str]]:
    """The rows of a certification log that claim a radius."""
    return {row["idx"]: row for row in rows(log) if certifies(row)}


@pytest.fixture(scope="module")
def withstood(checkpoint, certified, tmp_path_factory) -> tuple[Path, set[int]]:
    """The log of an attack on all these certificates, and the purposes of the noise drawn for
    it.
    """
    asked, stream, folder = set(), Noise.stream, tmp_path_factory.mktemp("withstood")

    def recorded(self: Noise, example: int, device: object, purpose: int = Purpose.VOTES):
        asked.add(purpose)
        return stream(self, example, device, purpose)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Noise, "stream", recorded)
        words = ["digits", checkpoint, SIGMA, folder, *USUAL, "--against", certified]
        succeed("attack", *words)
    return folder / "against.tsv", asked


def test_true_certificates_withstand_the_attack(attack, certified, withstood):
    """Each of 45 images flips with probability <= 0.002, so more flips than tolerated have
    probability <= 0.001. The finished log is judged.
    """
    log, _ = withstood
    outcome = attack(certified, outdir=log.parent)
    assert (outcome.code, outcome.err, outcome.out.count("\n")) == (0, "", 1)
    count, images = len(claims(certified)), len(rows(certified))
    tolerated = next(k for k in range(count) if stats.binom.sf(k, images, 0.002) <= 0.001)
    assert 30 < len(rows(log)) == count < 45, "abstentions claim nothing"
    assert sum(row["flipped"] == "1" for row in rows(log)) <= tolerated
    assert f"{count} certificates attacked at 0.999 of their radii" in outcome.out
    said = f"at alpha 0.001 + 0.001, up to {tolerated} of {images} images may flip"
    assert said in outcome.out


def test_rows_tell_the_certificate_and_the_attack_within_it(certified, withstood):
    log, _ = withstood
    assert header(log) == COLUMNS
    expected, arrays = claims(certified), archive(log)
    assert {"certified", "radius", "flipped", "label", "predict"} <= arrays.keys()
    np.testing.assert_allclose(l2_norms(arrays), arrays["attack_norm"], rtol=1e-6)
    for row in rows(log):
        claim = expected.pop(row["idx"])
        assert (row["certified"], row["label"]) == (claim["predict"], claim["label"])
        assert float(row["radius"]) == float(claim["radius"])
        assert float(row["epsilon"]) == 0.999 * float(claim["radius"])
        # The sum of image and perturbation is rounded to float32: 2^-25 for a pixel of 1.
        assert float(row["attack_norm"]) <= float(row["epsilon"]) * (1 + 1e-5) + 1e-7
        assert row["correct"] == str(int(row["predict"] == row["label"]))
        assert row["flipped"] == str(int(row["predict"] not in ("-1", row["certified"])))
    assert not expected and (arrays["attack_norm"] > 0.9 * arrays["epsilon"]).all()
    wrong = arrays["certified"] != arrays["label"]
    assert wrong.any(), "certificates of a wrong class are claims as well"


def test_attack_goes_away_from_the_certified_class_not_from_the_label(classifier, withstood):
    arrays = archive(withstood[0])
    for row, certified in enumerate(arrays["certified"]):
        index = int(arrays["idx"][row])
        before, after = (
            noisy_logits(classifier, arrays[kind][row], index, Purpose.ATTACK_NOISE, 4)
            .double()
            .softmax(1)
            .mean(0)[certified]
            for kind in ("image", "adversarial")
        )
        assert after < before


def test_predictions_are_on_draws_that_nobody_saw(classifier, withstood):
    log, asked = withstood
    assert asked == {Purpose.ATTACK_NOISE, Purpose.ATTACKED_VOTES}
    arrays = archive(log)
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
    "targets": ["--max", 2, "--target", "every", "--attack-batch", 6, "--batch", 30],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_flip_is_repeated_by_the_command_printed_with_it(
    attack, false, workplace, capsys, options
):
    claimed = list(claims(false))[:4] if "--only" in options else []
    flips = printed_flips(attack(false, *options, *claimed))
    before = {row["idx"]: row for row in timeless(workplace / LOG)}
    assert flips, "there must be flips for this test to say anything"
    for index, (_, command) in list(flips.items())[:2]:
        words = shlex.split(command)
        assert words[:3] == ["smoothadv", "attack", "digits"] and words[5] == f"digits_{index}"
        (repeated,) = printed_flips(call(capsys, "attack", *words[2:]))
        assert repeated == index
        assert timeless(workplace / f"digits_{index}/against.tsv") == [before[str(index)]]


def test_how_many_flips_are_credible_is_a_matter_of_false_alarm(
    attack, certified, false, workplace
):
    """With alpha 0.4 for the certificates and 0.001 for PREDICT; the finished log is judged."""
    generous = forged(certified, workplace / "generous.tsv", 3, alpha=0.4)
    images = len(rows(certified))
    for level, code in ((0.001, 0), (1 - 1e-9, 1)):
        outcome = attack(generous, "--false-alarm", level)
        tolerated = next(k for k in range(images + 1) if stats.binom.sf(k, images, 0.401) <= level)
        assert f"up to {tolerated} of {images} images may flip" in outcome.out + outcome.err
        assert outcome.code == code


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
    log = forged(certified, workplace / "log.tsv", factor)
    attack(log, "--fraction", fraction, "--max", 12)
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
