"""Cascades and routers in the commands and in Python: training, rows, resuming, merging,
verification, attacks and refusals.
"""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import smoothadv
from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.checkpoints import read_checkpoint
from smoothadv.datasets import get_dataset
from smoothadv.records.logs import recorded_settings
from smoothadv.training.routing import routed, shares_of_stages
from support.commands import call, refused, rows, settings_of, succeed, timeless
from support.models import IntervalClassifier
from support.refusals import refusal
from support.staged import N0, NUMBERS, N, slow_votes, write_stages
from support.trainings import after_update, read, same_state, send


class Brightness(torch.nn.Module):
    """Two classes of images: bright ones and dark ones."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        score = 40 * (images.flatten(1).mean(1, keepdim=True) - 0.31)
        return torch.cat([score, -score], dim=1)


@LIBRARIES.register("bright")
def _bright(location: str, pretrained: bool, images: object) -> LibraryNetwork:
    return LibraryNetwork(Brightness(), "1")


@pytest.fixture(scope="module")
def stages(checkpoints) -> list[tuple[Path, float]]:
    return [(checkpoints["PGD"], 0.25), (checkpoints["gaussian"], 0.12)]


@pytest.fixture(scope="module")
def files(stages, tmp_path_factory) -> dict[str, Path]:
    """By what they are; the router sends bright digits to the first stage."""
    folder = tmp_path_factory.mktemp("stages")
    router = "bright:of-tests", 0.2
    return {
        "cascade": write_stages(folder / "cascade.toml", stages, 0.7),
        "router": write_stages(folder / "router.toml", stages, router=router),
    }


@pytest.fixture(scope="module")
def logs(files) -> dict[str, Path]:
    """Certificates of 15 digits by each."""
    logs = {kind: path.with_suffix(".tsv") for kind, path in files.items()}
    for kind, log in logs.items():
        succeed("certify", "digits", files[kind], "stages", log, *NUMBERS)
    return logs


@pytest.fixture
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve images [12, 1, 2, 2] of which the first pixel says the class, 0 or 1; and these."""
    grey = torch.linspace(0.1, 0.9, 12)
    images = torch.full((12, 1, 2, 2), 0.5)
    images[:, 0, 0, 0] = grey
    return images, (grey > 0.5).long()


MODEL = IntervalClassifier(0.5), 0.5
pytestmark = pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")


@pytest.mark.parametrize("kind", ["cascade", "router"])
def test_counts_are_those_of_draws_of_its_own(kind, logs, stages):
    """A few votes may differ by rounding."""
    log, differ, compared = logs[kind], 0, set()
    for row in [each for each in rows(log) if each["predict"] != "-1"][:12]:
        predict, decided = int(row["predict"]), int(row["stage"])
        columns = {decided: "rival"}
        if kind == "cascade":
            columns = {place: f"stage_{place}_rival" for place in range(1, decided + 1)}
        for place, column in columns.items():
            votes = slow_votes(log, place, stages[place - 1], int(row["idx"]), N0, N)
            if place == decided:
                differ += abs(int(votes[predict]) - int(row["successes"]))
            votes[predict] = 0
            differ += abs(int(votes.max()) - int(row[column]))
            compared.add(place)
    assert differ <= 2 and compared == {1, 2}


def test_draws_of_a_cascade_are_not_those_of_its_first_model_alone(logs, stages):
    """By which the stages may have been chosen."""
    log = logs["cascade"]
    alone = log.with_name("alone.tsv")
    succeed("certify", "digits", *stages[0], alone, *NUMBERS, "--method", "two-sided")
    pairs = [
        (row["stage_1_rival"], single["rival"])
        for row, single in zip(rows(log), rows(alone))
        if row["predict"] == single["predict"] != "-1"
    ]
    assert sum(abs(int(one) - int(other)) for one, other in pairs) > 10


def test_another_cascade_neither_continues_a_log_nor_is_attacked(stages, logs, workplace, capsys):
    log = logs["cascade"]
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


def test_a_rehearsal_counts_the_draws_of_all_stages(files, workplace, capsys, monkeypatch):
    # Measuring takes two seconds.
    monkeypatch.setattr("smoothadv.evaluation.certify._draws_per_second", lambda *given: 1000.0)
    outcome = call(
        capsys, "certify", "digits", files["cascade"], "stages", "x.tsv", *NUMBERS, "--dry-run"
    )
    assert "at most 2 times 60 + 300 draws each, 10,800 in all" in outcome.out


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


