"""DATASET@SIZE: photographs of several sizes in the commands, and what these say and record."""

import pytest

from smoothadv.datasets.sources import imagenet
from smoothadv.records.logs import recorded_settings
from support.commands import call, rows, succeed
from support.image_files import random_image, save_image
from support.trainings import read

SMOOTHING = ["--N", "20", "--device", "cpu"]


def test_photographs_are_trained_on_and_certified_after_resizing(workplace, capsys):
    for number in range(12):
        place = f"photos/{'train' if number < 8 else 'test'}/{'ab'[number % 2]}/{number}.png"
        save_image(workplace / place, random_image(number, 20 + number, 40 - number))
    of_training = ["--noise", "0.25", "--epochs", "1", "--batch", "4", "--device", "cpu"]
    photos, model = "imagefolder:photos@8,9", ["run/checkpoint.pth.tar", "0.25"]
    trained = call(capsys, "train", photos, "digits_resnet8", "run", *of_training)
    assert trained.code == 0 and " imagefolder:photos@8,9 run/" in trained.out
    assert trained.err.count("radii are those of the resized images") == 1, "once in a process"
    succeed("certify", photos, *model, "log.tsv", "--N0", "10", *SMOOTHING)
    assert recorded_settings(workplace / "log.tsv")["dataset"] == photos
    assert len(rows(workplace / "log.tsv")) == 4
    attack = ["--attack", "PGD", "--epsilon", "0.5", "--num-steps", "1"]
    succeed("predict", photos, *model, "p.tsv", *SMOOTHING)
    succeed("attack", photos, *model, "attacked", *SMOOTHING, *attack)
    succeed("quantize", photos, *model, "q.pth.tar", "--draws", "5")


@pytest.mark.parametrize("dataset", ["imagefolder:photos@8", "imagenet"])
def test_padding_before_crops_is_not_for_photographs(workplace, capsys, monkeypatch, dataset):
    monkeypatch.setattr(imagenet, "SYNSETS", ("a", "b"))
    for place in ("train/a", "train/b", "test/a", "test/b", "val/a", "val/b"):
        save_image(workplace / "photos" / place / "0.png", random_image(0, 20, 30))
    words = "digits_resnet8 out --noise 0.25 --crop-padding 2 --data-dir photos --device cpu"
    outcome = call(capsys, "train", dataset, *words.split())
    assert outcome.code == 2 and not (workplace / "out").exists()
    assert (
        f"error: --crop-padding: of '{dataset}' random parts are resized instead: leave"
        in outcome.err
    )


def test_padding_before_crops_is_for_images_in_a_folder_with_an_at_sign(workplace, capsys):
    for place in ("train/a", "train/b", "test/a", "test/b"):
        save_image(workplace / "plain@4" / place / "0.png", random_image(0, 8, 8))
    words = "digits_resnet8 out --noise 0.25 --crop-padding 1 --epochs 1 --device cpu"
    assert call(capsys, "train", "imagefolder:plain@4", *words.split()).code == 0
    assert read(workplace / "out")["recipe"]["crop_padding"] == 1
