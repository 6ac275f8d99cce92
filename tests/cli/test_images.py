"""certify images and predict images: the classes of single files, without labels or a log; and
DATASET@SIZE: photographs of several sizes in the commands.
"""

from decimal import ROUND_DOWN, Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import smoothadv
from smoothadv.datasets import get_dataset
from smoothadv.datasets.preparation import Preparation
from smoothadv.datasets.sources import imagenet
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.models.load import loose_images
from smoothadv.records.logs import recorded_settings
from support.commands import call, rows, snapshot, succeed
from support.image_files import random_image, save_image
from support.trainings import read

COUNT = 5
OPTIONS = ("--N", 300, "--device", "cpu")


@pytest.fixture
def pictures(workplace) -> np.ndarray:
    """Digits in a folder and one below it, and as an array; the last one is wider and in colour."""
    levels = (load_digits().images[:COUNT] * 255 / 16).round().astype(np.uint8)
    Path("pictures/more").mkdir(parents=True)
    for number in range(COUNT - 1):
        folder = "pictures" if number < 2 else "pictures/more"
        Image.fromarray(levels[number]).save(f"{folder}/{number}.png")
    wide = Image.fromarray(levels[-1]).resize((24, 16)).convert("RGB")
    wide.save("wide.png")
    Path("pictures/notes.txt").write_text("none of them")
    prepared = Preparation(8, 8).evaluation(wide.convert("L")).numpy()
    return np.concatenate([levels[:-1, None], prepared[None]]).astype(np.float32) / 255


def printed(outcome) -> list[list[str]]:
    assert outcome.code == 0, outcome.err
    return [line.split() for line in outcome.out.splitlines()]


@pytest.mark.parametrize("options", [(), ("--sound",)])
def test_radii_are_those_of_the_arrays_rounded_down(checkpoint, pictures, capsys, options):
    before = snapshot(Path())
    words = ("images", "digits", checkpoint, 0.25, "pictures", "wide.png", *OPTIONS, *options)
    outcome = call(capsys, "certify", *words)
    header, *lines = printed(outcome)
    assert outcome.err.startswith("images of 24x16 pixels in colour became 8x8 in grey: ")
    assert header == ["image", "class", "radius"] and snapshot(Path()) == before
    files = ["0.png", "1.png", "more/2.png", "more/3.png"]
    assert [line[0] for line in lines] == [*(f"pictures/{file}" for file in files), "wide.png"]
    rows = smoothadv.certify(
        checkpoint, pictures, [0] * COUNT, sigma=0.25, n=300, device="cpu", sound=bool(options)
    )
    for (_, name, radius), row in zip(lines, rows.itertuples(), strict=True):
        assert name == ("abstains" if row.predict == -1 else str(row.predict))
        assert Decimal(radius) <= Decimal(row.radius) < Decimal(radius) + Decimal("0.001")
    assert (rows.radius > 0.01).sum() >= 2


@pytest.mark.parametrize("given", [{"resize": 8}, {"local_noise": 0.25}], ids=str)
def test_what_stands_before_a_model_stands_before_it_for_single_images(
    checkpoint, pictures, capsys, given
):
    """In Python, such a setting may be a number."""
    [(name, value)] = given.items()
    option = (f"--{name.replace('_', '-')}", value)
    outcome = call(
        capsys, "certify", "images", "digits", checkpoint, 0.25, "pictures", *OPTIONS, *option
    )
    call_in_python = partial(
        smoothadv.certify, checkpoint, pictures[:-1], sigma=0.25, n=300, device="cpu"
    )
    _, *lines = printed(outcome)
    radii = [Decimal(line[-1]) for line in lines]
    rows = call_in_python(**given)
    assert radii == [Decimal(r).quantize(Decimal("0.001"), ROUND_DOWN) for r in rows.radius]
    assert list(rows.radius) != list(call_in_python().radius)


def test_predictions_have_no_radius_and_abstain(checkpoint, pictures, capsys):
    words = ("images", "digits", checkpoint, 0.25, "pictures", "--device", "cpu")
    header, *lines = printed(call(capsys, "predict", *words, "--N", 300))
    rows = smoothadv.predict(checkpoint, pictures[:-1], [0] * 4, sigma=0.25, n=300, device="cpu")
    assert header == ["image", "class"]
    assert [line[1] for line in lines] == ["abstains" if p < 0 else str(p) for p in rows.predict]
    lines = printed(call(capsys, "predict", *words, "--N", 2))
    assert {line[1] for line in lines[1:]} == {"abstains"}


def test_a_network_by_name_has_its_classes_and_its_preparation(pictures, capsys):
    words = ("images", "imagenet", "torchvision:mobilenet_v3_small", 0.25, "wide.png")
    random = ("--no-pretrained", "--N", 20, "--N0", 2, "--alpha", 0.9, "--batch", 4)
    _, (file, name, *_, radius) = printed(call(capsys, "certify", *words, *random))
    assert file == "wide.png" and not name.isdigit() and float(radius) >= 0


def test_images_are_prepared_as_those_of_the_dataset(checkpoint, pictures, workplace, capsys):
    """The same file in a dataset and alone: what certify and certify images see is equal."""
    Path("folder/a").mkdir(parents=True)
    Path("wide.png").rename("folder/a/wide.png")
    spec = EvaluationSpec(model="m.tar", dataset="imagefolder:folder@8,10,bicubic", sigma=0.25)
    _, images, _ = loose_images(spec, [Path("folder/a/wide.png")])
    assert torch.equal(images[0][0], get_dataset(spec.dataset, "test")[0][0])
    spec = EvaluationSpec(model="m.tar", dataset="imagenet", sigma=0.25)
    _, images, changes = loose_images(spec, [Path("folder/a/wide.png")])
    with Image.open("folder/a/wide.png") as wide:
        expected = Preparation(224).evaluation(wide)
    assert torch.equal(images[0][0], expected.float() / 255)
    assert changes == "images of 24x16 pixels in colour became 224x224 in colour"


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