def test_an_attack_makes_the_accuracy_smaller(files, workplace):
    options = ["--attack", "PGD", "--epsilon", 0.2, 1.0, "--num-steps", 4, "--num-noise-vec", 4]
    few = ["--N", 100, "--skip", 24, "--device", "cpu"]
    succeed("attack", "digits", files["cascade"], "stages", "out", *options, *few)
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
    Path("torn.tsv").write_bytes(b"".join(lines[:12]) + lines[12][:11])
    manifest = Path(f"{log}.manifest.json")
    Path("torn.tsv.manifest.json").write_bytes(manifest.read_bytes())
    succeed(*certify, "torn.tsv", *NUMBERS)
    assert timeless(Path("torn.tsv")) == timeless(log)
    for shard in ("0/2", "1/2"):
        succeed(*certify, "all.tsv", *NUMBERS, "--max", 4, "--shard", shard)
    succeed("certify", "merge", "all.tsv")
    assert timeless(Path("all.tsv")) == timeless(log)[:4]


@pytest.mark.parametrize(  # sound ones of a cascade: test_integers_are_stages
    ("kind", "options"),
    [
        ("cascade", ["--method", "sequential", "--N", 100]),
        ("router", ["--method", "sequential", "--N", 100]),
        ("router", ["--sound"]),
    ],
)
def test_logs_are_verified_by_new_draws(kind, files, workplace, options, capsys):
    certify = ["certify", "digits", files[kind], "stages", "log.tsv", *NUMBERS, "--max", 6]
    succeed(*certify, *options)
    found = call(capsys, "certify", "verify", "log.tsv", "--rows", 2, "--device", "cpu")
    assert found.code == 0 and "all are equal" in found.out
    if "--method" in options:
        radii = {float(row["radius"]) for row in rows(Path("log.tsv"))}
        assert radii <= {*settings_of("log.tsv")["radii"]}


@of_both
def test_predictions_are_those_of_the_certificates(kind, files, logs, workplace, capsys):
    predict = ("predict", "digits", files[kind], "stages")
    succeed(*predict, "p.tsv", "--N", 300, "--skip", 24, "--device", "cpu")
    certified = rows(logs[kind])
    pairs = [(a["predict"], b["predict"]) for a, b in zip(rows(Path("p.tsv")), certified)]
    both = [(a, b) for a, b in pairs if "-1" not in (a, b)]
    assert len(both) > 7 and all(a == b for a, b in both)
    outcome = call(capsys, *predict, "q.tsv", "--top-k", 2)
    assert refused(outcome, f"--top-k is not for {kind}s", code=2)


@of_both
def test_no_certificate_is_contradicted_by_an_attack_that_knows_the_stages(
    kind, files, logs, workplace, capsys
):
    options = ["--N", 200, "--num-noise-vec", 4, "--num-steps", 4, "--max", 9, "--device", "cpu"]
    attack = ("attack", "digits", files[kind], "stages", "out", "--against", logs[kind], *options)
    outcome = call(capsys, *attack)
    assert outcome.code == 0 and ", 0 flipped" in outcome.out


# Routers


FAULTS_OF_ROUTERS = {
    "a threshold": ("threshold = 0.7", "checkpoint", "--threshold is for cascades"),
    "no sigma": ("[router]", "[other]", "found other, expected threshold or [router]"),
    "no table": ("sigma = 0.2\n", "sigm = 0.2\n", "r.toml, [router]: found {'checkpoint': "),
    "classes": ("", "", "does not fit dataset 'digits by stage'"),
}


@pytest.mark.parametrize("name", FAULTS_OF_ROUTERS)
def test_files_of_no_router_are_refused_in_one_line(name, stages, checkpoints, workplace, capsys):
    text, instead, words = FAULTS_OF_ROUTERS[name]
    path = write_stages(Path("r.toml"), stages, router=(checkpoints["gaussian"], 0.2))
    content = path.read_text()
    path.write_text(f"{text}\n{content}" if "thr" in text else content.replace(text, instead))
    outcome = call(capsys, "certify", "digits", path, "stages", "log.tsv", *NUMBERS)
    # Warnings of other noise come first.
    last = outcome.err.strip().split("\n")[-1]
    assert outcome.code and words in last and not Path("log.tsv").exists()


