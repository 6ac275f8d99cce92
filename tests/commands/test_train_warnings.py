"""What training refuses, warns of and leaves behind when options, memory, disk or an old run cause trouble."""

import json
import os
from pathlib import Path

import pytest
import torch

from support.commands import call, on_a_small_disk, refused, script, snapshot, succeed
from support.weights import read

DIGITS = ["digits", "digits_resnet8"]
PGD = ["--noise", 0.25, "--attack", "PGD", "--epsilon", 0.5, "--num-steps", 1]
DDN = ["--noise", 0.25, "--attack", "DDN", "--epsilon", 0.5, "--num-steps", 2]
SHORT = ["--device", "cpu", "--epochs", 1, "--steps-per-epoch", 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*PGD, "--lr-schedule", "one-cycle", "--lr-step-size", 5], ["one-cycle", "--lr-step-size"]),
        ([*PGD, "--lr-schedule", "one-cycle", "--lr-factor", 0.5], ["one-cycle", "--lr-factor"]),
        ([*PGD, "--noise", 0, "--num-noise-vec", 4], ["--noise 0", "--num-noise-vec"]),
        ([*PGD, "--sync-bn", "--micro-batch", 8], ["--sync-bn", "--micro-batch"]),
        ([*PGD, "--sync-bn", "--cuda-graph"], ["--sync-bn", "--cuda-graph"]),
        ([*DDN, "--init-norm-DDN", 2, "--init-norm-is-epsilon-DDN"], ["--init-norm-DDN", "--init-norm-is-epsilon-DDN"]),
        ([*PGD, "--base-attack", "--no-grad-attack"], ["--no-grad-attack", "--base-attack"]),
        ([*PGD, "--hard-no-grad-attack", "--beta", 2], ["--beta", "--hard-no-grad-attack"]),
        ([*PGD, "--beta", 0], ["--beta", "'0'"]),
        ([*PGD[:2], "--objective", "gaussian", "--beta", 2], ["--beta", "--objective gaussian"]),
        ([*PGD, "--recipe", "released-behaviour"], ["--released-behaviour"]),
    ],
)
def test_contradicting_options_are_refused_in_one_line(workplace, capsys, options, words):
    assert refused(call(capsys, "train_pgd", *DIGITS, "run", *options), *words, code=2)
    assert list(workplace.iterdir()) == []


def test_command_line_wins_over_a_switch_of_a_recipe(workplace, capsys):
    (workplace / "mine").write_text("--horizontal-flip --crop-padding 1")
    succeed("train", *DIGITS, "run", "--noise", 0.25, *SHORT, "--recipe", "mine", "--no-horizontal-flip")
    recipe = json.loads((workplace / "run/args.json").read_text())["recipe"]
    assert (recipe["horizontal_flip"], recipe["crop_padding"]) == (False, 1)


def test_effective_arguments_are_all_recorded(workplace):
    """Also those that do not decide the weights and those that a recipe set."""
    (workplace / "mine").write_text("--evaluate-images 7 --checkpoint-minutes 3")
    succeed("train", *DIGITS, "run", "--noise", 0.25, *SHORT, "--recipe", "mine")
    (run,) = json.loads((workplace / "run/args.json").read_text())["runs"]
    assert (run["arguments"]["evaluate_images"], run["arguments"]["checkpoint_minutes"]) == (7, 3)
    assert (run["arguments"]["recipe"], run["arguments"]["dataset"]) == ("mine", "digits")
    assert read(workplace / "run")["runs"] == [run]


@pytest.mark.parametrize(("warmup", "epochs", "warned"), [(10, 1, True), (1, 1, True), (1, 2, False), (0, 1, False)])
def test_epsilon_that_never_becomes_full_is_warned_of(workplace, capsys, warmup, epochs, warned):
    options = ["--warmup", warmup, *SHORT, "--epochs", epochs]
    outcome = call(capsys, "train_pgd", *DIGITS, "run", *PGD, *options)
    assert outcome.code == 0 and outcome.err.count("\n") == warned
    assert (outcome.err.startswith("warning: epsilon reaches") and "--warmup" in outcome.err) == warned


