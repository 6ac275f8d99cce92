"""Checkpoints: the released files give the released models' logits, and our own come back as they
were saved.

A missing, damaged, dangerous or unsuitable file gives an error of one line; a failed save loses
nothing.
"""

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet50

import smoothadv
from smoothadv.architectures import get_architecture
from smoothadv.base.errors import UserError
from smoothadv.base.files import file_digest
from smoothadv.checkpoints import load_classifier, save_checkpoint
from smoothadv.datasets import CIFAR_TRAINING, DatasetDescription
from smoothadv.objectives.gaussian import Gaussian
from support import refusals, released
from support.released import InputLayer, blocky_images, cifar_classifier, save_released_checkpoint
from support.traps import Trap


@torch.inference_mode()
def logits_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return model(images)


def assert_same_classifier(
    ours: nn.Module, released: nn.Module, images: torch.Tensor, unlike: nn.Module
) -> None:
    """Equal logits to 1e-4, on images for which the logits of ``unlike`` differ by a hundred times
    more.
    """
    expected = logits_of(released, images)
    assert (logits_of(unlike, images) - expected).abs().max() > 1e-2
    assert (expected - expected[0]).abs().max() > 1e-2  # and the logits differ between images
    torch.testing.assert_close(logits_of(ours, images), expected, rtol=0, atol=1e-4)
    assert not any(module.training for module in ours.modules())


RELEASED = {
    "today's format": ("cifar_resnet110", 110, "cifar10", "normalize", True, ""),
    "the published files' format": ("cifar_resnet110", 110, "cifar10", "center", False, ""),
    "a shallow network": ("cifar_resnet20", 20, "cifar10", "center", True, ""),
    "1,000 classes": ("imagenet32_resnet110", 110, "imagenet32", "normalize", False, ""),
    "a DataParallel around the input layer": (
        "cifar_resnet20",
        20,
        "cifar10",
        "normalize",
        True,
        "module.",
    ),
}


@pytest.mark.parametrize(
    ("arch", "depth", "dataset", "input_layer", "zipped", "prefix"), RELEASED.values(), ids=RELEASED
)
def test_released_checkpoint_gives_the_released_logits(
    tmp_path, arch, depth, dataset, input_layer, zipped, prefix
):
    classes, path = 1000 if dataset == "imagenet32" else 10, tmp_path / "checkpoint.pth.tar"
    released = cifar_classifier(depth, classes, input_layer)
    save_released_checkpoint(path, released, arch, zipped)
    content = torch.load(path, weights_only=True)
    state = {prefix + key: value for key, value in content["state_dict"].items()}
    if prefix:
        torch.save({**content, "state_dict": state}, path)
    other = cifar_classifier(
        depth, classes, "center" if input_layer == "normalize" else "normalize"
    )
    ours = load_classifier(path, dataset, input_layer)
    assert_same_classifier(ours, released, blocky_images(4), other)


def imagenet_classifier(input_layer: str) -> nn.Sequential:
    """The released ImageNet form: the input layer, then torchvision's ResNet-50, named as in a
    DataParallel, which itself would move it to a GPU.
    """
    torch.manual_seed(0)
    first = InputLayer(input_layer, released.IMAGENET_MEAN, released.IMAGENET_STD)
    model = nn.Sequential(first, nn.Sequential(OrderedDict(module=resnet50())))
    released.randomise_batch_norms(model)
    return model.eval()


def test_released_imagenet_checkpoint_gives_the_released_logits_and_ours_has_its_keys(tmp_path):
    path, released = tmp_path / "checkpoint.pth.tar", imagenet_classifier("center")
    assert len(released.state_dict()) == 320 and "1.module.fc.bias" in released.state_dict()
    save_released_checkpoint(path, released, "resnet50", momentum=False)
    ours = load_classifier(path, "imagenet", "center")
    assert_same_classifier(
        ours, released, blocky_images(2, side=64), imagenet_classifier("normalize")
    )
    before = ours.state_dict()
    own_checkpoint(path, ours, arch="resnet50", mean=None, std=None)
    assert "1.fc.bias" in ours.state_dict(), "saving changes nothing of what it was given"
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved.keys() == released.state_dict().keys()
    loaded = load_classifier(path, "imagenet").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in before.items())
    path.unlink()  # 100 MB