@pytest.fixture(scope="module")
def training_logs(stages, tmp_path_factory) -> list[Path]:
    folder, logs = tmp_path_factory.mktemp("training"), []
    for number, (checkpoint, sigma) in enumerate(stages):
        logs.append(folder / f"{number}.tsv")
        numbers = ["--N", 100, "--N0", 20, "--skip", 20, "--split", "train", "--device", "cpu"]
        succeed("certify", "digits", checkpoint, sigma, logs[-1], *numbers)
    return logs


FLAGS = ("--route-labels", "soft"), ("--route-weights", "balanced")
ROUTING = ["--noise", 0.2, "--epochs", 2, "--batch", 16, "--device", "cpu"]


@pytest.mark.parametrize("is_soft", [False, True])
def test_a_router_is_trained_from_logs_and_used(is_soft, training_logs, stages, workplace):
    """By the best stage of each image, or by the recipe: soft labels, weights, consistency."""
    options = [*ROUTING, *([] if is_soft else ["--objective", "gaussian"])]
    succeed("train", "digits", "digits_resnet8", "out", *options, "--route", *training_logs)
    content = read_checkpoint(Path("out/checkpoint.pth.tar"))
    assert content["classes"] == ["0.25", "0.12"] and content["dataset"] == "digits"
    recipe = content["recipe"]
    assert recipe.get("route_labels") == ("soft" if is_soft else None)
    assert recipe.get("optimizer") == ("adamw" if is_soft else None)
    if is_soft:
        assert recipe["objective"]["regularization"] == 40
        losses = [float(row["train_cross_entropy"]) for row in rows(Path("out/log.txt"))]
        assert min(losses) > 1.3, "the mean weight is 2, and soft labels have an entropy"
    router = write_stages(Path("r.toml"), stages, router=("checkpoint.pth.tar", 0.2))
    router = router.rename("out/r.toml")
    succeed("certify", "digits", router, "stages", "log.tsv", *NUMBERS, "--max", 3)
    assert len(rows(Path("log.tsv"))) == 3
    assert recorded_settings(Path("log.tsv"))["training"][2]["objective"]["noise_sd"] == 0.2


def test_a_stopped_router_ends_like_an_undisturbed_one(training_logs, workplace, capsys):
    """Stopped after the third update of the first epoch; with other radii, it does not go on."""
    command = ["train", "digits", "digits_resnet8"]
    options = [*ROUTING, "--steps-per-epoch", 4, "--route", *training_logs]
    succeed(*command, "whole", *options)
    with pytest.MonkeyPatch.context() as patch:
        after_update(patch, 3, send, torch.optim.AdamW)
        assert call(capsys, *command, "stopped", *options).code == 143
    assert read(Path("stopped"))["step"] == 3
    with pytest.MonkeyPatch.context() as patch:
        name = "smoothadv.training.setup.shares_of_stages"
        patch.setattr(name, lambda *given: 2 * shares_of_stages(*given))
        outcome = call(capsys, *command, "stopped", *options, "--resume")
    assert outcome.code == 1 and "route_sha256" in outcome.err
    succeed(*command, "stopped", *options, "--resume")
    assert same_state(Path("stopped"), Path("whole"))


RADII = [[0.0, 1.6, 0.0], [0.3, 0.4, 0.3], [0.5, 0.5, 0.0], [0.1, 0.0, 0.0], [0.9, 0.2, 0.8]]


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("is_balanced", [False, True])
def test_shares_of_stages_are_those_of_the_formula(is_soft, is_balanced):
    """The first stage is best for three of five images, the second for two, the third for none."""
    found = shares_of_stages(torch.tensor(RADII, dtype=torch.float64), is_soft, is_balanced)
    assert found.dtype == torch.float32
    for of_image, best, row in zip(RADII, [1, 1, 0, 0, 0], found.tolist()):
        total = math.fsum(map(math.exp, of_image))
        soft = [math.exp(radius) / total for radius in of_image]
        shares = soft if is_soft else [float(stage == best) for stage in range(3)]
        weight = {0: 5 / 3, 1: 5 / 2}[best] if is_balanced else 1.0
        assert row == pytest.approx([weight * share for share in shares], rel=1e-6)


