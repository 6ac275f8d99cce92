"""Classifiers of several networks: denoised smoothing from the command line, that is training
denoisers, and certifying, attacking and verifying behind them; and an ensemble of checkpoints, one
classifier, whose logs name all its members.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import smoothadv
from smoothadv.analysis.reading import read_logs
from smoothadv.analysis.tables import model_of
from smoothadv.architectures.denoisers import DENOISERS
from smoothadv.base.files import file_digest
from smoothadv.datasets import describe_dataset
from smoothadv.models.load import load_classifier, load_denoiser
from support.attack_runs import SIGMA
from support.commands import call, manifest_of, refused, rows, snapshot, succeed, timeless
from support.trainings import AT_ONCE, after_update, read, same_state, send

SMALL = ["--device", "cpu", "--noise", 0.25, "--batch", 64]
QUICK = ["--device", "cpu", "--N", 200, "--N0", 20, "--max", 6]


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("denoiser")
    once = ["--batch", 32, "--epochs", 1]
    succeed("train_denoiser", "digits", "digits_dncnn", folder / "run", *SMALL, *once)
    return folder / "run/checkpoint.pth.tar"


def test_denoiser_learns_and_the_log_knows_no_accuracies(denoiser):
    *_, last = rows(denoiser.parent / "log.txt")
    assert float(last["test_loss"]) < 0.6 * 0.25**2, (
        "the identity has sigma^2; of seven seeds each has 0.35 to 0.41"
    )
    assert all(math.isnan(float(value)) for name, value in last.items() if "accuracy" in name)
    content = read(denoiser.parent)
    facts = {"arch": "digits_dncnn", "denoiser": True, "noise_sd": 0.25, "image_shape": [1, 8, 8]}
    assert {name: content[name] for name in facts} == facts and content["recipe"]["objective"][
        "name"
    ]


def test_stability_starts_from_a_denoiser_and_counts_what_the_classifier_sees(
    denoiser, checkpoint, workplace, capsys
):
    train = ["train_denoiser", "digits", "digits_dncnn", "run", *SMALL, "--epochs", 1]
    train += ["--classifier", checkpoint, "--objective", "stability"]
    train += ["--pretrained-model", denoiser, "--steps-per-epoch", 4]
    outcome = call(capsys, *train)
    assert outcome.code == 0 and f"starting from {denoiser} with all of its layers" in outcome.out
    assert f"certify.py digits {checkpoint}" in outcome.out.replace(
        "smoothadv certify", "certify.py"
    )
    (row,) = rows(workplace / "run/log.txt")
    assert all(
        0.5 < float(row[name]) <= 1
        for name in ("train_accuracy", "test_accuracy", "test_clean_accuracy")
    )


def test_stopped_training_ends_like_an_undisturbed_one(checkpoint, workplace, monkeypatch):
    options = [*SMALL, "--batch", 16, "--steps-per-epoch", 3, "--evaluate-images", 20]
    options += ["--objective", "stability", "--classifier", checkpoint]
    with monkeypatch.context() as patch:
        after_update(patch, 5, send, torch.optim.AdamW)
        stopped = [
            "digits",
            "digits_dncnn",
            "stopped",
            *options,
            "--epochs",
            2,
            *AT_ONCE,
            "--resume",
        ]
        assert smoothadv.cli.main(["train_denoiser", *map(str, stopped)]) == 143
    assert (read(Path("stopped"))["epoch"], read(Path("stopped"))["step"]) == (1, 2)
    succeed("train_denoiser", *stopped)
    succeed("train_denoiser", "digits", "digits_dncnn", "whole", *options, "--epochs", 2)
    assert same_state(Path("stopped"), Path("whole"))
    assert timeless(Path("stopped/log.txt")) == timeless(Path("whole/log.txt"))


def test_log_behind_a_denoiser_is_that_of_the_composed_module(denoiser, checkpoint, workplace):
    succeed("certify", "digits", checkpoint, 0.25, "log.tsv", *QUICK, "--denoiser", denoiser)
    settings = manifest_of(Path("log.tsv"))["settings"]
    assert (
        settings["denoiser"]["arch"] == "digits_dncnn" and len(settings["denoiser"]["sha256"]) == 64
    )
    options = {"sigma": 0.25, "n": 200, "n0": 20, "limit": 6, "device": "cpu"}
    table = smoothadv.certify(checkpoint, "digits", denoiser=denoiser, **options)
    assert [f"{count}" for count in table.successes] == [
        row["successes"] for row in rows(Path("log.tsv"))
    ]
    # Other noise, of the same distribution: whatever the model, two frequencies of 200 draws of one
    # class are 0.25 apart at 5 standard errors, of any of six images with a probability of 4e-6.
    parts = (
        load_denoiser(denoiser, describe_dataset("digits"))[0],
        load_classifier(checkpoint, "digits"),
    )
    module = smoothadv.certify(torch.nn.Sequential(*parts), "digits", **options)
    both = (module.predict == table.predict) & (table.predict >= 0)
    assert both.any(), "an image that both certify is needed for this test to say anything"
    assert np.abs(module.successes - table.successes)[both].max() < 0.25 * 200


def test_log_can_be_verified_and_attacked_without_a_contradiction(
    denoiser, checkpoint, workplace, capsys
):
    """False alarms, whatever the model: 0.001 of all runs, as the command judges flips."""
    succeed("certify", "digits", checkpoint, 0.25, "log.tsv", *QUICK, "--denoiser", denoiser)
    outcome = call(capsys, "certify", "verify", "log.tsv", "--rows", 3, "--device", "cpu")
    assert outcome.code == 0 and "all are equal" in outcome.out
    few = "--N 100 --num-steps 3 --num-noise-vec 4 --device cpu".split()
    attack = ["digits", checkpoint, 0.25, "out", *few]
    outcome = call(capsys, "attack", *attack, "--against", "log.tsv", "--denoiser", denoiser)
    assert outcome.code == 0, outcome
    assert all(float(row["attack_norm"]) > 0 for row in rows(Path("out/against.tsv"))), (
        "gradients pass through it"
    )
    outcome = call(capsys, "attack", *attack, "--against", "log.tsv", "--overwrite")
    assert refused(outcome, "log.tsv certifies something else", "--denoiser was")


def test_log_is_of_one_denoiser_and_an_ensemble_may_stand_behind_it(
    denoiser, checkpoint, workplace, capsys
):
    pair = f"{checkpoint}+copy.pth.tar"
    torch.save({**torch.load(checkpoint, weights_only=True), "epoch": 99}, "copy.pth.tar")
    succeed("certify", "digits", pair, 0.25, "log.tsv", *QUICK, "--denoiser", denoiser)
    torch.save({**torch.load(denoiser, weights_only=True), "epoch": 99}, "other.pth.tar")
    for other in (["--denoiser", "other.pth.tar"], []):
        outcome = call(capsys, "certify", "digits", pair, 0.25, "log.tsv", *QUICK, *other)
        assert refused(outcome, "log.tsv", "--denoiser was") and outcome.err.count(" was ") == 1


def test_what_does_not_fit_is_one_line_and_leaves_nothing(denoiser, checkpoint, workplace, capsys):
    of_colour = torch.load(denoiser, weights_only=True)
    of_colour["state_dict"] = DENOISERS["digits_dncnn"](describe_dataset("cifar10")).state_dict()
    torch.save(
        {name: value for name, value in of_colour.items() if name != "image_shape"},
        "colour.pth.tar",
    )
    torch.save({**of_colour, "image_shape": [3, 32, 32]}, "shape.pth.tar")
    torch.save({**of_colour, "denoiser": "yes"}, "field.pth.tar")
    before = snapshot(workplace)
    certify = ["certify", "digits", checkpoint, 0.25, "log.tsv", *QUICK, "--denoiser"]
    train = ["train_denoiser", "digits", "digits_dncnn", "run", *SMALL]
    for command, words in [
        ([*certify, checkpoint], ["is no denoiser"]),
        (
            [*certify, "colour.pth.tar"],
            ["colour.pth.tar is not a digits_dncnn for dataset 'digits'"],
        ),
        ([*certify, "shape.pth.tar"], ["trained with image_shape [3, 32, 32]"]),
        ([*certify, "field.pth.tar"], ["its denoiser is 'yes', expected True or False"]),
        ([*certify, "diffusers:nowhere"], ["diffusers"]),
        (
            ["certify", "digits", denoiser, 0.25, "log.tsv"],
            [f"{denoiser} is a denoiser: name it with --denoiser"],
        ),
        (["quantize", "digits", denoiser, 0.25, "out.pth.tar"], ["is a denoiser"]),
        ([*train, "--pretrained-model", checkpoint], ["is no denoiser"]),
        ([*train, "--classifier", denoiser], ["is a denoiser"]),
        ([*train, "--classifier", "torchvision:x"], ["there is no torchvision:x"]),
        (
            ["quantize", "digits", "torchvision:x", 0.25, "out.pth.tar"],
            ["torchvision:x does not exist: no network by name can"],
        ),
    ]:
        assert refused(call(capsys, *command), *words), command
    for command, words in [
        ([*train, "--objective", "stability"], ["needs a --classifier CHECKPOINT"]),
        ([*train, "--noise", 0], ["--noise"]),
        ([*train, "--momentum", 0], ["adamw has none", "--optimizer is of the recipe denoiser"]),
        ([*train, "--pretrained"], ["unknown option --pretrained"]),
        (
            ["train_denoiser", "digits", "digits_resnet8", "run", "--noise", 0.25],
            ["unknown denoiser"],
        ),
    ]:
        assert refused(call(capsys, *command), *words, code=2), command
    assert snapshot(workplace) == before


FEW = ["--device", "cpu", "--N", 200, "--N0", 20, "--skip", 32]


@pytest.fixture(scope="module")
def members(checkpoints) -> list[Path]:
    return [checkpoints[name] for name in ("gaussian", "PGD", "DDN")]


@pytest.fixture(scope="module")
def names(members, tmp_path_factory) -> dict[str, str]:
    """How the ensemble is named, by the way of its mean."""
    path = tmp_path_factory.mktemp("described") / "three.toml"
    path.write_text(f'members = {json.dumps(list(map(str, members)))}\nmean = "probabilities"\n')
    return {"logits": "+".join(map(str, members)), "probabilities": str(path)}


@pytest.fixture(scope="module")
def certified(names, tmp_path_factory) -> dict[str, Path]:
    """Certificates of 12 images by each mean."""
    logs = {mean: tmp_path_factory.mktemp("certified") / f"{mean}.tsv" for mean in names}
    for mean, log in logs.items():
        sound = ["--sound"] if mean == "probabilities" else []
        succeed("certify", "digits", names[mean], SIGMA, log, *FEW, *sound)
    return logs


@pytest.mark.parametrize("mean", ["logits", "probabilities"])
def test_certificates_of_an_ensemble_withstand_attacks(certified, names, mean, workplace, capsys):
    """False alarms, whatever the members: 0.001 of all runs, as the command judges flips."""
    log = certified[mean]
    assert sum(float(row["radius"]) > 0 for row in rows(log)) > 5
    few = "--device cpu --N 100 --num-steps 3 --num-noise-vec 4 --against".split()
    outcome = call(capsys, "attack", "digits", names[mean], SIGMA, "out", *few, log)
    assert outcome.code == 0, outcome
    assert all(float(row["attack_norm"]) > 0 for row in rows(Path("out/against.tsv"))), (
        "it has gradients"
    )


def test_manifest_names_all_members_and_the_mean(certified, members, names):
    digests = [file_digest(member) for member in members]
    for mean, log in certified.items():
        settings, runs = (manifest_of(log)[part] for part in ("settings", "runs"))
        assert (
            settings["checkpoint_sha256"] == {mean: digests}
            and runs[0]["checkpoint"] == names[mean]
        )
        assert settings["arch"] == f"digits_resnet8+digits_resnet8+digits_resnet8 (mean of {mean})"
        assert settings["input_layer"] == ["normalize"] * 3 and settings["folded"] is True
        assert [recipe["objective"]["name"] for recipe in settings["training"]][0] == "Gaussian"
    keys = {manifest_of(log)["settings"]["classifier_sha256"] for log in certified.values()}
    assert len(keys) == 2, "the mean keys the noise"
    logs = read_logs(
        [str(log) for log in certified.values()], ("certification",), {}, print
    ).certification
    assert len({model_of(log) for log in logs}) == 2


def test_another_ensemble_neither_continues_a_log_nor_is_attacked_by_it(
    certified, members, names, workplace, capsys
):
    for other in (names["logits"], "+".join(map(str, members[:2])), members[0]):
        again = call(
            capsys, "certify", "digits", other, SIGMA, certified["probabilities"], *FEW, "--sound"
        )
        assert refused(again, "cannot resume", "checkpoint_sha256")
        against = ["--against", certified["probabilities"], "--device", "cpu", "--N", 100]
        assert refused(
            call(capsys, "attack", "digits", other, SIGMA, "out", *against),
            "certifies something else",
        )


def test_functions_take_an_ensemble_and_members_warn_of_another_sigma(
    certified, names, workplace, capsys
):
    predicted = smoothadv.predict(
        names["logits"], "digits", sigma=SIGMA, n=100, limit=3, device="cpu"
    )
    assert len(predicted) == 3
    outcome = call(
        capsys, "predict", "digits", names["logits"], 0.5, "log.tsv", "--N", 100, "--max", 1
    )
    assert (
        outcome.code == 0
        and outcome.err.count("was trained with noise 0.25; here it gets noise 0.5") == 3
    )