def test_released_checkpoint_needs_an_input_layer_and_the_error_says_how_to_choose(tmp_path):
    path = save_released_checkpoint(
        tmp_path / "file", cifar_classifier(20, 10, "center"), "cifar_resnet20"
    )
    message = refusals.refusal(load_classifier, path, "cifar10", names=path)
    assert "--input-layer" in message
    # The mapping that the authors published.
    center, normalize = message.split("but those", 1)
    assert all(word in center for word in ("'center'", "imagenet/", "cifar10/"))
    of_others = "'normalize' imagenet32/ cifar10/finetune_cifar_from_imagenetPGD2steps/"
    assert all(word in normalize for word in [*of_others.split(), "cifar10/self_training/"])


def own_checkpoint(path, model: nn.Module, **recorded):
    """Save a model as training does: with the released entries and those that only smoothadv
    records.
    """
    content = {
        "epoch": 3,
        "arch": "cifar_resnet20",
        "state_dict": model.state_dict(),
        "optimizer": {},
        "input_layer": "center",
        "mean": list(released.CIFAR_MEAN),
        "std": list(released.CIFAR_STD),
        **recorded,
    }
    save_checkpoint(path, content)
    return path


def trained_looking(arch: str, description, input_layer: str) -> nn.Module:
    torch.manual_seed(3)
    model = get_architecture(arch, description, input_layer)
    released.randomise_batch_norms(model)
    return model.eval()


WITHOUT_CONSTANTS = DatasetDescription(
    "imagefolder:tests only", tuple("0123456789"), (3, 32, 32), None, None, CIFAR_TRAINING
)


@pytest.mark.parametrize("input_layer", ["normalize", "center"])
@pytest.mark.parametrize("asked", [None, "the same"])
@pytest.mark.parametrize("dataset", ["cifar10", WITHOUT_CONSTANTS], ids=["cifar10", "others"])
def test_own_checkpoint_comes_back_with_its_input_layer_and_constants(
    tmp_path, input_layer, asked, dataset
):
    model = trained_looking("cifar_resnet20", "cifar10", input_layer)
    path = own_checkpoint(tmp_path / "run" / "checkpoint.pth.tar", model, input_layer=input_layer)
    loaded = load_classifier(path, dataset, asked and input_layer)
    assert torch.equal(logits_of(loaded, blocky_images(4)), logits_of(model, blocky_images(4)))


def test_recorded_constants_win_over_the_datasets(tmp_path):
    mean, std = (0.3, 0.4, 0.6), (0.5, 0.25, 0.125)
    model = trained_looking("cifar_resnet20", "cifar10", "normalize")
    path = own_checkpoint(
        tmp_path / "file", model, input_layer="normalize", mean=list(mean), std=list(std)
    )
    images = blocky_images(4)
    centered = images - torch.tensor(mean).reshape(3, 1, 1)
    expected = logits_of(model[1], centered / torch.tensor(std).reshape(3, 1, 1))
    assert (logits_of(model, images) - expected).abs().max() > 1e-2
    torch.testing.assert_close(
        logits_of(load_classifier(path, "cifar10"), images), expected, rtol=0, atol=1e-4
    )


def test_released_checkpoint_cannot_do_without_the_datasets_constants(tmp_path):
    path = save_released_checkpoint(
        tmp_path / "file", cifar_classifier(20, 10, "center"), "cifar_resnet20"
    )
    without, words = WITHOUT_CONSTANTS, "imagefolder:tests only"
    assert "train" in refusals.refusal(load_classifier, path, without, "center", names=words)


ADVICE = ("weights_only", "torch.load", "Re-running", "safe_globals")


def refusal(path, dataset: str = "cifar10") -> str:
    return refusals.refusal(load_classifier, path, dataset, "center", names=path)


def small_checkpoint(path, zipped: bool = True, **changes):
    """A released checkpoint of a ResNet-20 for CIFAR-10, with the given entries replaced."""
    save_released_checkpoint(path, cifar_classifier(20, 10, "center"), "cifar_resnet20", zipped)
    if changes:
        torch.save({**torch.load(path, weights_only=True), **changes}, path)
    return path


