"""attack, and predict under attack, from end to end: logs and adversarial examples agree, which can
be checked without the command; each option gives another attack, and changes what its name says; an
attack that was stopped or ran out of memory ends like an undisturbed one.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from smoothadv.datasets import get_dataset
from smoothadv.noise import Purpose
from smoothadv.voting.classifier import VotingClassifier
from support import fragile_models
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
from support.commands import (
    call,
    header,
    manifest_of,
    refused,
    rows,
    settings_of,
    snapshot,
    succeed,
    timeless,
)
from support.evaluations import stop_at_pass

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
    "options",
    [
        ["--attack", "DDN"],
        ["--gradient", "stein", "--random-start"],
        ["--gradient", "base"],
        RANDOM_TARGETS,
    ],
    ids=str,
)
def test_predict_under_the_same_attack_says_the_same(checkpoint, workplace, options):
    usual = [*(BASE if "base" in options else SMALL), "--epsilon", 0.5, "--attack", "PGD", *options]
    for command, output in (("attack", "out"), ("predict", "log.tsv")):
        succeed(command, "digits", checkpoint, SIGMA, output, *usual)
    log, attacked = workplace / "log.tsv", workplace / "out/epsilon_0.5.tsv"
    assert timeless(log) == timeless(attacked)
    saved = settings_of(log) | {"images_saved": True}
    assert saved == settings_of(attacked), "predict saves no images"


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


def test_name_of_a_log_is_the_size_to_the_last_digit(attack, workplace):
    attack("out", "--epsilon", "64/255", "1e-3", "1/2", "--max", 1)
    sizes = ["0.001", "0.25098039215686274", "0.5"]
    assert [path.stem for path in logs_of(workplace / "out")] == [f"epsilon_{s}" for s in sizes]
    assert [rows(log)[0]["epsilon"] for log in logs_of(workplace / "out")] == sizes


@pytest.fixture
def attacked(attack, workplace):
    """The log of such an attack."""

    def run(outdir: str, *options: object) -> Path:
        outcome = attack(outdir, *options)
        assert (outcome.code, outcome.err) == (0, "")
        return workplace / outdir / "epsilon_0.5.tsv"

    return run


def test_the_papers_settings_are_the_default(attacked):
    options = ["--gradient", "plug-in", "--beta", 1, "--restarts", 1]
    assert_same_attack(attacked("one", *options), attacked("two"))


KINDS = [
    *("--gradient plug-in", "--gradient expected-loss", "--gradient stein"),
    *("--gradient hard-stein", "--beta 4", "--gradient stein --restarts 3"),
    *("--target runner-up", "--target least-likely", "--target random", "--target every"),
]


def test_no_two_kinds_make_the_same_examples(attacked):
    logs = {kind: attacked(kind, *kind.split(), "--max", 6) for kind in KINDS}
    images = {kind: archive(log)["adversarial"] for kind, log in logs.items()}
    for first in KINDS:
        for second in KINDS[: KINDS.index(first)]:
            assert (images[first] != images[second]).any((1, 2, 3)).sum() >= 2, (first, second)
    described = [
        [settings_of(log).get(name) for name in ("attack", "restarts", "target")]
        for log in logs.values()
    ]
    assert len(set(map(str, described))) == len(KINDS), "the manifests tell them apart"


def test_log_names_the_class_wanted_whose_own_images_are_left_alone(attacked):
    log, every = attacked("out", "--target", 2), attacked("every", "--target", "every", "--max", 2)
    arrays = archive(log)
    assert header(log) == [*header(every), "target"] and "target" not in archive(every)
    assert {row["target"] for row in rows(log)} == {"2"} and set(arrays["target"]) == {2}
    its_own = arrays["label"] == 2
    assert its_own.any() and ((l2_norms(arrays) == 0) == its_own).all()


CHANGES = [
    (["--gradient", "stein"], "attack.estimator"),
    (["--beta", 4], "attack.estimator.beta was None, now 4.0"),
    (["--restarts", 2], "restarts was 1, now 2"),
    (["--target", "random"], "target was None, now 'random'"),
    (["--num-steps", 4], "attack.num_steps was 3, now 4"),
    (["--num-noise-vec", 5], "num_noise_vec was 4, now 5"),
    (["--attack", "DDN"], "attack.name was 'PGD', now 'DDN'"),
    (["--attack-batch", 8], "attack_batch was 16, now 8"),
    (["--random-start"], "attack.random_start"),
    (["--seed", 1], "seed was 0, now 1"),
    (["--alpha", 0.01], "alpha was 0.001, now 0.01"),
    (["--N", 51], "N was 50, now 51"),
]


def test_log_of_another_attack_is_not_continued(attack, workplace):
    attack("out", "--max", 2)
    before = snapshot(workplace)
    for change, field in CHANGES:
        assert refused(attack("out", *change), "epsilon_0.5.tsv", field, "--overwrite")
    assert snapshot(workplace) == before


@pytest.fixture
def predict(checkpoint, workplace):
    """Predict 25 digits with the shared classifier and few draws; the log."""

    def run(name: str, *options: object) -> Path:
        usual = ["--N", 50, "--max", 25, "--device", "cpu"]
        succeed("predict", "digits", checkpoint, SIGMA, name, *usual, *options)
        return workplace / name

    return run


@pytest.mark.parametrize(
    ("options", "lowered"),
    [
        (["--attack", "PGD", "--num-noise-vec", 4], "predict"),
        (["--attack", "DDN", "--num-noise-vec", 4], "predict"),
        (["--attack", "PGD", "--gradient", "base"], "basePredict"),
    ],
)
def test_large_attack_lowers_the_accuracy_of_what_it_attacks(predict, options, lowered):
    large = predict("attacked.tsv", "--epsilon", 2, "--num-steps", 5, *options)
    assert accuracy(large, lowered) <= accuracy(predict("clean.tsv"), lowered) - 0.3


def test_attack_of_size_zero_changes_nothing(predict):
    """Not even the attack's own random numbers, drawn all the same, are taken from the
    prediction's.
    """
    clean, options = predict("clean.tsv"), ["--num-noise-vec", 8, "--random-start"]
    zero = predict("zero.tsv", *"--attack PGD --epsilon 0 --num-steps 5".split(), *options)
    assert header(clean) == RELEASED
    found = [{name: row[name] for name in RELEASED if name != "time"} for row in rows(zero)]
    assert found == timeless(clean)


def test_the_second_of_two_sizes_is_continued_and_the_first_left_alone(
    attack, finished, workplace, monkeypatch
):
    sizes = ["--epsilon", 0.25, 0.5]
    with monkeypatch.context() as patch:
        stop_at_pass(patch, 20, KeyboardInterrupt())
        assert attack("out", *sizes).code == 130
    before = snapshot(workplace / "out").items()
    first = {name: content for name, content in before if name.startswith("epsilon_0.25")}
    assert "epsilon_0.25.npz" in first and not (workplace / "out/epsilon_0.5.npz").exists()
    assert attack("out", *sizes).code == 0
    assert first.items() <= snapshot(workplace / "out").items()
    assert_same_attack(workplace / "out/epsilon_0.5.tsv", finished / "epsilon_0.5.tsv")


OUT_OF_MEMORY = [make() for make in fragile_models.OUT_OF_MEMORY.values()]


def allow_gradients_of(monkeypatch: pytest.MonkeyPatch, limit: int, error: Exception) -> None:
    """Let the classifier run out of memory with more than ``limit`` images of which it must keep
    activations.
    """
    forward = VotingClassifier.forward

    def limited(self: VotingClassifier, images: torch.Tensor) -> torch.Tensor:
        if images.requires_grad and len(images) > limit:
            raise error
        return forward(self, images)

    monkeypatch.setattr(VotingClassifier, "forward", limited)


@pytest.mark.parametrize(
    ("error", "limit"), [*zip(OUT_OF_MEMORY, (1, 5, 11))], ids=[*fragile_models.OUT_OF_MEMORY]
)
def test_attack_goes_on_with_less_memory_and_says_so(workplace, monkeypatch, capsys, error, limit):
    """From 40 noisy copies at a time to 20, 10, 5, 2, 1: whole images of two draws, in the end half
    of one.
    """
    words = [*SMALL, "--epsilon", 0.5, "--max", 9, "--num-noise-vec", 2]
    attack = partial(call, capsys, "attack", "digits", LINEAR, SIGMA)
    assert attack("whole", *words, "--attack-batch", 128).code == 0
    with monkeypatch.context() as patch:
        allow_gradients_of(patch, limit, error)
        outcome = attack("out", *words, "--attack-batch", 40)
    assert (outcome.code, outcome.err) == (0, "")
    whole, log = Path("whole/epsilon_0.5.tsv"), Path("out/epsilon_0.5.tsv")
    manifest = manifest_of(log)
    assert manifest["settings"]["attack_batch"] == 40
    # Passes of whole images: a batch of 5 or 11 is one of 4 or 10 copies.
    assert manifest["runs"][-1]["attack_batch"] == {1: 1, 5: 5, 11: 10}[limit]
    assert [row["predict"] for row in rows(log)] == [row["predict"] for row in rows(whole)]
    np.testing.assert_allclose(
        archive(log)["adversarial"], archive(whole)["adversarial"], rtol=0, atol=1e-5
    )


def test_less_memory_for_one_size_does_not_stand_in_the_way_of_the_next(
    attack, workplace, monkeypatch
):
    """Each log begins with the batch that was chosen first, and continues with its recorded
    batch.
    """
    sizes = ["--epsilon", 0.25, 0.5]
    with monkeypatch.context() as patch:
        allow_gradients_of(patch, 11, OUT_OF_MEMORY[0])
        assert attack("out", *sizes, "--max", 3).code == 0
    manifests = [manifest_of(workplace / f"out/epsilon_{size}.tsv") for size in sizes[1:]]
    assert len({manifest["settings"]["attack_batch"] for manifest in manifests}) == 1
    assert manifests[0]["runs"][-1]["attack_batch"] < manifests[0]["settings"]["attack_batch"]
    sizes += ["--max", 4]
    assert attack("out", *sizes).code == 0
    assert attack("out", *sizes, "--epsilon", 0.75, "--attack-batch", 6).code == 0
    assert attack("out", *sizes, "--epsilon", 0.25, 0.75, 0.5).code == 0, (
        "finished with different ones, and nothing to do"
    )
