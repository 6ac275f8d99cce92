"""attack from end to end: its log and adversarial examples agree, which can be checked without the
command.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from smoothadv.datasets import get_dataset
from smoothadv.noise import Purpose
from support.attack_runs import (
    LINEAR,
    SIGMA,
    SMALL,
    accuracy,
    archive,
    assert_same_attack,
    l2_norms,
    predicted,
)
from support.commands import call, header, manifest_of, rows, snapshot, succeed, timeless

RELEASED = ["idx", "label", "predict", "basePredict", "correct", "time"]
OWN = ["attack_norm", "epsilon", "abstain"]
COPIED = {"idx", "label", "predict", "epsilon", "attack_norm"}
STEP_BACK = 1e-5  # relative, of a norm in float32
RANDOM_TARGETS = ["--restarts", 2, "--target", "random"]
BASE = SMALL[:-2]  # the base classifier is attacked without noise


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory) -> Path:
    """The folder of attacks of four sizes, with pictures."""
    folder = tmp_path_factory.mktemp("attack") / "out"
    sizes = ["--epsilon", 0, 0.25, 0.5, 2]
    succeed("attack", "digits", checkpoint, SIGMA, folder, *SMALL, *sizes, "--png", 3)
    return folder


@pytest.fixture
def attack(checkpoint, workplace, capsys):
    """Attack the shared classifier at epsilon 0.5; options given later win."""

    usual = [*SMALL, "--epsilon", 0.5]
    return lambda outdir, *options: call(
        capsys, "attack", "digits", checkpoint, SIGMA, outdir, *usual, *options
    )


def logs_of(folder: Path) -> list[Path]:
    """By size, the smallest first."""
    return sorted(folder.glob("*.tsv"), key=lambda log: float(log.stem.removeprefix("epsilon_")))


def test_every_size_makes_a_log_with_its_manifest_examples_and_pictures(finished):
    names = [f"epsilon_{size}" for size in ("0", "0.25", "0.5", "2")]
    endings = [".npz", ".pictures", ".tsv", ".tsv.manifest.json"]
    assert sorted(path.name for path in finished.iterdir()) == sorted(
        name + end for name in names for end in endings
    )
    assert all(header(log) == [*RELEASED, *OWN] for log in logs_of(finished))


def test_rows_are_consistent(finished):
    table = [row for log in logs_of(finished) for row in rows(log)]
    assert [row["idx"] for row in table] == [str(index) for index in range(12)] * 4
    for row in table:
        assert row["correct"] == str(int(row["predict"] == row["label"]))
        assert row["abstain"] == str(int(row["predict"] == "-1"))
    assert {row["abstain"] for row in table} == {"0", "1"}, (
        "both are needed for this test to say anything"
    )
    assert {row["correct"] for row in table} == {"0", "1"}


def test_norm_is_that_of_the_saved_perturbation_and_within_epsilon(finished):
    for log, epsilon in zip(logs_of(finished), (0, 0.25, 0.5, 2)):
        norms = np.array([float(row["attack_norm"]) for row in rows(log)])
        assert {float(row["epsilon"]) for row in rows(log)} == {epsilon}
        assert (norms <= epsilon * (1 + STEP_BACK)).all()
        np.testing.assert_allclose(norms, l2_norms(archive(log)), rtol=1e-6, atol=0)
        assert (norms >= 0.9 * epsilon).any(), "the attack uses what it is allowed"


def test_archive_holds_float32_images_of_the_dataset_and_the_columns_of_the_log(finished):
    images = torch.stack([get_dataset("digits", "test")[index][0] for index in range(12)]).numpy()
    for log in logs_of(finished):
        arrays = archive(log)
        assert arrays.keys() == {*COPIED, "image", "adversarial"}
        for name in ("image", "adversarial"):
            assert arrays[name].shape == (12, 1, 8, 8) and arrays[name].dtype == np.float32
            assert arrays[name].min() >= 0 and arrays[name].max() <= 1
        assert arrays["image"].tobytes() == images.tobytes()
        for name in COPIED:
            assert arrays[name].tolist() == [float(row[name]) for row in rows(log)]


def test_logged_classes_are_those_of_the_saved_images(finished, classifier):
    for log in logs_of(finished):
        images, found = archive(log)["adversarial"], rows(log)
        expected = [
            predicted(classifier, image, index, Purpose.VOTES, 50)
            for index, image in enumerate(images)
        ]
        assert [int(row["predict"]) for row in found] == expected
        with torch.no_grad():
            assert [int(row["basePredict"]) for row in found] == classifier(
                torch.from_numpy(images)
            ).argmax(1).tolist()


def test_summary_names_the_log_its_accuracy_and_its_interval(attack, workplace):
    outcome = attack("out", "--epsilon", 0.25)
    share = accuracy(workplace / "out/epsilon_0.25.tsv")
    low, high = stats.binomtest(round(12 * share), 12).proportion_ci(0.95)
    assert outcome.code == 0 and outcome.err == "" and outcome.out.count("\n") == 1
    for words in (
        "out/epsilon_0.25.tsv: 12 examples",
        f"{share:.1%}",
        f"{low:.1%} to {high:.1%}",
        "epsilon_0.25.npz",
    ):
        assert words in outcome.out


@pytest.mark.parametrize(
    ("options", "of_predict"),
    [
        ([], []),
        (["--attack", "DDN"], ["--attack", "DDN"]),
        (["--gradient", "stein", "--random-start"], ["--no-grad-attack", "--random-start"]),
        (["--gradient", "hard-stein"], ["--gradient", "hard-stein"]),
        (["--gradient", "base"], ["--base-attack"]),
        (RANDOM_TARGETS, RANDOM_TARGETS),
    ],
    ids=str,
)
def test_predict_under_the_same_attack_says_the_same(
    checkpoint, workplace, capsys, options, of_predict
):
    classifier = ["digits", checkpoint, SIGMA]
    usual = [*(BASE if "--base-attack" in of_predict else SMALL), "--epsilon", 0.5]
    assert call(capsys, "attack", *classifier, "out", *usual, *options).code == 0
    usual += ["--attack", "PGD", *of_predict]
    assert call(capsys, "predict", *classifier, "log.tsv", *usual).code == 0
    assert timeless(workplace / "log.tsv") == timeless(workplace / "out/epsilon_0.5.tsv")
    theirs, ours = (
        manifest_of(workplace / log)["settings"] for log in ("log.tsv", "out/epsilon_0.5.tsv")
    )
    assert {**theirs, "images_saved": True} == ours, "predict saves no images"


def test_manifest_tells_everything_that_decides_the_numbers(attack, workplace):
    options = [
        "--attack",
        "DDN",
        "--epsilon",
        "64/255",
        "--gradient",
        "expected-loss",
        "--restarts",
        2,
    ]
    attack(
        "out", *options, "--target", "runner-up", "--seed", 3, "--attack-batch", 24, "--alpha", 0.01
    )
    (log,) = logs_of(workplace / "out")
    settings, (run,) = manifest_of(log)["settings"], manifest_of(log)["runs"]
    expected = {
        "sigma": 0.25,
        "seed": 3,
        "alpha": 0.01,
        "N": 50,
        "num_noise_vec": 4,
        "restarts": 2,
        "target": "runner-up",
        "attack_batch": 24,
        "base_attack": False,
        "dataset": "digits",
    }
    assert {name: settings[name] for name in expected} == expected
    assert settings["attack"]["name"] == "DDN" and settings["attack"]["num_steps"] == 3
    assert settings["attack"]["epsilon"] == 64 / 255 and "expected" in str(
        settings["attack"]["estimator"]
    )
    assert (
        run["attack_batch"] == 24
        and run["command"][1] == "attack"
        and "--restarts" in run["command"]
    )


def test_only_the_images_named_are_attacked_and_as_among_others(attack, finished, workplace):
    assert attack("out", "--only", 11, 4, "--max", -1).code == 0
    log = workplace / "out/epsilon_0.5.tsv"
    assert timeless(log) == [timeless(finished / log.name)[index] for index in (4, 11)]
    assert (
        archive(log)["adversarial"].tobytes()
        == archive(finished / log.name)["adversarial"][[4, 11]].tobytes()
    )


def test_missing_pictures_are_made_and_those_of_an_earlier_attack_do_not_stay(attack, workplace):
    folder = workplace / "out/epsilon_0.5.pictures"
    attack("out", "--png", 3)
    pictures = snapshot(folder)
    for path in folder.iterdir():
        path.unlink()
    assert attack("out", "--png", 3).code == 0 and snapshot(folder) == pictures
    attack("out", "--seed", 1, "--overwrite", "--png", 1)
    assert [path.name for path in folder.iterdir()] == ["00000.png"]


@pytest.mark.parametrize(
    "options", [SMALL, [*BASE, "--gradient", "base"]], ids=["smoothed", "base"]
)
def test_seed_alone_decides_the_examples(checkpoint, workplace, options):
    usual = [*options, "--max", 5, "--epsilon", 0.5, "--random-start", "--seed"]
    for outdir, seed in [("one", 5), ("same", 5), ("other", 6)]:
        succeed("attack", "digits", checkpoint, SIGMA, outdir, *usual, seed)
    one, same, other = (Path(outdir, "epsilon_0.5.tsv") for outdir in ("one", "same", "other"))
    assert_same_attack(same, one)
    assert (archive(one)["adversarial"] != archive(other)["adversarial"]).any((1, 2, 3)).all()


def test_batch_changes_examples_by_rounding_only(workplace, capsys):
    """Batches of less than one image, and of parts of an image that differ in size."""
    Path("nets.py").write_text(LINEAR)
    for outdir, *batch in [
        ("usual",),
        ("1", "--attack-batch", 1),
        ("7", "--attack-batch", 7),
        ("votes", "--batch", 7),
    ]:
        network = ["digits", "nets.py:linear", SIGMA, outdir, "--epsilon", 0.5]
        assert call(capsys, "attack", *network, *SMALL, *batch).code == 0
    usual, one, seven, votes = (
        Path(outdir, "epsilon_0.5.tsv") for outdir in ("usual", "1", "7", "votes")
    )
    for log, batch in ((one, 1), (seven, 7)):
        np.testing.assert_allclose(
            archive(log)["adversarial"], archive(usual)["adversarial"], rtol=0, atol=1e-5
        )
        assert [row["predict"] for row in rows(log)] == [row["predict"] for row in rows(usual)]
        assert manifest_of(log)["settings"]["attack_batch"] == batch
    assert timeless(votes) == timeless(usual)
    assert archive(votes)["adversarial"].tobytes() == archive(usual)["adversarial"].tobytes()


@pytest.mark.parametrize(
    ("size", "name"),
    [("64/255", "epsilon_0.25098039215686274"), ("1e-3", "epsilon_0.001"), ("1/2", "epsilon_0.5")],
)
def test_name_of_a_log_is_the_size_to_the_last_digit(attack, workplace, size, name):
    attack("out", "--epsilon", size, "--max", 1)
    assert [path.name for path in logs_of(workplace / "out")] == [f"{name}.tsv"]
    assert rows(workplace / f"out/{name}.tsv")[0]["epsilon"] == name.removeprefix("epsilon_")