def test_missing_file_or_folder_is_named(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nothing.pth.tar")
    assert str(tmp_path / "checkpoint.pth.tar") in refusal(tmp_path), "the file that is meant"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"epoch\ttime\tlr\n0\t1.5\t0.1\n" * 10,
        bytes(range(256)) * 10,
        b"<!DOCTYPE html>\n<html>\n<body>404</body>\n</html>\n",  # of a failed download
        pickle.dumps({"a": 1}),
        pickle.dumps(UserError("x")),
        pickle.dumps({"epoch": 1, "mean": np.float64}),
        b"PK\3\4",
        b"\x80\x02}",
    ],
    ids=repr,
)
def test_file_that_is_no_checkpoint_is_told_without_advice_of_pytorch(tmp_path, content):
    path = tmp_path / "checkpoint.pth.tar"
    path.write_bytes(content)
    message = refusal(path)
    assert not any(word in message for word in ADVICE), message


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_truncated_file(tmp_path, zipped, share):
    path = small_checkpoint(tmp_path / "checkpoint.pth.tar", zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "damaged" in refusal(path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", [os.system, eval, exec])
def test_what_a_checkpoint_would_run_is_not_run(tmp_path, zipped, function):
    path, sprung = tmp_path / "checkpoint.pth.tar", tmp_path / "sprung"
    content = torch.load(small_checkpoint(path), weights_only=True)
    content |= {"history": [Trap(sprung, function)]}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    if function is os.system:
        message = refusal(path)
        assert message.endswith("(it asks to load posix.system)")
        assert not any(word in message for word in ADVICE), message
    else:
        assert load_classifier(path, "cifar10", "center")
    assert not sprung.exists()
    # The file is no dud: loading it without the precaution runs the command.
    torch.load(path, weights_only=False)
    assert sprung.exists()


@pytest.mark.parametrize(
    "content",
    [{"net": {}, "epoch": 1}, [1, 2], torch.zeros(3), {}],
    ids=["MACER's", "list", "tensor", "nothing"],
)
def test_something_else_saved_by_torch(tmp_path, content):
    torch.save(content, tmp_path / "checkpoint.pth.tar")
    assert "arch" in refusal(tmp_path / "checkpoint.pth.tar").partition("lacks")[2]


@pytest.mark.parametrize(
    ("changes", "dataset", "words"),
    [
        (
            {"state_dict": cifar_classifier(26, 10, "center").state_dict()},
            "cifar10",
            ["36 unknown"],
        ),
        # ResNet-110 has 3 x 15 blocks more, of 12 entries each.
        ({"arch": "cifar_resnet110"}, "cifar10", ["not a cifar_resnet110", "540 weights missing"]),
        ({"arch": "wide_resnet"}, "cifar10", ["'wide_resnet'", "cifar_resnet110"]),
        ({}, "imagenet32", ["1000 classes", "fc.weight", "[10, 64]"]),
        ({}, "digits", ["1x8x8", "conv1.weight", "[16, 3, 3, 3]"]),
        ({"input_layer": "center", "mean": [0.5] * 3, "std": [0.5] * 3}, "digits", ["mean of 3"]),
        # The weights would fit: the classes are only in another order, and the network takes
        # images of any size.
        ({"classes": ["cat", "dog"]}, "cifar10", ["classes", "cat, dog", "cifar10"]),
        ({"image_shape": [3, 16, 16]}, "cifar10", ["image_shape", "3, 16, 16", "cifar10"]),
    ],
)
def test_checkpoint_of_other_networks_or_images_is_refused_with_what_differs(
    tmp_path, changes, dataset, words
):
    message = refusal(small_checkpoint(tmp_path / "checkpoint.pth.tar", **changes), dataset)
    assert all(word in message for word in words)


def test_save_of_something_unsavable_leaves_the_old_file(tmp_path):
    path = small_checkpoint(tmp_path / "checkpoint.pth.tar")
    before = path.read_bytes()
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        save_checkpoint(path, {**torch.load(path, weights_only=True), "history": lambda: None})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pth.tar"]


def test_digest_of_a_file_is_its_sha256(tmp_path):
    # FIPS 180-2, appendix B.3: one million times the letter a, which is more than one read.
    (tmp_path / "file").write_bytes(b"a" * 1_000_000)
    assert (
        file_digest(tmp_path / "file")
        == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    )


# Fields that are not as they must be.

WEIGHT = "1.conv1.weight"
SHAPE = (16, 1, 3, 3)


def content_of(**changes: object) -> dict:
    """A checkpoint of a network for digits, as training writes it, with changes; ``weight`` is one
    of its weights.
    """
    weights = dict(get_architecture("digits_resnet8", "digits", "center").state_dict())
    if "weight" in changes:
        weights[WEIGHT] = changes.pop("weight")
    facts = {
        "input_layer": "center",
        "dataset": "digits",
        "image_shape": [1, 8, 8],
        "mean": [0.5],
        "std": [0.5],
    }
    content = {
        "epoch": 1,
        "arch": "digits_resnet8",
        "state_dict": weights,
        "optimizer": {},
        **facts,
        **changes,
    }
    return {name: value for name, value in content.items() if value != "absent"}


FIELDS = {
    **{f"no {name}": ({name: "absent"}, f"lacks {name}") for name in ("epoch", "state_dict")},
    "no arch": ({"arch": "absent"}, "take it with --arch NAME"),
    "weights are None": ({"state_dict": None}, "lacks state_dict"),
    "weights are a tensor": ({"state_dict": torch.zeros(3)}, "its state_dict is tensor([0"),
    "weights are a model": (
        {"state_dict": nn.Linear(1, 1)},
        "its state_dict is a torch.nn.modules.linear.Linear, expected a dict",
    ),
    "a weight is a number": ({"weight": 5}, "expected a dict of tensors"),
    "mean is text": ({"mean": "abc"}, "its mean is 'abc', expected a list of numbers"),
    "means are text": ({"mean": ["a"]}, "its mean is ['a'], expected a list of numbers"),
    "a mean too many": ({"mean": [0.5] * 2}, "a mean of 2 and a std of 1 channels"),
    "many means": ({"mean": ["a"] * 100_001}, "'a', 'a', 'a', ...]"),
    "mean without std": ({"std": "absent"}, "a mean of 1 and a std of 0 channels"),
    "classes are a number": ({"classes": 10}, "its classes is 10, expected a list of texts"),
    "image_shape is a number": ({"image_shape": 8}, "its image_shape is 8, expected a list"),
    "image_shape of two": ({"image_shape": [8, 8]}, "with image_shape [8, 8]"),
    "epoch is a fraction": ({"epoch": 1.5}, "its epoch is 1.5, expected a whole number"),
    "arch is a list": ({"arch": ["digits_resnet8"]}, "its arch is ['digits_resnet8'], expected"),
    "noise is text": ({"noise_sd": "0.25"}, "its noise_sd is '0.25', expected a number"),
    "recipe is a list": ({"recipe": [1]}, "its recipe is [1], expected a dict"),
    "sparse": ({"weight": torch.zeros(SHAPE).to_sparse()}, "is not a digits_resnet8"),
    "without memory": ({"weight": torch.zeros(SHAPE, device="meta")}, "is not a digits_resnet8"),
    "spread over 4 TB": ({"weight": torch.zeros(1).expand(2**40)}, "has shape [1099511627776]"),
    **{
        str(dtype): ({"weight": torch.zeros(SHAPE, dtype=dtype)}, f"{WEIGHT} is of type {dtype}")
        for dtype in (torch.complex64, torch.int8, torch.bool)
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes, words", FIELDS.values(), ids=FIELDS)
def test_field_that_is_not_as_it_must_be_is_named(tmp_path, changes, words):
    torch.save(content_of(**changes), tmp_path / "file")
    message = refusal(tmp_path / "file", "digits")
    assert words in message and message.count(str(tmp_path)) == 1 and len(message) < 600


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_another_precision_are_loaded_and_constants_in_tuples(tmp_path, dtype):
    weight = torch.full(SHAPE, 0.5, dtype=dtype)
    torch.save(content_of(weight=weight, mean=(0.25,), std=(0.5,)), tmp_path / "file")
    assert torch.equal(
        load_classifier(tmp_path / "file", "digits").state_dict()[WEIGHT], torch.full(SHAPE, 0.5)
    )


def train(folder: Path, epochs: int) -> None:
    """Train a small network, for epochs of two steps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 2))
    images = np.random.default_rng(0).random((6, 1, 6, 6), dtype=np.float32)
    options = {"device": "cpu", "quiet": True, "outdir": folder, "epochs": epochs, "batch": 3}
    smoothadv.train(model, images, np.arange(6) % 2, objective=Gaussian(noise_sd=0.25), **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (torch.zeros(2, 1, 3, 2), "has shape [2, 1, 3, 2]"),
        (torch.zeros(2, 1, 3, 3, dtype=torch.complex64), "torch.complex64, expected torch.float32"),
    ],
    ids=["another shape", "complex"],
)
def test_run_with_weights_of_another_network_is_not_resumed(tmp_path, weights, words):
    train(tmp_path, 1)
    path = tmp_path / "checkpoint.pth.tar"
    content = torch.load(path, weights_only=True)
    content["state_dict"]["0.weight"] = weights
    torch.save(content, path)
    assert words in refusals.refusal(train, tmp_path, 2, names=path)
