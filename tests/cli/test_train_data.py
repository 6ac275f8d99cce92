"""Training on pseudo-labelled images and from pretrained weights, and columns of the log."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.architectures import get_architecture
from smoothadv.datasets import describe_dataset
from smoothadv.models.checkpoint import start_from
from support.commands import call, refused, rows, succeed
from support.image_files import random_image, save_image
from support.trainings import read, same_state

DIGITS = ["digits", "digits_resnet8"]
SHORT = [
    "--noise",
    0.25,
    "--device",
    "cpu",
    "--epochs",
    1,
    "--steps-per-epoch",
    4,
    "--evaluate-images",
    20,
]
DRAWS = np.random.default_rng(0)
IMAGES = DRAWS.integers(0, 256, (300, 8, 8, 1), dtype=np.uint8)
LABELS = DRAWS.integers(0, 10, 300)


def train(folder: object, *options: object) -> None:
    succeed("train", *DIGITS, folder, *SHORT, *options)


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
    again = [*DIGITS, tmp_path / "light", *SHORT, "--resume"]
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
def three_classes(tmp_path_factory) -> str:
    """A dataset of grey 8x8 images of three classes."""
    folder = tmp_path_factory.mktemp("three")
    names = [
        f"{split}/{label}/{number}.png"
        for split in ("train", "test")
        for label in "abc"
        for number in range(8)
    ]
    for seed, name in enumerate(names):
        save_image(folder / name, random_image(seed, 8, 8, channels=1))
    return f"imagefolder:{folder}"


def begun(pretrained: Path, description) -> tuple[dict, dict, dict, str]:
    """A fresh model's weights, those after start_from, those in the checkpoint, and the printed
    sentence.
    """
    model = get_architecture("digits_resnet8", description, "center")
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    sentence = start_from(model, read(pretrained), "there", "digits_resnet8", description)
    return fresh, model.state_dict(), read(pretrained)["state_dict"], sentence


@pytest.mark.parametrize("names", ["abc", "ABCDEFGHIJ"], ids=["three", "ten others"])
def test_only_the_classification_layer_is_new_where_the_classes_differ(
    pretrained, three_classes, names
):
    from dataclasses import replace

    fresh, now, saved, sentence = begun(
        pretrained, replace(describe_dataset(three_classes), class_names=tuple(names))
    )
    new = {name for name in now if not torch.equal(now[name], saved[name])}
    assert len(new) == 2 and all(torch.equal(now[name], fresh[name]) for name in new)
    assert {now[name].shape[0] for name in new} == {len(names)}
    assert f"a new classification layer for {len(names)} classes" in sentence


def test_command_trains_on_from_there(pretrained, three_classes, tmp_path, capsys):
    """An update as small as this changes only what is 0, and the statistics of batch
    normalization.
    """
    tiny = ["--lr", 1e-30, "--steps-per-epoch", 1, "--weight-decay", 0]
    start = ["--pretrained-model", pretrained / "checkpoint.pth.tar"]
    saved = read(pretrained)["state_dict"]
    for dataset, words in [
        ("digits", "all of its layers"),
        (three_classes, "classification layer for 3 classes"),
    ]:
        folder = tmp_path / words.split()[0]
        outcome = call(capsys, "train", dataset, "digits_resnet8", folder, *SHORT, *tiny, *start)
        assert outcome.code == 0 and words in outcome.out
        now = read(folder)
        convolutions = [name for name, value in saved.items() if value.ndim == 4]
        assert len(convolutions) > 6 and all(
            torch.equal(now["state_dict"][name], saved[name]) for name in convolutions
        )
        constants = [one["mean"] for one in (now, read(pretrained))]
        assert now["input_layer"] == "center" and constants[0] == constants[1], "of the weights"
        assert now["classes"] == list(describe_dataset(dataset).class_names)


def test_pretrained_model_that_does_not_fit_is_refused(pretrained, workplace, capsys):
    content = read(pretrained)
    torch.save(
        {**content, "state_dict": {f"{key}s": it for key, it in content["state_dict"].items()}},
        "foreign.tar",
    )
    torch.save({**content, "input_layer": None}, "silent.tar")
    whole = pretrained / "checkpoint.pth.tar"
    for arch, file, options, words in [
        ("cifar_resnet20", whole, [], ["is not a cifar_resnet20"]),
        ("digits_resnet8", "foreign.tar", [], ["foreign.tar", "is not a digits_resnet8"]),
        ("digits_resnet8", "missing.tar", [], ["missing.tar", "does not exist"]),
        ("digits_resnet8", whole, ["--input-layer", "normalize"], ["'center'", "'normalize'"]),
        ("digits_resnet8", "silent.tar", [], ["silent.tar", "--input-layer"]),
    ]:
        outcome = call(
            capsys, "train", "digits", arch, "run", *SHORT, "--pretrained-model", file, *options
        )
        assert refused(outcome, *words), outcome.err
    assert not Path("run").exists()
    train("run", "--pretrained-model", whole, "--input-layer", "center")


def test_resumed_run_goes_on_from_its_own_weights_and_only_from_the_same_start(
    pretrained, tmp_path, capsys
):
    start = ["--pretrained-model", pretrained / "checkpoint.pth.tar"]
    train(tmp_path / "whole", *start, "--epochs", 2)
    train(tmp_path / "halves", *start)
    other = tmp_path / "other.tar"
    torch.save({**read(pretrained), "epoch": 9}, other)
    again = [*DIGITS, tmp_path / "halves", *SHORT, "--epochs", 2, "--resume"]
    for options in (["--pretrained-model", other], ["--input-layer", "center"]):
        assert refused(call(capsys, "train", *again, *options), "pretrained_sha256")
    assert call(capsys, "train", *again, *start).code == 0
    assert same_state(tmp_path / "halves", tmp_path / "whole")
    assert not same_state(tmp_path / "halves", pretrained)


def test_every_kth_epoch_and_the_last_one_is_tested_which_changes_no_weights(tmp_path):
    usual = ["--epochs", 5, "--evaluate-images", 50]
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
