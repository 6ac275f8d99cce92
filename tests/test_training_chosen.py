"""Training on chosen images and with a teacher: what is looked at, kept, resumed, cached, logged and refused."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from smoothadv.training import loop, teacher
from support.commands import call, header, refused, succeed
from support.stopping import after_update, send
from support.weights import read, same_state

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["digits", "digits_resnet8", "run", "--noise", 0.25, "--device", "cpu", "--batch", 256, "--steps-per-epoch", 4]
SMALL += ["--evaluate-images", 20, "--epochs"]
CHOSEN = ["--objective", "acr-weakness", "--num-noise-vec", 1, "--attack-from-epoch", 1, "--drop-below", 0.1]
CAT_RS = ["--objective", "cat-rs", "--teacher-draws", 2, "--num-noise-vec", 1, "--steps-per-epoch", 1]


@pytest.fixture(autouse=True)
def in_place(workplace) -> None:
    """Runs are in an empty working folder."""


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    """A teacher for digits."""
    folder = tmp_path_factory.mktemp("teacher")
    succeed("train", *SMALL[:2], folder, *SMALL[3:], 1)
    return folder / "checkpoint.pth.tar"


@pytest.fixture(scope="module")
def chosen(tmp_path_factory) -> tuple[Path, Path]:
    """A run of two epochs, the second on chosen images; and one that was stopped within the second."""
    folder, arguments = tmp_path_factory.mktemp("chosen"), [2, *CHOSEN]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, update in (("whole", 0), ("stopped", 6)):
        with pytest.MonkeyPatch.context() as patch:
            after_update(patch, update, send)
            main = __import__("smoothadv.commands.train", fromlist=["main"]).main
            words = [*SMALL[:2], folder / name, *SMALL[3:], *arguments]
            assert main([str(word) for word in words]) == (143 if update else 0)
    torch.set_num_threads(threads)
    return folder / "whole", folder / "stopped"


class Looks(list):
    """The draws of each count of votes from now on; the n-th, from 1, does something first."""

    def __init__(self, monkeypatch, module, at: int = 0, act=send) -> None:
        count = module.count_votes

        def counting(classifier, images, indices, draws, *more, **options):
            self.append((len(indices), draws))
            if len(self) == at:
                act()
            return count(classifier, images, indices, draws, *more, **options)

        monkeypatch.setattr(module, "count_votes", counting)


def test_images_are_chosen_by_looks_that_are_in_the_checkpoint(chosen, capsys, monkeypatch):
    """A run that goes on within the epoch does not look again: its weights are those of the checkpoint."""
    whole, stopped = chosen
    weights = read(stopped)["image_weights"]
    assert torch.equal(weights, read(whole)["image_weights"]) and len(weights) == 1438
    assert 0 < (weights > 0).sum() < 1438 and len(set(weights.tolist())) > 2
    shutil.copytree(stopped, "run"), shutil.copytree(stopped, "other")
    looks = Looks(monkeypatch, loop)
    assert call(capsys, "train", *SMALL, 2, *CHOSEN, "--resume").code == 0
    assert looks == [] and same_state(Path("run"), whole)
    content = read(Path("other"))
    torch.save({**content, "image_weights": weights.flip(0)}, "other/checkpoint.pth.tar")
    assert call(capsys, "train", *SMALL[:2], "other", *SMALL[3:], 2, *CHOSEN, "--resume").code == 0
    assert not same_state(Path("other"), whole), "a control"


@pytest.mark.parametrize("look", [1, 2])
def test_signal_during_a_look_stops_it_and_leaves_no_trace(look, chosen, capsys):
    with pytest.MonkeyPatch.context() as patch:
        looks = Looks(patch, loop, at=look)
        assert call(capsys, "train", *SMALL, 2, *CHOSEN).code == 128 + signal.SIGTERM
    assert looks[0] == (1438, 100) and len(looks) == look and looks[-1][1] == (100, 16)[look - 1]
    content = read(Path("run"))
    assert (content["epoch"], content["step"]) == (1, 0) and "image_weights" not in content
    succeed("train", *SMALL, 2, *CHOSEN, "--resume")
    assert same_state(Path("run"), chosen[0])


DAMAGES = {
    "missing": lambda weights: None,
    "of another length": lambda weights: weights[1:],
    "of another shape": lambda weights: weights[None],
    "nan": lambda weights: weights.where(weights > 0, torch.nan),
    "negative": lambda weights: weights - 0.5,
    "all zero": lambda weights: 0 * weights,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_checkpoint_without_good_weights_of_images_is_refused(damage, chosen, capsys):
    run = Path(shutil.copytree(chosen[1], "run"))
    content = read(run)
    torch.save({**content, "image_weights": damage(content["image_weights"])}, run / "checkpoint.pth.tar")
    assert refused(call(capsys, "train", *SMALL, 2, *CHOSEN, "--resume"), "run/checkpoint.pth.tar", "1438")


def test_votes_of_a_teacher_are_counted_once_for_each_teacher_noise_and_number(taught, own_cache, capsys, monkeypatch):
    looks = Looks(monkeypatch, teacher)
    other = Path("other.pth.tar")
    torch.save({**torch.load(taught, weights_only=True), "note": 1}, other)

    def train(path: Path, *options: object) -> None:
        outcome = call(capsys, "train", *SMALL, 1, *CAT_RS, "--teacher", path, "--overwrite", *options)
        assert outcome.code == 0, outcome.err

    for count, changes in enumerate([(taught,), (taught, "--teacher-draws", 3), (taught, "--noise", 0.5), (other,)], 1):
        train(*changes)
        train(*changes, "--seed", 1, "--lr", 0.01, "--micro-batch", 8)
        assert len(looks) == count and looks[-1][0] == 1438
    for file in (own_cache / "teacher_votes").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    train(taught)
    assert len(looks) == 5, "what is damaged in the cache is counted again"
    assert header(Path("run/log.txt"))[-2:] == ["train_cross_entropy", "train_divergence"]


def test_what_contradicts_itself_is_refused_in_one_line(taught, capsys):
    objective = ["--objective", "distillation"]
    cases = [
        ([*CAT_RS], ["--teacher"], 2),
        (objective, ["--teacher"], 2),
        (["--teacher", taught], ["--teacher", "Gaussian"], 2),
        ([*objective, "--teacher", taught, "--teacher-draws", 3], ["--teacher-draws"], 2),
        (["--drop-below", 0.5], ["--choose-from-epoch"], 2),
        (["--resample-every", 2], ["--choose-from-epoch"], 2),
        (["--drop-below", 1.5, "--choose-from-epoch", 1], ["--drop-below", "1.5"], 2),
        (["--drop-below", 1, "--choose-from-epoch", 0], ["--drop-below 1 leaves none of 1438"], 1),
        (["--optimizer", "adamw", "--momentum", 0.5], ["--momentum", "adamw"], 2),
        (["--choose-from-epoch", 0, "--noise", 0], ["--noise"], 2),
        ([*objective, "--teacher", "nowhere"], ["nowhere"], 1),
        ([*objective, "--transfer", 1.5, "--teacher", taught], ["--transfer"], 2),
    ]
    for options, words, code in cases:
        outcome = call(capsys, "train", *SMALL, 1, *options)
        assert refused(outcome, *words, code=code), (options, outcome)
        assert not Path("run/checkpoint.pth.tar").exists()


@pytest.mark.parametrize("change", [{"classes": ["one", "two"]}, {"image_shape": [3, 8, 8]}])
def test_teacher_of_other_images_is_refused(change, taught, capsys):
    content = torch.load(taught, weights_only=True)
    if "classes" in change:
        names = [name for name, value in content["state_dict"].items() if len(value.shape) and len(value) == 10]
        content["state_dict"].update({name: content["state_dict"][name][:2].clone() for name in names})
    torch.save({**content, **change}, "two.pth.tar")
    outcome = call(capsys, "train", *SMALL, 1, "--objective", "distillation", "--teacher", "two.pth.tar")
    assert refused(outcome, "two.pth.tar")


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        (["--objective", "smoothmix"], ["train_cross_entropy", "train_mixup"]),
        (["--objective", "distillation", "--teacher"], ["train_distance", "train_cross_entropy"]),
        (["--objective", "acr-weakness"], []),
    ],
)
def test_terms_are_columns_of_the_log(options, columns, taught):
    succeed("train", *SMALL, 1, *options, *([taught] if "--teacher" in options else []))
    assert [name for name in header(Path("run/log.txt")) if name.startswith("train_")][3:] == columns
