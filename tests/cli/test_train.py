"""train and train_pgd from end to end: artefacts, reproducibility, resuming, what they refuse and
what they warn of; training on pseudo-labelled images and from pretrained weights.
"""

import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from smoothadv.architectures.libraries import LIBRARIES
from smoothadv.datasets import describe_dataset
from support.commands import (
    call,
    header,
    on_a_small_disk,
    refused,
    rows,
    script,
    snapshot,
    succeed,
    timeless,
)
from support.image_files import random_image, save_image
from support.recipes import EPOCHS, RECIPES, train_shortly
from support.trainings import read, same_state

COLUMNS = [
    "epoch",
    "time",
    "lr",
    "epsilon",
    "train_loss",
    "train_accuracy",
    "train_unattacked_accuracy",
    "test_loss",
    "test_accuracy",
    "test_clean_accuracy",
    "test_adversarial_accuracy",
    "test_images",
    "images_per_second",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Of a run of each recipe; without attacks it sees all images."""
    root = tmp_path_factory.mktemp("trained")
    few = ("--steps-per-epoch", 1, "--batch", 32, "--evaluate-images", 20)
    for name in RECIPES:
        train_shortly(name, root / name, *(() if name == "gaussian" else few))
    return {name: root / name for name in RECIPES}


@pytest.fixture(params=RECIPES)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def test_checkpoint_has_the_released_format_and_what_a_reader_needs(folder):
    content = read(folder)
    assert {"epoch", "arch", "state_dict", "optimizer"} <= content.keys()
    assert content["epoch"] == EPOCHS, "the next epoch, counted from 0"
    assert content["arch"] == "digits_resnet8"
    # Input layer at 0, whose constants are no weights; network at 1.
    assert {key.split(".")[0] for key in content["state_dict"]} == {"1"}
    assert {"state", "param_groups"} <= content["optimizer"].keys()
    assert (content["dataset"], content["input_layer"], content["noise_sd"]) == (
        "digits",
        "normalize",
        0.25,
    )
    assert content["image_shape"] == [1, 8, 8] and len(content["classes"]) == 10


def test_training_log_has_a_row_per_epoch(folder):
    log = folder / "log.txt"
    assert header(log) == COLUMNS
    assert [row["epoch"] for row in rows(log)] == [str(epoch) for epoch in range(EPOCHS)]
    for row in rows(log):
        assert 0 <= float(row["train_accuracy"]) <= 1 and 0 <= float(row["test_accuracy"]) <= 1, (
            "fractions"
        )
        assert float(row["lr"]) == 0.1 and float(row["time"]) > 0


def test_training_teaches_something(folders):
    first, *_, last = rows(folders["gaussian"] / "log.txt")
    assert float(last["train_loss"]) < float(first["train_loss"])
    assert float(last["test_accuracy"]) > 0.4, (
        "guessing gives 0.1, and each of seven seeds 0.69 to 0.86"
    )


@pytest.mark.parametrize(
    ("recipe", "epsilons"),
    [("gaussian", [0, 0, 0]), ("PGD", [0, 0.25, 0.5]), ("DDN", [64 / 255] * 3)],
    ids=["no attack", "warmup of 2 epochs", "no warmup"],
)
def test_log_says_the_epsilon_of_each_epoch(folders, recipe, epsilons):
    logged = [float(row["epsilon"]) for row in rows(folders[recipe] / "log.txt")]
    assert logged == pytest.approx(epsilons)


def test_arguments_file_explains_the_run(folder):
    content = json.loads((folder / "args.json").read_text())
    (run,) = content["runs"]
    assert {"started", "command", "git_commit", "python", "smoothadv", "packages"} <= run.keys()
    assert run["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert content["recipe"]["seed"] == 0 and content["recipe"]["dataset"] == "digits"
    assert content["recipe"]["dataset_fingerprint"]
    assert (run["epochs"], run["first_epoch"], run["device"]) == (EPOCHS, 0, "cpu")


def test_process_trains_and_names_the_next_command(workplace, warm, repository, capsys):
    noise = "0.1234567"
    arguments = [
        "digits",
        "digits_resnet8",
        "models/my model",
        "--noise",
        noise,
        "--epochs",
        "1",
        "--device",
        "cpu",
    ]
    done = warm.run(script("train", *arguments), workplace)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        json.loads((workplace / "models/my model/args.json").read_text())["runs"][0]["command"][2:]
        == arguments
    )
    python, entry_point, *certify = shlex.split(done.stdout.splitlines()[-1])
    assert python == "python" and (repository / entry_point).is_file()
    outcome = call(capsys, "certify", *certify, "--N", "10", "--max", "1", "--device", "cpu")
    assert (outcome.code, outcome.err) == (0, ""), (
        "not even a warning that sigma is not that of the training"
    )


DIGITS = ["digits", "digits_resnet8"]
SHORT = ["--device", "cpu", "--epochs", 1, "--steps-per-epoch", 1]
QUICK = [*SHORT, "--batch", 32, "--evaluate-images", 20]
OF_ONE_EPOCH = [*QUICK, "--noise", 0.25, "--lr-step-size", 1]


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "gaussian"
    succeed("train", *DIGITS, folder, *OF_ONE_EPOCH)
    return folder


def retrain(capsys, folder: Path, *options: object):
    return call(capsys, "train", *DIGITS, folder, *OF_ONE_EPOCH, *options)


def test_existing_run_is_not_touched_unasked_and_said_to_be_done_or_not(
    one_epoch, tmp_path, capsys
):
    before, held = snapshot(one_epoch), f"{one_epoch} already holds a trained model"
    assert refused(retrain(capsys, one_epoch), held, "--resume", "--overwrite")
    assert snapshot(one_epoch) == before
    folder = tmp_path / "run"
    shutil.copytree(one_epoch, folder)
    arguments = json.loads((folder / "args.json").read_text())
    arguments["runs"][-1]["epochs"] = 3
    (folder / "args.json").write_text(json.dumps(arguments))
    assert refused(retrain(capsys, folder), "holds a training of which 1 of 3 epochs are done")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--noise", 0.5, "noise_sd"),
        ("--seed", 1, "seed"),
        ("--batch", 64, "batch"),
        ("--lr", 0.01, "learning_rate"),
        ("--lr-step-size", 3, "learning_rate_step"),
        ("--momentum", 0.5, "momentum"),
        ("--weight-decay", 0, "weight_decay"),
        ("--crop-padding", 1, "crop_padding"),
        ("--input-layer", "center", "input_layer"),
    ],
)
def test_resuming_with_another_recipe_is_refused(one_epoch, capsys, option, value, field):
    before = snapshot(one_epoch)
    assert refused(retrain(capsys, one_epoch, "--resume", option, value), field)
    assert snapshot(one_epoch) == before, (
        "a refused run must not change what is there, args.json included"
    )


def test_finished_run_resumes_to_nothing(one_epoch, capsys):
    before = read(one_epoch)["epoch"], timeless(one_epoch / "log.txt")
    assert retrain(capsys, one_epoch, "--resume").code == 0
    assert retrain(capsys, one_epoch, "--resume", "--optimizer", "sgd").code == 0, "as by default"
    assert (read(one_epoch)["epoch"], timeless(one_epoch / "log.txt")) == before


PGD = ["--noise", 0.25, "--attack", "PGD", "--epsilon", 0.5, "--num-steps", 1]
DDN = ["--noise", 0.25, "--attack", "DDN", "--epsilon", 0.5, "--num-steps", 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [*PGD, "--lr-schedule", "one-cycle", "--lr-step-size", 5],
            ["one-cycle", "--lr-step-size"],
        ),
        ([*PGD, "--lr-schedule", "one-cycle", "--lr-factor", 0.5], ["one-cycle", "--lr-factor"]),
        ([*PGD, "--noise", 0, "--num-noise-vec", 4], ["--noise 0", "--num-noise-vec"]),
        ([*PGD, "--sync-bn", "--micro-batch", 8], ["--sync-bn", "--micro-batch"]),
        ([*PGD, "--sync-bn", "--cuda-graph"], ["--sync-bn", "--cuda-graph"]),
        ([*PGD, "--base-attack", "--gradient", "stein"], ["--gradient stein", "--base-attack"]),
        ([*PGD, "--gradient", "hard-stein", "--beta", 2], ["--beta", "--gradient hard-stein"]),
        ([*PGD, "--beta", 0], ["--beta", "'0'"]),
        ([*PGD[:2], "--objective", "gaussian", "--beta", 2], ["--beta", "--objective gaussian"]),
        ([*PGD, "--recipe", "released-behaviour"], ["--released-behaviour"]),
        ([*PGD, "--unlabelled-weight", 0.5], ["--unlabelled-weight", "--use-unlabelled"]),
        ([*PGD, "--lr-schedule", "cosine", "--lr-factor", 0.5], ["cosine", "--lr-factor"]),
        ([*PGD, "--lr-rise", 2], ["--lr-rise", "--lr-schedule cosine"]),
        ([*PGD, "--lr-schedule", "one-cycle", "--lr-end", 0], ["--lr-end", "cosine"]),
        (
            [*PGD, "--lr-schedule", "cosine", "--lr-rise", 3, "--epochs", 3],
            ["--lr-rise 3", "the 3 epochs"],
        ),
        (
            [*PGD, "--lr-schedule", "cosine", "--lr-end", 0.2, "--lr", 0.1],
            ["--lr-end 0.2", "the learning rate 0.1"],
        ),
        ([*PGD, "--cuda-graph", "--weight-decay-end", 1], ["--cuda-graph", "--weight-decay-end"]),
        ([*PGD, "--clip-gradients", 0], ["--clip-gradients", "'0'"]),
        ([*PGD, "--weight-decay-end", -1], ["--weight-decay-end", "'-1'"]),
        ([*PGD, "--timestep", "nearest"], ["--timestep", "--denoiser openai:FILE"]),
        ([*PGD, "--denoiser", "d.pth.tar", "--timestep", 3], ["--timestep", "openai:FILE"]),
        *(
            ([*PGD, "--noise", 0, "--denoiser", "openai:x", *step], ["--noise 0", "--timestep"])
            for step in ([], ["--timestep", "nearest"])
        ),
        ([*PGD, "--resize", 0], ["--resize", "'0'"]),
        ([*PGD, "--resize", "16:nearest"], ["--resize", "'nearest'", "bicubic"]),
        ([*PGD, "--lora", 0], ["--lora", "'0'"]),
        ([*PGD, "--route", "a.tsv", "--route", "b.tsv", "--resize", 8], ["routers", "--resize"]),
    ],
)
def test_contradicting_options_are_refused_in_one_line(workplace, capsys, options, words):
    assert refused(call(capsys, "train_pgd", *DIGITS, "run", *options), *words, code=2)
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize(
    ("steps", "later", "rate", "told"),
    [(3, 1, 32.0, True), (3, 15, 2.1, False), (1, 1, 0.8, False)],
)
def test_rate_leaves_out_the_first_update_which_is_told_where_it_is_longer_than_the_others(
    steps, later, rate, told, workplace, capsys, monkeypatch
):
    """It takes 40 seconds, for images to be read; a single one counts."""
    clock, step = SimpleNamespace(now=0), torch.optim.SGD.step

    def stepping(optimizer):
        step(optimizer)
        clock.now += later if clock.now else 40

    monkeypatch.setattr("smoothadv.training.run.time.monotonic", lambda: clock.now)
    monkeypatch.setattr(torch.optim.SGD, "step", stepping)
    options = [*QUICK, "--steps-per-epoch", steps]
    outcome = call(capsys, "train", *DIGITS, "run", "--noise", 0.25, *options)
    (row,) = rows(workplace / "run/log.txt")
    assert float(row["images_per_second"]) == rate
    assert ("(without the first update, which took 40 s)" in outcome.out) == told


def test_arguments_are_all_recorded_and_the_command_line_wins_over_a_recipe(workplace):
    """Also those that do not decide the weights and those that a recipe set."""
    (workplace / "mine").write_text(
        "--evaluate-images 7 --checkpoint-minutes 3 --horizontal-flip --crop-padding 1"
    )
    succeed(
        "train", *DIGITS, "run", "--noise", 0.25, *SHORT, "--recipe", "mine", "--no-horizontal-flip"
    )
    content = json.loads((workplace / "run/args.json").read_text())
    assert (content["recipe"]["horizontal_flip"], content["recipe"]["crop_padding"]) == (False, 1)
    (run,) = content["runs"]
    assert (run["arguments"]["evaluate_images"], run["arguments"]["checkpoint_minutes"]) == (7, 3)
    assert (run["arguments"]["recipe"], run["arguments"]["dataset"]) == ("mine", "digits")
    assert read(workplace / "run")["runs"] == [run]


@pytest.mark.parametrize(
    ("command", "options", "epochs", "words"),
    [
        ("train_pgd", [*PGD, "--warmup", 10], 1, ["warning: epsilon reaches", "--warmup"]),
        ("train_pgd", [*PGD, "--warmup", 1], 1, ["warning: epsilon reaches", "--warmup"]),
        ("train_pgd", [*PGD, "--warmup", 1], 2, []),
        ("train_pgd", [*PGD, "--warmup", 0], 1, []),
        ("train", ["--noise", 0.25, "--choose-from-epoch", 1], 2, []),
        (
            "train",
            ["--noise", 0.25, "--choose-from-epoch", 2],
            2,
            ["--choose-from-epoch would let"],
        ),
    ],
)
def test_what_never_begins_or_becomes_full_is_warned_of(
    workplace, capsys, command, options, epochs, words
):
    outcome = call(capsys, command, *DIGITS, "run", *options, *QUICK, "--epochs", epochs)
    assert outcome.code == 0 and outcome.err.count("\n") == bool(words)
    assert all(word in outcome.err for word in words)


@pytest.mark.parametrize("micro_batch", [16, None])
def test_testing_takes_no_more_memory_than_an_update(workplace, monkeypatch, micro_batch):
    """The attack on test images keeps the activations of m copies each, as the attack on training
    images does.
    """
    sizes: dict[str, list[int]] = {"attack": [], "update": []}
    forward = torch.nn.Conv2d.forward

    def noted(layer, images):
        if images.shape[1] == 1 and torch.is_grad_enabled():
            sizes["update" if layer.weight.requires_grad else "attack"].append(len(images))
        return forward(layer, images)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", noted)
    options = [
        "--warmup",
        0,
        "--num-noise-vec",
        4,
        "--batch",
        64,
        *([] if micro_batch is None else ["--micro-batch", micro_batch]),
    ]
    succeed("train_pgd", *DIGITS, "run", *PGD, *options, *SHORT)
    assert max(sizes["update"]) == max(sizes["attack"]) == 4 * (micro_batch or 64)


def test_overwritten_run_keeps_its_arguments_until_it_has_a_successor(workplace, capsys):
    """Killed before the first checkpoint, the folder still holds one run, not halves of two."""
    succeed("train", *DIGITS, "run", "--noise", 0.25, *QUICK, "--epochs", 2)
    before = snapshot(workplace)
    again = [*DIGITS, "run", "--noise", 1, *QUICK, "--overwrite"]
    with pytest.MonkeyPatch.context() as patch:
        interrupted = mock.Mock(side_effect=KeyboardInterrupt)
        patch.setattr("smoothadv.training.run.Update.__call__", interrupted)
        assert call(capsys, "train", *again).code == 130
    assert snapshot(workplace) == before
    succeed("train", *again)
    recipe = json.loads((workplace / "run/args.json").read_text())["recipe"]
    assert recipe == read(workplace / "run")["recipe"] and recipe["objective"]["noise_sd"] == 1
    assert read(workplace / "run")["epoch"] == len(rows(workplace / "run/log.txt")) == 1


def test_resuming_with_another_number_of_processes_is_warned_of(workplace, capsys, monkeypatch):
    options = [*DIGITS, "run", "--noise", 0.25, *QUICK]
    with pytest.MonkeyPatch.context() as patch:
        provenance = {"processes": 3}
        patch.setattr("smoothadv.training.setup.provenance", lambda command: provenance)
        succeed("train", *options, "--epochs", 1)
    outcome = call(capsys, "train", *options, "--epochs", 2, "--resume")
    assert outcome.code == 0 and outcome.err.startswith(
        "warning: this run had 3 processes and goes on with 1"
    )
    again = call(capsys, "train", *options, "--epochs", 3, "--resume")
    assert (again.code, again.err) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="the shell's limits are those of Unix")
def test_full_disk_is_named_and_the_old_checkpoint_stays(workplace, warm):
    """A limit on the size of files simulates a full disk."""
    succeed("train", *DIGITS, "run", "--noise", 0.25, *QUICK)
    before = snapshot(workplace)
    command = script("train", *DIGITS, "run", "--noise", 0.25, *QUICK, "--epochs", 2, "--resume")
    done = warm.run(on_a_small_disk(100_000, command), workplace)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "checkpoint.pth.tar" in line
    after = snapshot(workplace)
    assert after["run/checkpoint.pth.tar"] == before["run/checkpoint.pth.tar"]
    assert [name for name in after if name.endswith(".tmp")] == []


@pytest.mark.parametrize(
    ("command", "options", "shown", "hidden"),
    [
        ("train", [], ["--noise"], ["--warmup", "--attack", "--mix-steps", "--teacher"]),
        ("train_pgd", [], ["--warmup", "--attack", "--beta"], ["--lambda", "--gamma-DDN"]),
        ("train_pgd", ["--attack", "DDN"], ["--gamma-DDN", "--epsilon"], ["--random-start"]),
        ("train", ["--objective", "smoothmix"], ["--mix-steps", "--warmup"], ["--attack"]),
        ("train", ["--objective=cat-rs"], ["--teacher-draws", "--confidence"], ["--transfer"]),
        ("train", ["--objective=acr-weakness"], ["--teacher-noise"], ["--confidence"]),
    ],
)
def test_help_shows_the_options_of_the_objective_alone(
    capsys, monkeypatch, command, options, shown, hidden
):
    for kind in [*LIBRARIES]:
        if not LIBRARIES[kind].__module__.startswith("smoothadv."):
            monkeypatch.delitem(LIBRARIES, kind)  # of tests: the help would list them
    outcome = call(capsys, command, *options, "--help")
    flags = {*re.findall("^  (--[-A-Za-z]+)", outcome.out, re.MULTILINE)}
    assert outcome.code == 0 and not flags & {*hidden}
    assert {*shown} <= flags
    assert options or command == "train_pgd" or outcome.out.count("\n") <= 140


FOUR_STEPS = [*QUICK, "--noise", 0.25, "--steps-per-epoch", 4]
DRAWS = np.random.default_rng(0)
IMAGES = DRAWS.integers(0, 256, (300, 8, 8, 1), dtype=np.uint8)
LABELS = DRAWS.integers(0, 10, 300)


def train(folder: object, *options: object) -> None:
    succeed("train", *DIGITS, folder, *FOUR_STEPS, *options)


@pytest.fixture(scope="module")
def self_trained(tmp_path_factory) -> Path:
    """A run on digits and pseudo-labelled images [N, H, W, C] in a .npz file."""
    folder = tmp_path_factory.mktemp("self_trained")
    np.savez(folder / "pseudo.npz", data=IMAGES, extrapolated_targets=LABELS)
    train(folder / "run", "--use-unlabelled", folder / "pseudo.npz")
    return folder / "run"


def test_pseudo_labels_and_their_weight_decide_the_weights_and_are_recorded(
    self_trained, tmp_path, capsys
):
    file = self_trained.parent / "pseudo.npz"
    train(tmp_path / "without")
    train(tmp_path / "light", "--use-unlabelled", file, "--unlabelled-weight", 0.1)
    train(tmp_path / "stated", "--use-unlabelled", file, "--unlabelled-weight", 1)
    assert same_state(tmp_path / "stated", self_trained), "1 is the default"
    assert not same_state(tmp_path / "light", self_trained) and not same_state(
        tmp_path / "without", self_trained
    )
    assert "pseudo_weight" not in read(tmp_path / "without")["recipe"]
    recipes = [read(folder)["recipe"] for folder in (self_trained, tmp_path / "light")]
    assert [recipe["pseudo_weight"] for recipe in recipes] == [1.0, 0.1]
    assert recipes[0]["pseudo_labelled_fingerprint"] == recipes[1]["pseudo_labelled_fingerprint"]
    again = [*DIGITS, tmp_path / "light", *FOUR_STEPS, "--resume"]
    assert refused(call(capsys, "train", *again), "pseudo_weight was 0.1")
    outcome = call(capsys, "train", *again, "--use-unlabelled", file, "--unlabelled-weight", 0.5)
    assert refused(outcome, "pseudo_weight was 0.1, now 0.5")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """A run on digits with another input layer than the default."""
    folder = tmp_path_factory.mktemp("pretrained")
    train(folder, "--seed", 3, "--input-layer", "center")
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[int, str]:
    """Datasets of grey 8x8 images: of three classes, and of ten that are not the digits."""
    folder = tmp_path_factory.mktemp("others")
    for count in (3, 10):
        for seed in range(8 * count):
            label, image = "ABCDEFGHIJ"[seed % count], random_image(seed, 8, 8, channels=1)
            for split in ("train", "test"):
                save_image(folder / f"{count}/{split}/{label}/{seed}.png", image)
    return {count: f"imagefolder:{folder / str(count)}" for count in (3, 10)}


def test_training_goes_on_from_there_and_with_a_new_layer_for_other_classes(
    pretrained, others, tmp_path, capsys
):
    """An update as small as this changes only what is 0, and the statistics of batch
    normalization.
    """
    tiny = ["--lr", 1e-30, "--steps-per-epoch", 1, "--weight-decay", 0]
    start = ["--pretrained-model", pretrained / "checkpoint.pth.tar"]
    saved = read(pretrained)
    weights = {name for name, value in saved["state_dict"].items() if value.ndim > 1}
    for dataset, words, new in [
        ("digits", "all of its layers", 0),
        (others[3], "a new classification layer for 3 classes", 1),
        (others[10], "a new classification layer for 10 classes", 1),
    ]:
        folder = tmp_path / words
        outcome = call(
            capsys, "train", dataset, "digits_resnet8", folder, *FOUR_STEPS, *tiny, *start
        )
        assert outcome.code == 0 and words in outcome.out
        now = read(folder)
        same = [now["state_dict"][name].equal(saved["state_dict"][name]) for name in weights]
        assert same.count(False) == new and same.count(True) > 6
        assert now["input_layer"] == "center" and now["mean"] == saved["mean"], "of the weights"
        assert now["classes"] == list(describe_dataset(dataset).class_names)


def test_resumed_run_goes_on_from_its_own_weights_and_only_from_the_same_start(
    pretrained, tmp_path, capsys
):
    start = ["--pretrained-model", pretrained / "checkpoint.pth.tar"]
    train(tmp_path / "whole", *start, "--epochs", 2)
    train(tmp_path / "halves", *start)
    other = tmp_path / "other.tar"
    torch.save({**read(pretrained), "epoch": 9}, other)
    again = [*DIGITS, tmp_path / "halves", *FOUR_STEPS, "--epochs", 2, "--resume"]
    for options in (["--pretrained-model", other], ["--input-layer", "center"]):
        assert refused(call(capsys, "train", *again, *options), "pretrained_sha256")
    assert call(capsys, "train", *again, *start).code == 0
    assert same_state(tmp_path / "halves", tmp_path / "whole")
    assert not same_state(tmp_path / "halves", pretrained)


def test_every_kth_epoch_and_the_last_one_is_tested_which_changes_no_weights(tmp_path):
    usual = ["--epochs", 5, "--steps-per-epoch", 1, "--evaluate-images", 50]
    train(tmp_path / "all", *usual)
    train(tmp_path / "some", *usual, "--evaluate-every", 2)
    train(tmp_path / "others", *usual, "--evaluate-every", 9, "--evaluate-images", 100_000)
    log, whole, others = (rows(tmp_path / name / "log.txt") for name in ("some", "all", "others"))
    assert [row["test_images"] for row in log] == ["0", "50", "0", "50", "50"]
    assert [row["test_images"] for row in others] == ["0"] * 4 + ["359"], "more than there are"
    tested = ("test_loss", "test_accuracy", "test_clean_accuracy")
    for row, full in zip(log, whole):
        assert all(math.isnan(float(row[name])) or row[name] == full[name] for name in tested)
        assert all(math.isnan(float(row[name])) == (row["test_images"] == "0") for name in tested)
        assert math.isnan(float(row["test_adversarial_accuracy"])), "there is no attack"
    assert same_state(tmp_path / "some", tmp_path / "all") and same_state(
        tmp_path / "others", tmp_path / "all"
    )
