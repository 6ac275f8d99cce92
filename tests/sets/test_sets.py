"""Conformal sets, from the command to the verification of its log; then their guarantee, by
enumeration.
"""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp
from scipy import integrate, special, stats

import smoothadv
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.base.settings import SettingError
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.noise import GaussianNoise
from smoothadv.records.logs import manifest_path
from smoothadv.sets.coverage import (
    COUNTING,
    calibrates,
    draws_under_attack,
    images_needed,
    least_probability,
    share_to_miss,
    threshold,
)
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
    [(1, 1000, 0.25, 0.01, 0.27), (300, 400, 0.125, 0.0, 0.1)],
)
def test_sets_cover_under_the_worst_attack_and_do_not_without_the_correction(
    n, count, radius, fewest, most
):
    """The classifier is a half-space, and PGD finds the worst image. By one draw, the guarantee is
    tight: of 500 images 50 may be missed; more than 135, or fewer than 5, are with probability
    below 1e-4, by quadrature of the binomial distribution over Beta. Without the correction 194 are
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


# The guarantee


@given(st.floats(1e-9, 1 - 1e-9), st.floats(1e-9, 5), st.floats(1e-3, 10))
def test_probability_under_attack_is_the_normal_shift_rounded_down(chance, radius, sigma):
    with mp.workdps(60):
        exact = mp.ncdf(mp_quantile(chance) - mp.mpf(radius) / mp.mpf(sigma))
        found = least_probability(chance, radius, sigma)
        assert found <= exact
        if exact > 1e-190:
            assert found > float(exact * (1 - mp.mpf(10) ** -9))
    share = Fraction(str(chance))
    assert share_to_miss(share, radius, sigma) == min(Fraction(found), share)
    assert share_to_miss(share, 0.0, sigma) == share


def mp_quantile(chance: float) -> mp.mpf:
    return mp.sqrt(2) * mp.erfinv(2 * mp.mpf(chance) - 1)


def test_what_is_certain_or_impossible_stays_so():
    assert least_probability(0.0, 0.25, 0.25) == 0.0
    assert 1 - 1e-12 < least_probability(1.0, 0.25, 0.25) <= 1.0


@pytest.mark.parametrize(
    "wrong", [{"chance": -1}, {"chance": 1.1}, {"radius": math.inf}, {"sigma": 0}]
)
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(SettingError, match=[*wrong][0]):
        least_probability(**{"chance": 0.1, "radius": 0.25, "sigma": 0.25, **wrong})


@given(st.data(), st.integers(2, 100), st.floats(0.01, 2), st.floats(1e-5, 0.2))
def test_draws_under_attack_are_those_of_the_definition_rounded_down(data, trials, ratio, alpha):
    """The bounds solve P[Binomial(trials, p) >= least] = alpha and P[Binomial(trials, p) <= draws]
    = alpha. Slow: one number of draws after the other.
    """
    least = data.draw(st.integers(1, trials))
    low = stats.beta.ppf(alpha, least, trials - least + 1)
    with mp.workdps(40):
        chance = mp.ncdf(mp_quantile(low) - mp.mpf(ratio))
        draws = next(k for k in range(trials + 1) if tail(k + 1, trials, chance) <= 1 - alpha)
    found = draws_under_attack(least, trials, ratio, 1.0, alpha)
    assert found in (draws, draws - 1) and found <= least


def tail(least: int, trials: int, p: mp.mpf) -> mp.mpf:
    """P[Binomial(trials, p) >= least]."""
    if least > trials:
        return mp.mpf(0)
    return mp.betainc(least, trials - least + 1, 0, p, regularized=True)


@given(
    st.lists(st.integers(0, 6).map(float), min_size=1, max_size=40),
    st.fractions(Fraction(1, 1000), Fraction(999, 1000)),
)
def test_threshold_is_the_largest_score_with_few_enough_below_it(scores, share):
    most = (len(scores) + 1) * share
    slow = [one for one in scores if sum(other < one for other in scores) + 1 <= most]
    found = threshold(np.array(scores), share)
    assert found == max(slow, default=-math.inf)
    assert (found > -math.inf) == (len(scores) >= images_needed(share))
    if rank := math.floor(most):
        level = Fraction(2 * rank - 1, 2 * len(scores))
        assert found == np.quantile(scores, float(level), method="inverted_cdf")
    assert images_needed(Fraction(0)) == math.inf == -threshold(np.array(scores), Fraction(0))


@pytest.mark.parametrize(
    "share", [Fraction(1, 10), Fraction(1, 4), Fraction(2, 5), Fraction(9, 10)]
)
@pytest.mark.parametrize("images", range(2, 6))
def test_of_exchangeable_images_no_more_are_missed(images, share):
    """Each image in turn is the one that is tested, for all scores, equal ones included; if none
    are equal, as many are missed as may be.
    """
    for scores in itertools.product(range(3), repeat=images):
        missed = missed_of(np.array(scores, float), share)
        assert missed <= share * images
    assert missed_of(np.arange(float(images)), share) == math.floor(share * images)


def missed_of(scores: np.ndarray, share: Fraction) -> int:
    each = range(len(scores))
    return sum(scores[k] < threshold(np.delete(scores, k), share) for k in each)


@pytest.mark.parametrize(
    ("n", "alpha", "ratio"), [(99, 0.1, 0.5), (500, 0.1, 1.0), (5000, 0.05, 1.5)]
)
def test_guarantee_holds_and_is_tight_for_a_half_space(n, alpha, ratio):
    """The score of the label is one coordinate, of which noise is all: the worst attack lowers it
    by the radius. Another score is below the m-th smallest of n with a probability that is
    distributed as Beta(m, n + 1 - m).
    """

    def missed(share: Fraction) -> float:
        rank = math.floor((n + 1) * share)
        density = stats.beta(rank, n + 1 - rank).pdf
        return integrate.quad(
            lambda u: special.ndtr(special.ndtri(u) + ratio) * density(u), 0, 1, limit=400
        )[0]

    share = share_to_miss(Fraction(str(alpha)), ratio, 1.0)
    assert 0.5 * alpha < missed(share) <= alpha
    assert missed(Fraction(str(alpha))) > 1.5 * alpha, "without the correction"
    worst = special.ndtr(special.ndtri(float(share)) + ratio)
    assert worst == pytest.approx(alpha, rel=1e-10), "and with all images there are"


@pytest.mark.parametrize("levels", [2, 10, 1000])
def test_guarantee_holds_for_a_score_of_few_values_and_is_tight_for_many(levels):
    """The score of the label has ``levels`` values with equal probability, in order of the noise's
    coordinate along which the worst attack moves the image. All thresholds are enumerated: the m-th
    smallest of n scores is one of the first k values if at least m scores are.
    """
    n, alpha, ratio = 2000, 0.2, 0.5
    clean = np.arange(levels + 1) / levels
    attacked = special.ndtr(special.ndtri(clean) + ratio)

    def missed(share: Fraction) -> float:
        rank = int(threshold(np.arange(1.0, n + 1), share))
        is_below = stats.binom(n, clean).sf(rank - 1)
        return float((np.diff(is_below) * attacked[:-1]).sum())

    share = share_to_miss(Fraction(str(alpha)), ratio, 1.0)
    assert missed(share) <= alpha
    if levels == 1000:
        assert missed(share) > 0.98 * alpha
        assert missed(Fraction(str(alpha))) > 1.5 * alpha, "without the correction"


@pytest.mark.parametrize("draws", [20, 100, 2000])
def test_guarantee_holds_for_counts_and_is_tight_for_many_draws(draws):
    """The label fits a noisy copy with one of 200 probabilities, equally often, each lowered by the
    worst attack. All thresholds are enumerated: the m-th smallest of n counts is at most k if at
    least m of them are.
    """
    n, alpha, ratio = 2000, Fraction(1, 10), 0.5
    chances = (np.arange(200) + 0.5) / 200
    attacked = special.ndtr(special.ndtri(chances) - ratio)
    counts = np.arange(draws + 1)

    def missed(share: Fraction, is_corrected: bool) -> float:
        rank = int(threshold(np.arange(1.0, n + 1), share))
        up_to = stats.binom.cdf(counts[:, None], draws, chances).mean(1)
        is_threshold = np.diff(stats.binom(n, up_to).sf(rank - 1), prepend=0.0)
        part = float(alpha * COUNTING)
        least = [
            draws_under_attack(int(k), draws, ratio, 1.0, part) if is_corrected and k else k
            for k in counts
        ]
        below = stats.binom.cdf(np.array(least)[:, None] - 1, draws, attacked).mean(1)
        return float(is_threshold @ below)

    share = alpha * (1 - 2 * COUNTING)
    assert missed(share, True) <= alpha
    if draws == 2000:
        assert missed(share, True) > 0.5 * alpha
    assert missed(alpha, False) > 1.5 * alpha, "without the correction"


def test_images_calibrate_at_random_each_by_itself():
    """The counts of 10,000 images are within five standard deviations: false alarm below 1e-6."""
    chosen = [[calibrates(index, 0.3, seed) for index in range(10_000)] for seed in (0, 1)]
    for each in chosen:
        assert abs(sum(each) - 3000) < 5 * math.sqrt(2100)
    both = sum(one and two for one, two in zip(*chosen))
    assert abs(both - 900) < 5 * math.sqrt(819)
    assert all(calibrates(index, 0.8, 0) for index in range(10_000) if chosen[0][index])
