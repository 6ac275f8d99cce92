"""Networks by name in all commands: trained, certified, predicted, attacked, verified, and in
Python.
"""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import smoothadv
from smoothadv.architectures.libraries import library_network
from smoothadv.base import plugins
from smoothadv.checkpoints import read_checkpoint
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.models.load import load
from smoothadv.models.spec import ModelSpec
from support.commands import call, refused, settings_of, succeed, timeless
from support.image_files import random_image, save_image
from support.named_networks import NAMES, save_folder, save_hf, save_onnx, small_network
from support.optional import needs
from support.trainings import after_update, read, same_state, send

CHEAP = ("--N", 40, "--device", "cpu")
SMOKE = (
    "--noise",
    0.25,
    "--steps-per-epoch",
    2,
    "--batch",
    16,
    "--evaluate-images",
    10,
    "--device",
    "cpu",
)
PLUGIN = """
from torch import nn
from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork

@LIBRARIES.register("mine")
def make(location, pretrained, images):
    channels, classes = (3, 2) if images is None else (images.image_shape[0], images.num_classes)
    return LibraryNetwork(nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, classes)), "1")
"""


@pytest.fixture
def place(workplace: Path) -> Path:
    """A folder with photos/, of two of the classes that the network in hf/ has in another order,
    and nets.py.
    """
    save_folder(workplace / "photos", "cat", "red_flower")
    save_hf(workplace / "hf")
    (workplace / "nets.py").write_text(PLUGIN)
    return workplace


def test_folder_of_transformers_is_certified_under_its_own_classes(place, capsys):
    certify = ("certify", "imagefolder:photos", "hf:hf", 0.25, "log.tsv", *CHEAP)
    outcome = call(capsys, *certify, "--max", 3)
    assert (outcome.code, outcome.err) == (0, "")
    assert [row["label"] for row in timeless(Path("log.tsv"))] == ["2", "2", "1"]
    settings = settings_of("log.tsv")
    assert (settings["arch"], settings["num_classes"], settings["pretrained"]) == ("hf:hf", 3, True)
    assert (
        settings["library"].startswith("transformers ")
        and settings["dataset"] == "imagefolder:photos"
    )
    succeed(*certify)
    assert len(timeless(Path("log.tsv"))) == 4, "the log goes on"
    assert "4 of 4 rows" in call(capsys, "certify", "verify", "log.tsv", "--device", "cpu").out
    save_hf(place / "hf", image_mean=[0.5] * 3, image_std=[0.5] * 3)
    assert refused(call(capsys, *certify), "log.tsv with another model")


def test_one_class_is_for_networks_of_several(place, capsys):
    save_folder(place / "one", "cat")
    assert call(capsys, "certify", "imagefolder:one", "hf:hf", 0.25, "log.tsv", *CHEAP).code == 0
    train = ("train", "imagefolder:one", "torchvision:resnet18", "a", *SMOKE)
    assert refused(call(capsys, *train), "'imagefolder:one' has one class, called 'cat'")
    assert not list(place.glob("a*"))


def test_onnx_is_attacked_without_gradients_and_certified(place, capsys):
    save_onnx(place / "net.onnx", small_network(), torch.rand(4, 3, 8, 8), fixed=True)
    save_folder(place / "three", "0", "1", "2")
    attack = (
        "attack",
        "imagefolder:three",
        "onnx:net.onnx",
        0.25,
        "out",
        *CHEAP,
        "--epsilon",
        0.5,
        "--num-steps",
        2,
    )
    assert refused(call(capsys, *attack), "no gradients", "--gradient stein or hard-stein")
    assert not (place / "out").exists()
    succeed(*attack, "--gradient", "stein")
    certify = ("certify", "imagefolder:three", "onnx:net.onnx", 0.25)
    assert refused(
        call(capsys, *certify, "bf16.tsv", *CHEAP, "--precision", "bf16"), "leave --precision out"
    )
    succeed(*certify, "log.tsv", *CHEAP)
    assert "6 of 6 rows" in call(capsys, "certify", "verify", "log.tsv", "--device", "cpu").out
    assert [row["label"] for row in timeless(Path("log.tsv"))] == list("001122")


def test_random_weights_follow_the_seed_and_say_so(place, capsys):
    logs = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        outcome = call(
            capsys,
            "predict",
            "imagefolder:photos",
            "hf:hf",
            0.25,
            name,
            *CHEAP,
            "--no-pretrained",
            "--seed",
            seed,
        )
        assert outcome.code == 0 and outcome.err.startswith("warning: hf:hf has random weights")
        logs[name] = settings_of(name)["module_sha256"]
    assert (
        logs["one"] == logs["again"] != logs["other"] and settings_of("one")["pretrained"] is False
    )


