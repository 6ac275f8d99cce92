"""Routers in the commands and in Python: training, rows, verification, attacks and refusals."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import smoothadv
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.checkpoints import read_checkpoint
from smoothadv.datasets import get_dataset
from smoothadv.records.logs import recorded_settings
from smoothadv.training.routing import routed, shares_of_stages
from support.commands import call, rows, succeed
from support.models import IntervalClassifier
from support.staged import N0, NUMBERS, N, slow_votes, write_stages
from support.trainings import after_update, read, same_state, send

pytestmark = pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")


@pytest.fixture
def log(logs) -> Path:
    return logs["router"]


def test_counts_are_those_of_draws_of_its_own(log, stages):
    """A few votes may differ by rounding."""
    differ, compared = 0, {1: 0, 2: 0}
    for row in [each for each in rows(log) if each["predict"] != "-1"][:12]:
        place = int(row["stage"])
        votes = slow_votes(log, place, stages[place - 1], int(row["idx"]), N0, N)
        differ += abs(int(votes[int(row["predict"])]) - int(row["successes"]))
        votes[int(row["predict"])] = 0
        differ, compared[place] = differ + abs(int(votes.max()) - int(row["rival"])), 1
    assert differ <= 2 and all(compared.values())


FAULTS = {
    "a threshold": ("threshold = 0.7", "checkpoint", "--threshold is for cascades"),
    "no sigma": ("[router]", "[other]", "found other, expected threshold or [router]"),
    "no table": ("sigma = 0.2\n", "sigm = 0.2\n", "r.toml, [router]: found {'checkpoint': "),
    "classes": ("", "", "does not fit dataset 'digits by stage'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_of_no_router_are_refused_in_one_line(name, stages, checkpoints, workplace, capsys):
    text, instead, words = FAULTS[name]
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
        numbers = ["--N", 100, "--N0", 20, "--skip", 10, "--split", "train", "--device", "cpu"]
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
    options = [*ROUTING, "--steps-per-epoch", 5, "--route", *training_logs]
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
    assert {*best} == {0, 1} and len(indices) < 144
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
    options = ["--split", "train", "--skip", 20, "--N", 50, "--N0", 10, "--device", "cpu"]
    succeed("certify", "digits", checkpoint, 0.25, "few.tsv", *options)
    images, few = get_dataset("digits", "train"), Path("few.tsv")
    with pytest.warns(DoubtfulWarning, match="only the 72 images that all logs have .* of 144"):
        training, test, _ = routed(images, [training_logs[0], few])
    assert len(training) + len(test) <= 72


def test_logs_of_no_use_are_refused(training_logs, log, router, workplace, capsys):
    def refusal(*logs: object) -> str:
        command = ["train", "digits", "digits_resnet8", "out", "--noise", 0.2, "--route", *logs]
        outcome = call(capsys, *command, "--epochs", 1, "--device", "cpu")
        assert outcome.code != 0 and not Path("out").exists()
        return outcome.err

    first, second = training_logs
    of_train = [*NUMBERS, "--split", "train", "--max", 3]
    succeed("certify", "digits", router, "stages", "routed.tsv", *of_train)
    Path("few.tsv").write_text("".join(first.read_text().splitlines(keepends=True)[:12]))
    Path("few.tsv.manifest.json").write_bytes(Path(f"{first}.manifest.json").read_bytes())
    for logs, words in [
        (["routed.tsv", first], "is of no single classifier"),
        ([first], "found 1 log, expected one per stage"),
        ([log, first], "is of other images than the training images"),
        ([first, first], "found one log twice"),
        (["few.tsv", second], "too few to train a router"),
        ([first, second, "--use-unlabelled", "x.npz"], "leave one of them out"),
    ]:
        assert words in refusal(*logs)
    for flag in FLAGS:
        of_macer = refusal(*training_logs, "--objective", "macer", *flag)
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
