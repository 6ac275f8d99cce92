"""A checkpoint whose fields are not as they must be is refused in one line, and takes no memory to
speak of.
"""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import smoothadv
from smoothadv.architectures import get_architecture
from smoothadv.base.errors import UserError
from smoothadv.checkpoints import load_classifier
from smoothadv.objectives.gaussian import Gaussian
from support import refusals
from support.traps import Trap

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


def refusal(path: Path) -> str:
    message = refusals.refusal(load_classifier, path, "digits", "center", names=path)
    assert message.count(str(path)) == 1 and len(message) < 600
    return message


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
    assert words in refusal(tmp_path / "file")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_another_precision_are_loaded_and_constants_in_tuples(tmp_path, dtype):
    weight = torch.full(SHAPE, 0.5, dtype=dtype)
    torch.save(content_of(weight=weight, mean=(0.25,), std=(0.5,)), tmp_path / "file")
    assert torch.equal(
        load_classifier(tmp_path / "file", "digits").state_dict()[WEIGHT], torch.full(SHAPE, 0.5)
    )


def test_what_cannot_be_read_is_told_without_advice_of_pytorch(tmp_path):
    path = tmp_path / "file"
    for content in (pickle.dumps({"epoch": 1, "mean": np.float64}), b"PK\3\4", b"\x80\x02}", None):
        torch.save({"epoch": Trap(path)}, path) if content is None else path.write_bytes(content)
        message = refusal(path)
        assert not any(
            word in message for word in ("weights_only", "torch.load", "Re-running", "safe_globals")
        )
        assert "damaged or no PyTorch checkpoint" in message
    assert message.endswith("(it asks to load posix.system)")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder in which a small network was trained for one epoch of two steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, 1)
    return folder


def train(folder: Path, epochs: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 2))
    images = np.random.default_rng(0).random((6, 1, 6, 6), dtype=np.float32)
    options = {
        "objective": Gaussian(noise_sd=0.25),
        "device": "cpu",
        "quiet": True,
        "outdir": folder,
    }
    smoothadv.train(
        model, images, np.arange(6) % 2, schedule={"epochs": epochs, "batch": 3}, **options
    )


MOMENTUM = torch.zeros(2, 1, 3, 3)
RESUMED = {
    "weights of another shape": ({"0.weight": torch.zeros(2, 1, 3, 2)}, "has shape [2, 1, 3, 2]"),
    "complex weights": (
        {"0.weight": MOMENTUM.to(torch.complex64)},
        "torch.complex64, expected torch.float32",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes, words", RESUMED.values(), ids=RESUMED)
def test_run_with_weights_of_another_network_is_not_resumed(run, tmp_path, changes, words):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    content = torch.load(folder / "checkpoint.pth.tar", weights_only=True)
    content["state_dict"] |= changes
    torch.save(content, folder / "checkpoint.pth.tar")
    with pytest.raises(UserError) as error:
        train(folder, 2)
    message = str(error.value)
    assert words in message and str(folder / "checkpoint.pth.tar") in message