def test_photographs_are_prepared_as_the_network_expects(place):
    save_hf(place / "hf", size=32, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    for images, prepared in {
        "imagefolder:photos": "imagefolder:photos@32,squash",
        "imagefolder:photos@16": "imagefolder:photos@16",
    }.items():
        spec, base = load(CertifySpec(model="hf:hf", dataset=images, sigma=0.25, log="log.tsv"))
        assert spec.dataset == prepared and len(base.doubts) == (images != prepared)
        assert all(f"radii are about {prepared}" in doubt for doubt in base.doubts)
    network = library_network("hf:hf", True)
    network.module.train()
    module, pixels = network.normalized, torch.rand(2, 3, 8, 8)
    assert not module.training, "dropout and batch statistics never vote"
    expected = network.module.eval()((pixels - 0.5) / 0.5).logits
    torch.testing.assert_close(module(pixels).logits, expected)


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("digits", "hf:hf", 0.25), "no class, or several classes, called '3', '4'", 1),
        (
            ("imagefolder:photos", "hf:hf", 0.25, "--arch", "dncnn"),
            "--arch is for checkpoints: leave it out for hf:hf",
            2,
        ),
        (
            ("imagefolder:photos", "nowhere.pth.tar", 0.25, "--no-pretrained"),
            "is for networks by name",
            2,
        ),
        pytest.param(
            ("imagefolder:photos", "timm:test_resne", 0.25),
            "there is no timm:test_resne (did you mean 'test_resnet'?)",
            1,
            marks=needs("timm"),
        ),
        (
            ("imagefolder:photos", "hf:hf+timm:test_resnet", 0.25),
            "an ensemble is of checkpoints",
            1,
        ),
        (
            ("imagefolder:photos", "nets.py:make", 0.25),
            "nets.py:make: code comes from plug-ins: register the function in nets.py, add --plug",
            2,
        ),
        *(
            (("imagefolder:grey", "torchvision:resnet18", 0.25, *options), "3 channels", 1)
            for options in (["--no-pretrained"], ["--no-pretrained", "--input-layer", "half"])
        ),
    ],
)
def test_what_does_not_fit_is_one_line(place, words, message, code, capsys):
    for digit in range(2):
        save_image(
            place / "grey@224,256" / "test" / str(digit) / "0.png", random_image(digit, 8, 8, 1)
        )
    outcome = call(capsys, "certify", *words[:3], "log.tsv", *CHEAP, *words[3:])
    error = [line for line in outcome.err.splitlines() if not line.startswith("warning: ")]
    assert (
        outcome.code == code
        and len(error) == 1
        and message in error[0]
        and not Path("log.tsv").exists()
    )


