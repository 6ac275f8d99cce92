"""Training on chosen images and with a teacher: what is looked at, kept, resumed, cached, logged
and refused.
"""

import shutil
from pathlib import Path

import pytest
import torch

from smoothadv.checkpoints import load_classifier
from smoothadv.training.teacher import NoisyVotes, for_label
from support.commands import Outcome, call, refused
from support.trainings import after_update, read, same_state, send, train_on_few_images

pytestmark = pytest.mark.usefixtures("workplace")
IMAGES, BATCH = 52, 12
SMALL = [
    *("--noise", 0.25, "--device", "cpu", "--batch", BATCH, "--evaluate-images", 20),
    *("--epochs", 1),
]
CHOSEN = [
    *("--objective", "acr-weakness", "--num-noise-vec", 1, "--attack-from-epoch", 1),
    *("--drop-below", 0.1, "--epochs", 2, "--steps-per-epoch", 3),
]
CAT_RS = [
    *("--objective", "cat-rs", "--teacher-draws", 2, "--num-noise-vec", 1, "--noise-steps", 1),
    *("--steps-per-epoch", 1),
]
CHECKPOINT = "t/checkpoint.pth.tar"
DISTILLED = ["--objective", "distillation", "--teacher", CHECKPOINT, "--steps-per-epoch", 1]


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    train_on_few_images(monkeypatch, IMAGES)


def train(capsys, folder: str, *options: object) -> Outcome:
    return call(capsys, "train", "digits", "digits_resnet8", folder, *SMALL, *options)


def watch(patch: pytest.MonkeyPatch, signalled: int = 0) -> list[int]:
    """The images of each count of votes from now on; during one of them, from 1, comes a signal."""
    looks, count = [], NoisyVotes.count

    def counting(votes, indices, *how, **more):
        looks.append(len(indices))
        if len(looks) == signalled:
            send()
        return count(votes, indices, *how, **more)

    patch.setattr(NoisyVotes, "count", counting)
    return looks


