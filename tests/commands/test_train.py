"""train and train_pgd from end to end: artefacts, reproducibility, resuming, and what they refuse."""

import json
import math
import shlex
from pathlib import Path

import pytest
import torch

from support.commands import call, header, refused, rows, script, snapshot, succeed, timeless
from support.recipes import EPOCHS, RECIPES
from support.weights import read, same_state

COLUMNS = ["epoch", "time", "lr", "epsilon", "train_loss", "train_accuracy", "train_unattacked_accuracy"]
COLUMNS += ["test_loss", "test_accuracy", "test_clean_accuracy", "test_adversarial_accuracy", "test_images"]
COLUMNS += ["images_per_second"]
# Every option that makes an epoch depend on its number: learning rate, epsilon, and the draws.
SHORT_RUNS = {
    "gaussian": ("train", "--noise 0.25 --lr-step-size 1".split()),
    "PGD": ("train_pgd", "--noise 0.25 --attack PGD --epsilon 1 --num-steps 1 --warmup 2 --random-start".split()),
}


def train(name: str, folder: Path, *options: object) -> None:
    command, recipe = SHORT_RUNS[name]
    succeed(command, "digits", "digits_resnet8", folder, "--device", "cpu", *recipe, *options)


@pytest.fixture(params=RECIPES)
def folder(request: pytest.FixtureRequest, trained_folders: dict[str, Path]) -> Path:
    return trained_folders[request.param]


def test_checkpoint_has_the_released_format_and_what_a_reader_needs(folder):
    content = read(folder)
    assert {"epoch", "arch", "state_dict", "optimizer"} <= content.keys()
    assert content["epoch"] == EPOCHS, "the next epoch, counted from 0"
    assert content["arch"] == "digits_resnet8"
    # Input layer at 0, whose constants are no weights; network at 1.
    assert {key.split(".")[0] for key in content["state_dict"]} == {"1"}
    assert {"state", "param_groups"} <= content["optimizer"].keys()
    assert (content["dataset"], content["input_layer"], content["noise_sd"]) == ("digits", "normalize", 0.25)
    assert content["image_shape"] == [1, 8, 8] and len(content["classes"]) == 10


def test_training_log_has_a_row_per_epoch_and_training_teaches_something(folder):
    log = folder / "log.txt"
    assert header(log) == COLUMNS
    assert [row["epoch"] for row in rows(log)] == [str(epoch) for epoch in range(EPOCHS)]
    for row in rows(log):
        assert 0 <= float(row["train_accuracy"]) <= 1 and 0 <= float(row["test_accuracy"]) <= 1, "fractions"
        assert float(row["lr"]) == 0.1 and float(row["time"]) > 0
    first, *_, last = rows(folder / "log.txt")
    assert float(last["train_loss"]) < float(first["train_loss"])
    assert float(last["test_accuracy"]) > 0.4, "guessing gives 0.1"


@pytest.mark.parametrize(
    ("recipe", "epsilons"),
    [("gaussian", [0, 0, 0]), ("PGD", [0, 0.25, 0.5]), ("DDN", [64 / 255] * 3)],
    ids=["no attack", "warmup of 2 epochs", "no warmup"],
)
def test_log_says_the_epsilon_of_each_epoch(trained_folders, recipe, epsilons):
    logged = [float(row["epsilon"]) for row in rows(trained_folders[recipe] / "log.txt")]
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
    arguments = ["digits", "digits_resnet8", "models/my model", "--noise", noise, "--epochs", "1", "--device", "cpu"]
    done = warm.run(script("train", *arguments), workplace)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((workplace / "models/my model/args.json").read_text())["runs"][0]["command"][2:] == arguments
    python, entry_point, *certify = shlex.split(done.stdout.splitlines()[-1])
    assert python == "python" and (repository / entry_point).is_file()
    outcome = call(capsys, "certify", *certify, "--N", "10", "--max", "1", "--device", "cpu")
    assert (outcome.code, outcome.err) == (0, ""), "not even a warning that sigma is not that of the training"


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_seed_alone_decides_the_weights(name, tmp_path):
    for folder, seed in [("one", 5), ("same", 5), ("other", 6)]:
        train(name, tmp_path / folder, "--epochs", 1, "--seed", seed)
    assert same_state(tmp_path / "one", tmp_path / "same")
    assert not same_state(tmp_path / "one", tmp_path / "other")


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "gaussian"
    train("gaussian", folder, "--epochs", 1)
    return folder


def retrain(capsys, folder: Path, *options: object):
    command, recipe = SHORT_RUNS["gaussian"]
    usual = ["digits", "digits_resnet8", folder, "--epochs", 1, "--device", "cpu"]
    return call(capsys, command, *usual, *recipe, *options)


def test_existing_run_is_not_touched_unasked(one_epoch, capsys):
    before = snapshot(one_epoch)
    assert refused(retrain(capsys, one_epoch), str(one_epoch), "--resume", "--overwrite")
    assert snapshot(one_epoch) == before


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
    assert snapshot(one_epoch) == before, "a refused run must not change what is there, args.json included"


def test_finished_run_resumes_to_nothing(one_epoch, capsys):
    before = read(one_epoch)["epoch"], timeless(one_epoch / "log.txt")
    assert retrain(capsys, one_epoch, "--resume").code == 0
    assert (read(one_epoch)["epoch"], timeless(one_epoch / "log.txt")) == before


def test_resume_starts_anew_where_there_is_nothing(one_epoch, tmp_path, capsys):
    assert retrain(capsys, tmp_path / "new", "--resume").code == 0
    assert same_state(tmp_path / "new", one_epoch)


def test_overwrite_starts_anew(tmp_path, capsys):
    train("gaussian", tmp_path, "--epochs", 2, "--seed", 3)
    assert retrain(capsys, tmp_path, "--overwrite", "--seed", 4).code == 0
    assert read(tmp_path)["epoch"] == 1 and len(rows(tmp_path / "log.txt")) == 1
    assert json.loads((tmp_path / "args.json").read_text())["recipe"]["seed"] == 4


def test_weights_that_the_last_update_broke_are_not_saved(tmp_path, capsys, monkeypatch):
    """Losses are computed before each update: the last update of an epoch shows only in the weights."""
    step = torch.optim.SGD.step

    def broken_step(optimizer, *arguments):
        step(optimizer, *arguments)
        optimizer.param_groups[0]["params"][0].data.fill_(math.nan)

    monkeypatch.setattr(torch.optim.SGD, "step", broken_step)
    outcome = retrain(capsys, tmp_path / "run", "--batch", 100_000)
    assert refused(outcome, "weights stopped being finite", "epoch 1")
    assert not (tmp_path / "run/checkpoint.pth.tar").exists()


def test_running_out_of_memory_ends_with_one_line(tmp_path, capsys, monkeypatch):
    def run_out(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(torch.optim.SGD, "step", run_out)
    assert refused(retrain(capsys, tmp_path / "run"), "out of memory", "--batch")


def test_checkpoint_of_other_software_is_not_continued(one_epoch, capsys):
    content = read(one_epoch)
    del content["recipe"]
    torch.save(content, one_epoch / "checkpoint.pth.tar")
    assert refused(retrain(capsys, one_epoch, "--resume"), "not written by smoothadv")


def test_diverging_run_ends_with_one_line(tmp_path, capsys):
    outcome = retrain(capsys, tmp_path / "run", "--lr", "1e30")
    assert refused(outcome, "finite", "--lr")
    assert not (tmp_path / "run/checkpoint.pth.tar").exists(), "broken weights are not worth keeping"