def test_finetuning_starts_from_the_library(place, capsys):
    """With its constants; the recipe names the weights, so that a run from others is another
    one.
    """
    save_hf(place / "hf", image_mean=[0.5] * 3, image_std=[0.25] * 3)
    train = (
        "train",
        "imagefolder:photos",
        "hf:hf",
        "run",
        *SMOKE,
        "--pretrained",
        "--recipe",
        "finetune-noise",
    )
    outcome = call(capsys, *train, "--epochs", 1)
    assert outcome.code == 0 and "starting from the weights of hf:hf" in outcome.out
    content = read_checkpoint("run/checkpoint.pth.tar")
    assert (content["mean"], content["std"], content["input_layer"]) == (
        [0.5] * 3,
        [0.25] * 3,
        "normalize",
    )
    assert content["recipe"]["pretrained"] and len(content["recipe"]["pretrained_sha256"]) == 64
    assert content["recipe"]["optimizer"] == "adamw"
    both = ("--pretrained-model", "run/checkpoint.pth.tar")
    assert refused(
        call(capsys, *train[:3], "other", *train[4:], *both), "leave one of them out", code=2
    )
    save_hf(place / "hf", seed=6, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    assert refused(
        call(capsys, *train, "--epochs", 2, "--resume"), "another recipe", "pretrained_sha256 was"
    )


@needs("timm")
def test_layers_of_timm_have_their_own_rates(place, capsys):
    """The last layer that of training, those before it a share; a run goes on with them; other
    networks refuse.
    """
    train = (
        "train",
        "imagefolder:photos",
        "timm:test_resnet",
        "run",
        *SMOKE,
        "--recipe",
        "finetune-noise",
    )
    train = (*train, "--batch", 2, "--lr-schedule", "step")
    for epochs, more in ((1, ()), (2, ("--resume",))):
        assert call(capsys, *train, "--layer-decay", 0.5, "--epochs", epochs, *more).code == 0
        content = read_checkpoint("run/checkpoint.pth.tar")
        groups = content["optimizer"]["param_groups"]
        scales = [group["lr_scale"] for group in groups]
        assert scales[-1] == 1 and sorted(set(scales)) == [
            0.5**k for k in reversed(range(len(set(scales))))
        ]
        assert len(scales) > 3 and [
            number for group in groups for number in group["params"]
        ] == list(range(len(content["optimizer"]["state"])))
        assert [group["lr"] / groups[-1]["lr"] for group in groups] == pytest.approx(scales)
    assert refused(call(capsys, *train, "--epochs", 3, "--resume"), "layer_decay was 0.5")
    succeed("certify", train[1], "run/checkpoint.pth.tar", 0.25, "log.tsv", *CHEAP, "--max", 1)
    other = ("train", "digits", "digits_resnet8", "other", *SMOKE, "--layer-decay", 0.5)
    assert (
        refused(
            call(capsys, *other, "--recipe", "finetune-noise"),
            "needs the layers of a network of timm",
        )
        and not Path("other").exists()
    )
    assert (
        refused(call(capsys, *other), "with --optimizer adamw", code=2)
        and not Path("other").exists()
    )


@needs("timm")
def test_low_rank_changes_are_merged_and_trained_on(place, capsys):
    """A stopped run ends like another one; keys and all layers but the last stay as they were."""
    train = ("train", "digits", "timm:test_vit", "--noise", 0.25, "--device", "cpu")
    train += ("--resize", 160, "--lora", 2, "--batch", 2, "--steps-per-epoch", 2)
    train += ("--evaluate-images", 2)
    with pytest.MonkeyPatch.context() as patch:
        after_update(patch, 3, send)
        assert call(capsys, *train[:3], "run", *train[3:], "--epochs", 2).code == 143
    before = read(Path("run"))["state_dict"]
    assert call(capsys, *train[:3], "run", *train[3:], "--epochs", 2, "--resume").code == 0
    succeed(*train[:3], "whole", *train[3:], "--epochs", 2)
    assert same_state(Path("run"), Path("whole"))
    after = read(Path("whole"))["state_dict"]
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    adapted = {name for name in after if name.endswith("qkv.weight")}
    assert adapted | {"1.head.weight", "1.head.bias"} == changed and len(adapted) == 6
    for name in adapted:
        queries, keys, values = (after[name] - before[name]).chunk(3)
        assert not keys.any()
        for part in (queries, values):
            *_, fifth = torch.linalg.svdvals(part.double())[:5]
            assert part.any() and fifth < 1e-5, "of rank 2 before, and of rank 2 after"
    certify = ("certify", "digits", "whole/checkpoint.pth.tar", 0.25, "log.tsv", *CHEAP)
    assert refused(call(capsys, *certify), "image_shape [1, 160, 160]", "--resize 160")
    outcome = call(capsys, *certify, "--max", 1, "--N0", 10, "--resize", 160)
    assert outcome.code == 0 and "several sets" not in outcome.err


def test_input_layer_takes_the_place_of_that_of_the_library(place, capsys):
    """And a model of larger images sees them resized."""
    save_hf(place / "hf", image_mean=[0.3] * 3, image_std=[0.2] * 3)
    options = "imagefolder:photos", "hf:hf", 0.25, "log.tsv", *CHEAP, "--input-layer", "half"
    assert call(capsys, "certify", *options, "--resize", "10").code == 0
    settings = settings_of("log.tsv")
    assert (settings["input_layer"], settings["resize"]) == ("half", "10:bicubic")
    assert "mean" not in settings
    assert call(capsys, "certify", "verify", "log.tsv", "--rows", 2, "--device", "cpu").code == 0
    given = {"model": "hf:hf", "sigma": 0.25, "input_layer": "half", "resize": "10"}
    images, network = (
        torch.rand(2, 3, 8, 8),
        library_network("hf:hf", pretrained=True).module.eval(),
    )
    with torch.inference_mode():
        larger = torch.nn.functional.interpolate(images, (10, 10), mode="bicubic", antialias=True)
        found = load(ModelSpec(dataset="imagefolder:photos", **given))[1].module(images)
        assert torch.allclose(found, network(2 * larger - 1).logits, atol=1e-5)


def test_denoiser_is_trained_for_a_network_that_knows_more_classes(place, capsys):
    """By stability under the network's own class; accuracies are under the classes of the
    folders.
    """
    save_hf(place / "hf", image_mean=[0.5] * 3, image_std=[0.25] * 3)
    train = (
        "train_denoiser",
        "imagefolder:photos",
        "dncnn",
        "run",
        *SMOKE[:6],
        "--lr",
        1e-9,
        "--epochs",
        1,
    )
    behind = (*train, "--objective", "stability", "--device", "cpu", "--classifier")
    outcome = call(capsys, *behind, "hf:hf")
    assert outcome.code == 0, outcome.err
    network = library_network("hf:hf", pretrained=True).normalized
    images = smoothadv.datasets.get_dataset("imagefolder:photos", "test")
    classes = [NAMES.index(name.replace("_", " ")) for name in images.description.class_names]
    with torch.inference_mode():
        hits = [
            int(network(pixels[None]).logits.argmax()) == classes[label]
            for pixels, label in map(images.__getitem__, range(4))
        ]
    (row,) = csv.DictReader(Path("run/log.txt").open(), delimiter="\t")
    assert float(row["test_clean_accuracy"]) == sum(hits) / 4, (
        "so small a step leaves the denoiser the identity"
    )
    certify = (
        "certify",
        "imagefolder:photos",
        "hf:hf",
        0.25,
        "log.tsv",
        *CHEAP,
        "--denoiser",
        "run/checkpoint.pth.tar",
        "--N0",
        10,
        "--max",
        1,
    )
    assert (
        call(capsys, *certify).code == 0 and settings_of("log.tsv")["denoiser"]["arch"] == "dncnn"
    )
    save_hf(place / "hf", seed=6, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    assert refused(call(capsys, *behind, "hf:hf", "--resume", "--epochs", 2), "teacher_sha256 was")
    save_onnx(place / "net.onnx", small_network(), torch.rand(2, 3, 8, 8))
    for words, message in (
        ("onnx:net.onnx", "has no gradients"),
        ("timm:test_resnet", "cannot be had"),
    ):
        assert (
            refused(call(capsys, *behind[:3], "other", *behind[4:], words), message)
            and not Path("other").exists()
        )


def test_a_library_of_the_user_is_asked_for_where_it_trained_or_certified(place, capsys):
    """A checkpoint is data: it runs no code that the user does not name."""
    plugin = ("--plugin", "nets.py")
    train = ("train", "digits", "mine:net", "run", *SMOKE, "--epochs", 1)
    done = call(capsys, *train, *plugin)
    assert done.code == 0 and "--plugin nets.py" in done.out, done.err
    certify = ("certify", "digits", "run/checkpoint.pth.tar", 0.25, "log.tsv", *CHEAP, "--max", 1)
    assert refused(call(capsys, *certify), "not loaded: add --plugin PATH/nets.py")
    succeed("certify", "imagefolder:photos", "mine:net", 0.25, "named.tsv", *CHEAP, *plugin)
    verify = ("certify", "verify", "named.tsv", "--device", "cpu")
    assert refused(call(capsys, *verify), "made with nets.py, which is not loaded: add --plugin")
    assert "4 of 4 rows" in call(capsys, *verify, *plugin).out
    (place / "elsewhere").mkdir()
    (place / "nets.py").rename(place / "elsewhere/nets.py")
    succeed(*certify, "--plugin", "elsewhere/nets.py")
    for log in ("log.tsv", "named.tsv"):
        assert settings_of(log)["plugins"].keys() == {"nets.py"}


def test_functions_take_networks_by_name(place):
    images, labels = np.random.default_rng(0).random((2, 3, 8, 8), dtype=np.float32), [2, 0]
    rows = smoothadv.certify("hf:hf", images, labels, sigma=0.25, n=100, log="log.tsv")
    assert rows.label.tolist() == labels and settings_of("log.tsv")["num_classes"] == len(NAMES)
    objective = smoothadv.objectives.OBJECTIVES["gaussian"](noise_sd=0.25)
    further = {
        "outdir": "run",
        "schedule": {"epochs": 1, "batch": 2},
        "quiet": True,
        "num_classes": 3,
    }
    plugins.load("nets.py")
    smoothadv.train("mine:net", images, labels, objective=objective, **further)
    assert read_checkpoint("run/checkpoint.pth.tar")["arch"] == "mine:net"