def test_images_are_chosen_by_looks_that_end_in_the_checkpoint(capsys, monkeypatch):
    """A run that goes on within the epoch does not look again; one that is stopped during a look
    does. Each takes a quarter of the draws, and of the time.
    """
    monkeypatch.setattr(
        "smoothadv.training.run.for_label", lambda draws, label: for_label(draws // 4, label)
    )
    with pytest.MonkeyPatch.context() as patch:
        looks = watch(patch)
        after_update(patch, 4, send)
        assert train(capsys, "stopped", *CHOSEN).code == 143
        content = read(Path("stopped"))
        weights = content["image_weights"]
        assert looks == [IMAGES, int((weights > 0).sum())]
        assert 0 < looks[1] < IMAGES == len(weights)
        for name, changed in (("run", weights), ("other", weights.flip(0))):
            shutil.copytree("stopped", name)
            torch.save({**content, "image_weights": changed}, f"{name}/checkpoint.pth.tar")
            assert train(capsys, name, *CHOSEN, "--resume").code == 0
        assert len(looks) == 2 and not same_state(Path("run"), Path("other")), "a control"
    for number in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            looks = watch(patch, number)
            assert train(capsys, "again", *CHOSEN, "--resume").code == 143 and len(looks) == number
        assert (read(Path("again"))["epoch"], read(Path("again")).get("image_weights")) == (1, None)
    assert train(capsys, "again", *CHOSEN, "--resume").code == 0 and same_state(
        Path("again"), Path("run")
    )


def test_teacher_votes_once_for_each_image_and_noise(checkpoint, own_cache, capsys, monkeypatch):
    """When a batch has images that it has not seen, for whatever training."""
    shutil.rmtree(own_cache / "teacher_votes", ignore_errors=True)  # of other tests
    looks, options = watch(monkeypatch), [*CAT_RS, "--teacher", checkpoint]
    for more in ([], [], ["--seed", 1], ["--seed", 1]):
        assert train(capsys, "run", *options, *more, "--overwrite").code == 0
    assert len(looks) == 2 and looks[0] == BATCH > looks[1] > BATCH / 2
    for flag in ("--teacher-noise", "--noise"):
        assert train(capsys, "run", *options, flag, 0.5, "--overwrite").code == 0
    assert looks[2:] == [BATCH], "it is one noise"
    refusal = train(capsys, "run", *options, "--teacher-draws", 4)
    assert refused(refusal, "run already holds a trained model") and len(looks) == 3, "before that"
    for file in (own_cache / "teacher_votes").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert train(capsys, "run", *options, "--overwrite").code == 0
    assert looks[3:] == [BATCH], "what is damaged in the cache is counted again"


def test_a_stop_with_votes_or_without_them_leaves_no_trace(checkpoint, own_cache, capsys):
    options = [*CAT_RS, "--teacher", checkpoint, "--epochs", 2, "--steps-per-epoch", 4, "--resume"]
    assert train(capsys, "whole", *options).code == 0
    for folder, loses in (("kept", False), ("lost", True)):
        shutil.rmtree(own_cache / "teacher_votes")
        with pytest.MonkeyPatch.context() as patch:
            looks = watch(patch)
            after_update(patch, 3, send)
            assert train(capsys, folder, *options).code == 143
            if loses:
                shutil.rmtree(own_cache / "teacher_votes")
            assert train(capsys, folder, *options).code == 0
        assert (IMAGES < sum(looks)) == loses and looks[:4] == [BATCH] * 4
        assert same_state(Path(folder), Path("whole"))


def test_a_teacher_says_which_images_are_left_out(checkpoint, capsys, monkeypatch):
    seen = []

    def count(votes, indices, *_, **__):
        seen.append((votes.classifier, votes.noise_sd))
        return 99 * (indices % 2)

    monkeypatch.setattr(NoisyVotes, "count", count)
    options = [
        *(*CHOSEN[:4], "--attack-from-epoch", 0, "--drop-below", 0.1, "--resample-every", 0),
        *("--teacher", checkpoint, "--teacher-noise", 0.5, "--steps-per-epoch", 1),
    ]
    refusal = train(capsys, "none", *options, "--drop-below", 1)
    assert refused(refusal, "--drop-below") and not Path("none/checkpoint.pth.tar").exists()
    seen.clear()
    assert train(capsys, "run", *options).code == 0
    ((classifier, noise_sd),) = seen
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = load_classifier(checkpoint, "digits")(images)
    assert noise_sd == 0.5 and torch.allclose(classifier(images), expected, atol=1e-4)
    assert read(Path("run"))["image_weights"].tolist() == [0, 1] * (IMAGES // 2)


REFUSED = {
    "--teacher": (CAT_RS, ["--objective", "distillation"], DISTILLED[2:]),
    "--teacher-draws": ([*DISTILLED, "--teacher-draws", 3],),
    "--teacher-noise": ([*DISTILLED, "--teacher-noise", 1], [*CHOSEN, "--teacher-noise", 1]),
    "--choose-from-epoch": (["--drop-below", 0.5], ["--resample-every", 2]),
    "--drop-below": (["--drop-below", 1.5, "--choose-from-epoch", 1],),
    "--momentum": (["--optimizer", "adamw", "--momentum", 0.5],),
    "--noise": (["--choose-from-epoch", 0, "--noise", 0],),
    "--transfer": ([*DISTILLED, "--transfer", 1.5],),
    CHECKPOINT: (DISTILLED,),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_contradicts_itself_is_refused_in_one_line(word, checkpoint, capsys):
    """Also a teacher of other classes."""
    Path("t").mkdir()
    content = torch.load(checkpoint, weights_only=True)
    last = {
        name: value[:2].clone()
        for name, value in content["state_dict"].items()
        if value.shape[:1] == (10,)
    }
    torch.save(
        {**content, "classes": ["a", "b"], "state_dict": content["state_dict"] | last}, CHECKPOINT
    )
    for options in REFUSED[word]:
        outcome = train(capsys, "run", *options)
        assert refused(outcome, word, code=1 if word == CHECKPOINT else 2), outcome
        assert not Path("run/checkpoint.pth.tar").exists()
