"""Conformal sets, from the command to the verification of its log."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special, stats

import smoothadv
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.noise import GaussianNoise
from smoothadv.records.logs import manifest_path
from smoothadv.sets.coverage import draws_under_attack
from smoothadv.sets.scores import ScoreLog
from smoothadv.sets.table import SetsTable
from support.commands import call, refused, rows, succeed
from support.evaluations import key_of_log
from support.models import ProbitClassifier
from support.refusals import refusal
from support.verifier import script as script
from support.verifier import tampered, verdict

USUAL = ["--device", "cpu", "--max", 64, "--radii", 0, 0.1, "--alpha", 0.2]
COUNTED = ["--N", 30, "--at-least", 0.05, "--batch", 20]
PGD_OPTIONS = ["--attack", "PGD", "--epsilon", 0.1, "--num-steps", 2, "--num-noise-vec", 2]


@pytest.fixture(scope="module")
def logs(checkpoint, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sets")
    options_of = {"clean": [], "attacked": PGD_OPTIONS, "counted": [*COUNTED, *PGD_OPTIONS]}
    found = {name: folder / f"{name}.tsv" for name in options_of}
    for name, options in options_of.items():
        succeed("sets", "digits", checkpoint, 0.25, found[name], *USUAL, *options)
    return found


def scores_of(row: dict[str, str]) -> list[float]:
    return [float(row[f"score_{number}"]) for number in range(10)]


def test_scores_are_the_probabilities_of_one_noisy_copy(logs, checkpoint):
    classifier, images = load_classifier(checkpoint, "digits"), get_dataset("digits", "test")
    noise = GaussianNoise(0.25, 0, key=key_of_log(logs["clean"]))
    for row in rows(logs["clean"])[:5]:
        image, label = images[int(row["idx"])]
        noisy = noise.stream(int(row["idx"]), "cpu").noisy(1, image)
        with torch.inference_mode():
            expected = classifier(noisy)[0].double().softmax(0)
        assert scores_of(row) == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-9)
        assert (int(row["label"]), int(row["predict"])) == (label, int(expected.argmax()))


def test_scores_of_several_draws_count_those_with_the_probability(logs, checkpoint):
    classifier, images = load_classifier(checkpoint, "digits"), get_dataset("digits", "test")
    noise = GaussianNoise(0.25, 0, key=key_of_log(logs["counted"]))
    for row in [row for row in rows(logs["counted"]) if row["calibration"] == "1"][:5]:
        noisy = noise.stream(int(row["idx"]), "cpu").noisy(30, images[int(row["idx"])][0])
        with torch.inference_mode():
            found = classifier(noisy).double().softmax(1)
        # Where a probability is next to the least one, it depends on the batch.
        ends = [(found >= 0.05 + off).sum(0).tolist() for off in (1e-5, -1e-5)]
        assert all(low <= one <= high for low, one, high in zip(ends[0], scores_of(row), ends[1]))


def test_attack_changes_tested_images_alone_within_epsilon(logs):
    pairs = [*zip(rows(logs["clean"]), rows(logs["attacked"]))]
    for clean, attacked in pairs:
        norm, kept = float(attacked["attack_norm"]), attacked["calibration"] == "1"
        assert kept == (norm == 0) == (scores_of(clean) == scores_of(attacked))
        assert norm <= 0.1 * (1 + 1e-5)
    own = [[scores_of(row)[int(row["label"])] for row in pair] for pair in pairs]
    assert np.mean(own, axis=0)[1] < np.mean(own, axis=0)[0]


def test_logs_of_other_images_are_told_apart(logs, workplace, capsys):
    lines = logs["clean"].read_text().splitlines(keepends=True)
    Path("fewer.tsv").write_text("".join(lines[:-1]))
    manifest_path(Path("fewer.tsv")).write_text(manifest_path(logs["clean"]).read_text())
    for other, is_told in (("fewer.tsv", True), (logs["attacked"], False)):
        said = call(capsys, "analyze", "sets", logs["clean"], other).err
        assert ("the logs are not all on the same images" in said) == is_told


def least_score(own: list[float], radius: float, draws: int = 0) -> float:
    """From the definition: the threshold by the scores of labels, ascending, at alpha = 0.2."""
    share = special.ndtr(special.ndtri(0.2) - radius / 0.25)
    share = 0.18 if draws and radius else share
    least = own[math.floor((len(own) + 1) * share) - 1]
    if not (draws and radius):
        return least
    low = special.ndtri(stats.beta.ppf(0.01, least, draws - least + 1))
    uppers = [stats.beta.ppf(0.99, one + 1, draws - one) for one in range(draws)]
    return next(one for one in range(draws) if uppers[one] >= special.ndtr(low - radius / 0.25))


@pytest.mark.parametrize("name", ["clean", "attacked", "counted"])
def test_three_programs_find_the_same_sets(logs, name, script, capsys, tmp_path):
    """``analyze sets``, scripts/verify_log.py, and this one, from the definition."""
    table = tmp_path / "table.csv"
    succeed("analyze", "sets", logs[name], "-o", table, "-o", tmp_path / "figure.SVG")
    accepted, said = verdict(script, logs[name], capsys)
    assert accepted and "64 of 64 rows hold" in said
    kept, tested = ([row for row in rows(logs[name]) if row["calibration"] == k] for k in "10")
    own = sorted(scores_of(row)[int(row["label"])] for row in kept)
    for radius, found in zip((0, 0.1), table.read_text().splitlines()[1:]):
        least = least_score(own, radius, 30 * (name == "counted"))
        sets = [{k for k, score in enumerate(scores_of(row)) if score >= least} for row in tested]
        covered = sum(int(row["label"]) in one for row, one in zip(tested, sets))
        size = sum(map(len, sets)) / len(sets)
        values = dict(zip(table.read_text().split("\n")[0].split(","), found.split(",")))
        assert float(values["coverage"]) == covered / len(tested)
        assert float(values["size"]) == pytest.approx(size)
        assert (values["wanted"] == "") == (name != "clean" and radius == 0)
        line = f"  radius {radius:g}: {covered} of {len(tested)} sets have the label, {size:.3f}"
        assert line in said and f"threshold {least:.7g} of {len(own)} images" in said


def test_function_returns_the_sets_of_the_log(logs, checkpoint):
    found = smoothadv.conformal_sets(
        checkpoint, "digits", sigma=0.25, alpha=0.2, radii=[0, 0.1], limit=64, device="cpu"
    )
    log = ScoreLog.read(logs["clean"])
    for radius, of_radius in found.groupby("radius"):
        expected = log.sets(radius)
        assert of_radius.reset_index(drop=True).equals(expected), radius
        assert [*map(len, expected.set)] == expected["size"].tolist()
    assert set(found.idx) == {int(row["idx"]) for row in rows(logs["clean"])} - {
        *log.table.idx[log.table.calibration == 1]
    }


@pytest.mark.parametrize(
    ("n", "count", "radius", "fewest", "most"),
    [(1, 2000, 0.25, 0.03, 0.21), (300, 400, 0.125, 0.0, 0.1)],
)
def test_sets_cover_under_the_worst_attack_and_do_not_without_the_correction(
    n, count, radius, fewest, most
):
    """The classifier is a half-space, and PGD finds the worst image. By one draw, the guarantee is
    tight: of 1,000 images 100 may be missed; more than 210, or fewer than 30, are with probability
    below 2e-4, by quadrature of the binomial distribution over Beta. Without the correction 389 are
    expected. By 300 draws, an image is missed only where one of the bounds is false.
    """
    model = ProbitClassifier([6.0], -3.0, torch.float32)
    images, labels = torch.full((count, 1, 1, 1), 0.5), torch.ones(count, dtype=torch.int64)
    attack, settings = PGD(radius, 4), {"at_least": 0.5} if n > 1 else {}
    found = smoothadv.conformal_sets(
        *(model, images, labels),
        **{"sigma": 0.25, "radii": [0, radius], "attack": attack, "num_noise_vec": 1},
        **{"n": n, **settings},
    )
    missed = 1 - found.groupby("radius").covered.mean()
    assert fewest <= missed[radius] < most < missed[0.0] and found.threshold.min() > 0


def field(name: str, value: object, number: int = 3):
    return lambda table, manifest: table[number].update({name: str(value)})


def wrong(**fields: int):
    """A row of a wrong prediction, with other fields."""

    def tamper(table, manifest):
        row = next(row for row in table if row["correct"] == "0")
        row |= {name: str(value) for name, value in fields.items()}

    return tamper


def other_role(table, manifest):
    table[3]["calibration"] = str(1 - int(table[3]["calibration"]))


FORGED = {
    "calibration": (other_role, "calibration"),
    "score": (field("score_1", 0.9), "probabilities"),
    "count": (field("score_1", "31"), "counts of its draws", "counted"),
    "share of a count": (field("score_1", "1.5"), "counts of its draws", "counted"),
    "negative": (field("score_1", "-0.5"), "scores"),
    "label": (wrong(label=10), "classes"),
    "predict": (wrong(predict=11), "classes"),
    "correct": (wrong(correct=1), "correct"),
    "norm": (field("attack_norm", 0.11), "epsilon"),
    "twice": (lambda table, manifest: table.append(table[0]), "twice"),
    "seed": (lambda table, manifest: manifest["settings"].update(seed=1), "calibration"),
    "share": (lambda table, manifest: manifest["settings"].pop("calibration"), "calibration"),
    "alpha": (lambda table, manifest: manifest["settings"].update(alpha=1.5), "alpha"),
    "moved": (
        lambda table, manifest: table[3].update(score_1=f"{float(table[3]['score_1']) + 5e-6:.7g}"),
        "probabilities",
    ),
    **{
        f"settings {changed}": (
            lambda table, manifest, changed=changed: manifest["settings"].update(changed),
            words,
        )
        for changed, words in (
            ({"noise": "UniformNoise"}, "noise"),
            ({"N": 7}, "draws"),
            ({"sigmas": [0.1, 0.2]}, "draws"),
            ({"sound": True}, "draws"),
            ({"at_least": 0.1}, "draws"),
            ({"at_least": 0.1, "N": 10**16}, "draws"),
            ({"N": 10**16}, "draws"),
            ({"radii": []}, "no radii"),
            ({"attack": {}}, "an attack without an epsilon"),
            ({"attack": {"epsilon": "x"}}, "an attack without an epsilon"),
        )
    },
}


@pytest.mark.parametrize("trials", [30, 1000])
@pytest.mark.parametrize("ratio", [0.5, 2, 8, 20])
def test_two_programs_find_the_same_draws_under_attack(script, trials, ratio):
    settings = {"N": trials, "sigma": 1.0, "num_classes": 2, "at_least": 0.5}
    kind = script.ConformalSets(settings, {"images": 9, "skip": 1, "max": 9})
    for least in (1, trials // 2, trials):
        found = kind.draws_under_attack(least, ratio, script.ONE // 50)
        assert found == draws_under_attack(least, trials, ratio, 1.0, 0.02)


@pytest.mark.parametrize(
    ("at_least", "alpha", "words"),
    [(0.05, 0.02, "at least 55 images must calibrate"), (0.999, 0.2, "--N")],
)
def test_sets_of_all_classes_by_counts_say_what_would_help(
    logs, checkpoint, at_least, alpha, words
):
    wanted = {"sigma": 0.25, "alpha": alpha, "radii": [0.2], "limit": 20, "n": 20}
    with pytest.warns(DoubtfulWarning, match=words):
        smoothadv.conformal_sets(checkpoint, "digits", **wanted, at_least=at_least, device="cpu")


@pytest.mark.parametrize("name", FORGED)
def test_forged_rows_are_noticed(logs, name, script, capsys, tmp_path):
    tampering, word, *of = FORGED[name]
    log = tampered(logs[of[0] if of else "attacked"], tmp_path / "forged.tsv", tampering)
    accepted, said = verdict(script, log, capsys)
    assert not accepted and ("line" in said or "cannot be verified" in said)
    assert word in refusal(ScoreLog.read, log, names=log)


def test_refusals_name_what_is_wrong(logs, checkpoint, capsys, workplace):
    (workplace / "stages.toml").write_text(
        f'[[stage]]\ncheckpoint = "{checkpoint}"\nsigma = 0.5\n'
        f'[[stage]]\ncheckpoint = "{checkpoint}"\nsigma = 0.25\n'
    )
    sets = ["digits", checkpoint, 0.25, "new.tsv", "--device", "cpu"]
    for options, words, code in [
        (["--radii", 64], ["--radii", "64/255"], 2),
        (["--radii", 0.1, "1/10"], ["--radii: found [0.1, 0.1]", "a size twice"], 2),
        (["--alpha", 1], ["--alpha"], 2),
        (["--calibration", 0], ["--calibration"], 2),
        (["--at-least", 0.2], ["--at-least", "--N"], 2),
        (["--N", 9, "--at-least", 1], ["--at-least"], 2),
        (["--epsilon", 0.5], ["--epsilon", "--attack"], 2),
        (["--max", 1], ["of 1 image calibrate", "--max, --images", "--calibration"], 1),
        (["--calibration", 1e-9], ["0 of 359 images calibrate", "--calibration"], 1),
    ]:
        assert refused(call(capsys, "sets", *sets, *options), *words, code=code), options
    stages = ["digits", "stages.toml", "stages", "new.tsv", "--device", "cpu"]
    assert refused(call(capsys, "sets", *stages), "one classifier", "cascade", code=2)
    for arguments, words, code in [
        (["sets", logs["clean"], "-o", "x.gif"], ["x.gif", ".png"], 2),
        (["sets", logs["clean"], "-o", "stages.toml"], ["does not end"], 2),
        (["summary", logs["clean"]], ["scores log", "sets"], 1),
        (["sets", "stages.toml"], ["manifest"], 1),
        (["sets", "new.tsv"], ["new.tsv is missing, or no file"], 1),
        (["sets", "."], [". is missing, or no file"], 1),
        (["sets", logs["clean"], logs["clean"]], ["clean.tsv has the rows of", "leave one"], 1),
        (["sets", logs["clean"], "--radii", 0, 0], ["--radii: found [0.0, 0.0]", "twice"], 2),
    ]:
        assert refused(call(capsys, "analyze", *arguments), *words, code=code), arguments
    succeed("certify", *sets[:3], "certified.tsv", "--max", 2, "--N", 9, "--device", "cpu")
    outcome = call(capsys, "analyze", "sets", "certified.tsv")
    assert refused(outcome, "no log of sets", "calibration")
    Path("mine.csv").write_text("mine")
    assert refused(call(capsys, "analyze", "sets", logs["clean"], "-o", "mine.csv"), "no table")


@pytest.mark.parametrize(
    ("alpha", "wanted"), [(None, [0.8, -1]), (0.2, [0.8, -1]), (0.3, [-1, -1])]
)
def test_nothing_is_wanted_of_an_alpha_or_radius_that_may_be_chosen_by_the_scores(
    logs, alpha, wanted
):
    table = SetsTable(logs=(logs["clean"],), alpha=alpha, radii=(0.1, 0.05))
    with pytest.warns(DoubtfulWarning, match="alpha and radius must be chosen before"):
        found = table.table().frame()
    assert [*found.wanted.astype(float).fillna(-1)] == pytest.approx(wanted)


def test_log_that_lacks_images_is_said_to_and_shows_no_coverage(logs, script, capsys, tmp_path):
    log = tampered(logs["clean"], tmp_path / "part.tsv", lambda table, manifest: table.pop())
    with pytest.warns(DoubtfulWarning, match="part.tsv: 63 of 64 images, unfinished"):
        ScoreLog.read(log)
    accepted, said = verdict(script, log, capsys)
    assert not accepted and "1 of 64 images are missing" in said and "threshold" not in said


def test_share_of_a_log_whose_shard_is_forged_is_refused(logs, script, capsys, tmp_path):
    def tamper(table, manifest):
        manifest["settings"]["shard"] = {"index": 0, "count": 3}
        del table[20:]

    log = tampered(logs["clean"], tmp_path / "part.tsv", tamper)
    accepted, said = verdict(script, log, capsys)
    assert not accepted and "an impossible shard" in said


def test_no_number_of_images_suffices_far_from_an_image(logs):
    log = ScoreLog.read(logs["clean"])
    for radius in (5, 10):
        with pytest.warns(DoubtfulWarning, match="a smaller radius or a larger sigma"):
            log.threshold(radius)


def test_too_few_images_make_sets_of_all_classes_and_a_line_says_how_many(logs):
    needed = math.ceil(1 / special.ndtr(special.ndtri(0.2) - 4)) - 1
    with pytest.warns(DoubtfulWarning, match=f"radius 1 .* at least {needed:,} images .* 35 do"):
        sets = ScoreLog.read(logs["clean"]).sets(1.0)
    assert set(sets["size"]) == {10} and sets.covered.all()