def test_labels_are_the_stages_that_certify_best(training_logs):
    """Every tenth image is held out."""
    images = get_dataset("digits", "train")
    training, test, radii = routed(images, training_logs)
    right = [
        {int(row["idx"]): float(row["radius"]) for row in rows(path) if row["correct"] == "1"}
        for path in training_logs
    ]
    indices = sorted({*right[0], *right[1]})
    best = [int(right[1].get(index, -1) > right[0].get(index, -1)) for index in indices]
    trained = [place for place in range(len(indices)) if place % 10]
    assert {*best} == {0, 1} and len(indices) < 72
    largest = [max(stage.get(indices[place], 0) for stage in right) for place in trained]
    assert radii.shape == (len(training), 2) and radii.min() == 0
    assert torch.equal(radii.argmax(1), training.labels) and radii.amax(1).tolist() == largest
    for part, places in ((test, range(0, len(indices), 10)), (training, trained)):
        assert part.labels.tolist() == [best[place] for place in places]
        for number in (0, 3, len(part) - 1):
            image, label = part[number]
            assert torch.equal(image, images[indices[places[number]]][0])
            assert label == best[places[number]]
        ((batch, labels),) = part.evaluation_batches([torch.tensor([3, 0])], torch.device("cpu"))
        assert torch.equal(batch[0], part[3][0]) and labels.tolist() == [part[3][1], part[0][1]]
    assert training.fingerprint() != test.fingerprint() != images.fingerprint()
    again, *_ = routed(images, training_logs[::-1])
    assert again.fingerprint() != training.fingerprint(), "the order of the stages matters"


def test_images_that_not_all_logs_have_are_left_out_and_a_line_says_so(
    training_logs, checkpoint, workplace
):
    options = ["--split", "train", "--skip", 40, "--N", 50, "--N0", 10, "--device", "cpu"]
    succeed("certify", "digits", checkpoint, 0.25, "few.tsv", *options)
    images, few = get_dataset("digits", "train"), Path("few.tsv")
    with pytest.warns(DoubtfulWarning, match="only the 36 images that all logs have .* of 72"):
        training, test, _ = routed(images, [training_logs[0], few])
    assert len(training) + len(test) <= 36


def test_logs_of_no_use_are_refused(training_logs, logs, files, workplace, capsys):
    def message_of(*logs: object) -> str:
        command = ["train", "digits", "digits_resnet8", "out", "--noise", 0.2, "--route", *logs]
        outcome = call(capsys, *command, "--epochs", 1, "--device", "cpu")
        assert outcome.code != 0 and not Path("out").exists()
        return outcome.err

    first, second = training_logs
    of_train = [*NUMBERS, "--split", "train", "--max", 3]
    succeed("certify", "digits", files["router"], "stages", "routed.tsv", *of_train)
    Path("few.tsv").write_text("".join(first.read_text().splitlines(keepends=True)[:12]))
    Path("few.tsv.manifest.json").write_bytes(Path(f"{first}.manifest.json").read_bytes())
    for several, words in [
        (["routed.tsv", first], "is of no single classifier"),
        ([first], "found 1 log, expected one per stage"),
        ([logs["router"], first], "is of other images than the training images"),
        ([first, first], "found one log twice"),
        (["few.tsv", second], "too few to train a router"),
        ([first, second, "--use-unlabelled", "x.npz"], "leave one of them out"),
    ]:
        assert words in message_of(*several)
    for flag in FLAGS:
        of_macer = message_of(*training_logs, "--objective", "macer", *flag)
        assert "the objective Macer takes no soft or weighted labels" in of_macer
    for flag in (*FLAGS, ("--route-consistency", "strong", "--objective", "consistency")):
        alone = ["train", "digits", "digits_resnet8", "out", "--noise", 0.2, *flag]
        assert "are of a router: add --route LOG" in call(capsys, *alone).err


def test_a_router_in_python_is_a_module_or_a_path(pictures, workplace):
    """Two classes by a threshold on one pixel, the stage by another one: the true radius is the
    distance to the nearer one.
    """
    images, labels = pictures
    stage = IntervalClassifier(0.5)
    given = {"images": images, "labels": labels, "n": 2000, "log": "log.tsv"}
    given |= {"stages": [(stage, 0.5), (stage, 0.25)], "router": (IntervalClassifier(0.2), 0.3)}
    found = smoothadv.certify(**given)
    pixel = images[:, 0, 0, 0].numpy()
    distance = np.minimum(np.abs(pixel - 0.5), np.abs(pixel - 0.2))
    assert (found.predict == found.label).sum() >= 9
    assert (found.radius <= distance).all() and (found.radius > distance * 0.8 - 0.1).all()
    assert found.stage.isin([1, 2]).all() and (found.stage == 1 + (pixel > 0.2)).sum() >= 11
    pd.testing.assert_frame_equal(found, smoothadv.certify(**given))
    answers = smoothadv.predict(**{**given, "log": None})
    assert (answers.predict == found.label).sum() >= 9