@pytest.mark.parametrize("micro_batch", [16, None])
def test_testing_takes_no_more_memory_than_an_update(workplace, monkeypatch, micro_batch):
    """The attack on test images keeps the activations of m copies each, as the attack on training images does."""
    sizes: dict[str, list[int]] = {"attack": [], "update": []}
    forward = torch.nn.Conv2d.forward

    def noted(layer, images):
        if images.shape[1] == 1 and torch.is_grad_enabled():
            sizes["update" if layer.weight.requires_grad else "attack"].append(len(images))
        return forward(layer, images)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", noted)
    options = ["--warmup", 0, "--num-noise-vec", 4, "--batch", 64]
    options += [] if micro_batch is None else ["--micro-batch", micro_batch]
    succeed("train_pgd", *DIGITS, "run", *PGD, *options, *SHORT)
    assert max(sizes["update"]) == max(sizes["attack"]) == 4 * (micro_batch or 64)


def test_overwritten_run_keeps_its_arguments_until_it_has_a_successor(workplace, capsys):
    """Killed before the first checkpoint, the folder still holds one run, not halves of two."""
    succeed("train", *DIGITS, "run", "--noise", 0.25, *SHORT)
    before = snapshot(workplace)
    again = [*DIGITS, "run", "--noise", 1, *SHORT, "--overwrite"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smoothadv.training.loop.Update.__call__", interrupted)
        assert call(capsys, "train", *again).code == 130
    assert snapshot(workplace) == before
    succeed("train", *again)
    recipe = json.loads((workplace / "run/args.json").read_text())["recipe"]
    assert recipe == read(workplace / "run")["recipe"] and recipe["objective"]["noise_sd"] == 1


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_resuming_with_another_number_of_processes_is_warned_of(workplace, capsys, monkeypatch):
    options = [*DIGITS, "run", "--noise", 0.25, "--device", "cpu", "--steps-per-epoch", 1]
    with pytest.MonkeyPatch.context() as patch:
        provenance = {"processes": 3}
        patch.setattr("smoothadv.training.job.provenance", lambda command: provenance)
        succeed("train", *options, "--epochs", 1)
    outcome = call(capsys, "train", *options, "--epochs", 2, "--resume")
    assert outcome.code == 0 and outcome.err.startswith("warning: this run had 3 processes and goes on with 1")
    again = call(capsys, "train", *options, "--epochs", 3, "--resume")
    assert (again.code, again.err) == (0, "")


def test_weights_of_others_keep_the_constants_that_they_were_trained_with(workplace):
    """A digit classifier on other images: its first layer still subtracts the mean of its training."""
    from support.image_files import random_image, save_image

    for split in ("train", "test"):
        for label in range(10):
            for number in range(2):
                pixels = random_image(seed=label, height=8, width=8)[..., 0] // 8  # dark ones
                save_image(Path(f"images/{split}/{label}/{number}.png"), pixels)
    succeed("train", *DIGITS, "digits", "--noise", 0.25, *SHORT)
    options = ["--noise", 0.25, *SHORT, "--pretrained-model", "digits/checkpoint.pth.tar"]
    succeed("train", "imagefolder:images", "digits_resnet8", "tuned", *options)
    succeed("train", "imagefolder:images", "digits_resnet8", "new", *options[:-2])
    digits, tuned, new = (read(Path(name)) for name in ("digits", "tuned", "new"))
    assert tuned["mean"] == digits["mean"] != new["mean"] and tuned["std"] == digits["std"]


@pytest.mark.skipif(os.name == "nt", reason="the shell's limits are those of Unix")
def test_full_disk_is_named_and_the_old_checkpoint_stays(workplace, warm):
    """A limit on the size of files simulates a full disk."""
    succeed("train", *DIGITS, "run", "--noise", 0.25, *SHORT)
    before = snapshot(workplace)
    command = script("train", *DIGITS, "run", "--noise", 0.25, *SHORT, "--epochs", 2, "--resume")
    done = warm.run(on_a_small_disk(100_000, command), workplace)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "checkpoint.pth.tar" in line
    after = snapshot(workplace)
    assert after["run/checkpoint.pth.tar"] == before["run/checkpoint.pth.tar"]
    assert [name for name in after if name.endswith(".tmp")] == []
