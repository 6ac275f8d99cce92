"""--image-size: photographs of several sizes in the commands, and what these say and record."""

import pytest

from smoothadv.datasets import imagenet
from smoothadv.records.logs import recorded_settings
from support.commands import call, rows, succeed, timeless
from support.image_files import random_image, save_image
from support.weights import read

SMOOTHING = ["--N", "20", "--device", "cpu"]


def test_photographs_are_trained_on_and_certified_after_resizing(workplace, capsys):
    for number in range(12):
        place = f"photos/{'train' if number < 8 else 'test'}/{'ab'[number % 2]}/{number}.png"
        save_image(workplace / place, random_image(number, 20 + number, 40 - number))
    of_training = ["--noise", "0.25", "--epochs", "1", "--batch", "4", "--device", "cpu"]
    photos, model = (
        ["imagefolder:photos", "--image-size", "8,9"],
        ["run/checkpoint.pth.tar", "0.25"],
    )
    trained = call(capsys, "train", photos[0], "digits_resnet8", "run", *photos[1:], *of_training)
    assert trained.code == 0 and " imagefolder:photos@8,9 run/" in trained.out
    assert trained.err.count("radii are those of the resized images") == 1, "once in a process"
    for log, (dataset, *size) in {
        "option.tsv": photos,
        "name.tsv": ["imagefolder:photos@8,9"],
    }.items():
        succeed("certify", dataset, *model, log, "--N0", "10", *SMOOTHING, *size)
        assert recorded_settings(workplace / log)["dataset"] == "imagefolder:photos@8,9"
    assert (
        timeless(workplace / "option.tsv") == timeless(workplace / "name.tsv")
        and len(rows(workplace / log)) == 4
    )
    attack = ["--attack", "PGD", "--epsilon", "0.5", "--num-steps", "1"]
    succeed("predict", photos[0], *model, "p.tsv", *photos[1:], *SMOOTHING)
    succeed("attack", photos[0], *model, "attacked", *photos[1:], *SMOOTHING, *attack)
    succeed("quantize", photos[0], *model, "q.pth.tar", *photos[1:], "--draws", "5")


@pytest.mark.parametrize("dataset", ["imagefolder:photos@8", "imagenet"])
def test_padding_before_crops_is_not_for_photographs(workplace, capsys, monkeypatch, dataset):
    monkeypatch.setattr(imagenet, "_CLASSES", 2)
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
