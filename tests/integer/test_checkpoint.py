"""A damaged checkpoint of integers is refused by one line; nothing that it says takes memory or
shows a traceback.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smoothadv.checkpoints import load_classifier, save_checkpoint
from support import refusals
from support.integers import grey_images, quantized, with_entrance

CLASSES = [str(digit) for digit in range(10)]


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """A checkpoint of a network for digits: 1 convolution, 2 total, 3 rescaling, 4 convolution
    (logits).
    """
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 10),
    )
    network = quantized(with_entrance(nn.Sequential(*layers), 1), grey_images(8, (1, 8, 8)))
    record, tensors = network.stored()
    return {
        **{"epoch": 1, "arch": "integer:none", "input_layer": "normalize", "classes": CLASSES},
        **{"image_shape": [1, 8, 8], "integer": record, "state_dict": tensors},
    }


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Puts ``value`` at a place in a checkpoint; removes what is there where it is None."""

    def damage(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        if value is None:
            del content[path[-1]]
        else:
            content[path[-1]] = value

    return damage


def step(number: int, part: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return at("integer", "steps", number - 1, part, value=value)


def tensor(name: str, value: torch.Tensor | None) -> Callable[[dict[str, Any]], None]:
    return at("state_dict", name, value=value)


def without_fields(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: (
        [content.pop(name) for name in ("classes", "image_shape")] and content.update(changes)
    )


def nine_logits(content: dict[str, Any]) -> None:
    del content["classes"]
    for name in ("4.weight", "4.bias", "4.multiplier"):
        content["state_dict"][name] = content["state_dict"][name][:9].clone()


NAN, NEXT_TO_1 = float("nan"), torch.full((4, 1, 3, 3), 1 - 1e-10, dtype=torch.float64)
DAMAGES = {
    "definition 1": (at("integer", "definition", value=1), "definition 1"),
    "no definition": (at("integer", "definition", value=None), "definition None"),
    "definition of text": (at("integer", "definition", value="1"), "definition '1'"),
    "no clip": (at("integer", "clip", value=None), "clip"),
    "clip of a fraction": (at("integer", "clip", value=1.5), "clip 1.5"),
    "negative clip": (at("integer", "clip", value=-1), "clip -1"),
    "huge clip": (at("integer", "clip", value=2**60), "clip"),
    "no probe": (at("integer", "probe", value=None), "probe"),
    "no steps": (at("integer", "steps", value=[]), "0 steps"),
    "steps that are a number": (at("integer", "steps", value=7), "damaged"),
    "record that is a list": (at("integer", value=[1]), "its integer is [1], expected a dict"),
    "unknown layer": (step(1, 0, "winograd"), "'winograd'"),
    "layer that is a list": (step(1, 0, ["sum"]), "damaged"),
    "unknown setting": (step(1, 2, {"strides": 1}), "strides"),
    "setting of text": (step(1, 2, {"stride": "11"}), "stride is '11'"),
    "setting of three": (step(1, 2, {"stride": [1, 1, 1]}), "stride is (1, 1, 1)"),
    "stride of 0": (step(1, 2, {"high": 255, "stride": [0, 0]}), "stride is (0, 0)"),
    "stride of truth": (
        step(1, 2, {"high": 255, "stride": [True, True]}),
        "stride is (True, True)",
    ),
    "kernel of half a map": (step(2, 2, {"kernel": [4, 4]}), "maps of (8, 8), expected (4, 4)"),
    "negative padding": (step(1, 2, {"high": 255, "padding": [-1, -1]}), "padding is (-1, -1)"),
    "huge padding": (
        step(1, 2, {"high": 255, "padding": [10**9, 1]}),
        "padding is (1000000000, 1)",
    ),
    "huge kernel": (step(2, 2, {"kernel": [2**40, 1]}), "kernel is"),
    "no groups": (step(1, 2, {"high": 255, "groups": 0}), "groups is 0"),
    "value that does not exist": (step(1, 1, [-1]), "reads the values (-1,)"),
    "value of text": (step(1, 1, ["0"]), "reads the values"),
    "values that are a number": (step(1, 1, 3), "damaged"),
    "missing tensor": (tensor("1.bias", None), "Convolution has"),
    "missing mean": (tensor("mean", None), "mean"),
    "further tensor": (tensor("1.scale", torch.ones(1)), "scale"),
    "tensor of no step": (tensor("77.bias", torch.ones(1)), "step 77"),
    "flat weight": (tensor("1.weight", torch.ones(4)), "weight has the shape [4], expected four"),
    "weight that is a number": (tensor("1.weight", torch.tensor(1)), "weight has the shape []"),
    "weight of other channels": (
        tensor("1.weight", torch.ones(4, 3, 3, 3)),
        "weight has the shape [4, 3, 3, 3], expected the second size 1 / 1",
    ),
    "weight of groups of another size": (
        step(4, 2, {"groups": 2}),
        "weight has the shape [10, 4, 1, 1], expected the second size 4 / 2",
    ),
    "empty weight": (tensor("1.weight", torch.ones(0, 1, 3, 3)), "the shape [0, 1, 3, 3]"),
    "weight of fractions": (
        tensor("1.weight", torch.full((4, 1, 3, 3), 0.5)),
        "weight holds other numbers",
    ),
    "weight of NaN": (
        tensor("1.weight", torch.full((4, 1, 3, 3), NAN)),
        "weight holds other numbers",
    ),
    "weight of 2^24": (
        tensor("1.weight", torch.full((4, 1, 3, 3), 2**24)),
        "weight holds other numbers",
    ),
    "weight next to 1": (tensor("1.weight", NEXT_TO_1), "weight holds other numbers"),
    "complex weight": (tensor("1.weight", torch.full((4, 1, 3, 3), 1 + 1j)), "damaged"),
    "multiplier in float64": (
        tensor("4.multiplier", torch.full((10,), 0.5).double()),
        "multiplier holds other numbers",
    ),
    "logits times .3": (tensor("4.multiplier", torch.full((10,), 0.3)), "no power of 2"),
    "logits times 0": (tensor("4.multiplier", torch.zeros(10)), "no power of 2"),
    "logits times -1": (tensor("4.multiplier", torch.full((10,), -1.0)), "no power of 2"),
    "logits times 3, one of them": (
        tensor("4.multiplier", torch.tensor([1.0] * 9 + [3.0])),
        "no power of 2",
    ),
    "logits times 2^-127": (tensor("4.multiplier", torch.full((10,), 2.0**-127)), "no power of 2"),
    "logits times 1e-45": (tensor("4.multiplier", torch.full((10,), 1e-45)), "no power of 2"),
    "logits times 2^24": (
        tensor("4.multiplier", torch.full((10,), 2.0**24)),
        "multiplier holds other numbers",
    ),
    "multiplier of NaN": (
        tensor("1.multiplier", torch.full((4,), NAN)),
        "multiplier holds other numbers",
    ),
    "multipliers of a rescaling": (
        tensor("3.multiplier", torch.ones(2)),
        "Rescaling: multiplier has the shape [2], expected [1]",
    ),
    "multiplier of a rescaling, of two sizes": (tensor("3.multiplier", torch.ones(1, 1)), "[1, 1]"),
    "multiplier of all channels": (
        tensor("1.multiplier", torch.ones(1)),
        "multiplier has the shape [1], expected [4]",
    ),
    "multipliers of two sizes": (tensor("1.multiplier", torch.ones(4, 1)), "shape [4, 1]"),
    "bias of other channels": (tensor("1.bias", torch.ones(3)), "shape [3], expected [4]"),
    "bias of all channels": (tensor("1.bias", torch.ones(1)), "shape [1], expected [4]"),
    "biases of two sizes": (tensor("1.bias", torch.ones(4, 1)), "shape [4, 1], expected [4]"),
    "bias that is a number": (tensor("1.bias", torch.tensor(1)), "shape [], expected [4]"),
    "mean of fractions": (tensor("mean", torch.tensor([0.5])), "mean"),
    "mean of NaN": (tensor("mean", torch.tensor([NAN])), "mean"),
    "mean of the least integer": (
        tensor("mean", torch.tensor([-(2**15)], dtype=torch.int16)),
        "mean",
    ),
    "mean of the least long integer": (tensor("mean", torch.tensor([-(2**63)])), "mean"),
    "mean of 256": (tensor("mean", torch.tensor([256])), "mean"),
    "mean of -256": (tensor("mean", torch.tensor([-256])), "mean"),
    "complex mean": (tensor("mean", torch.tensor([1 + 1j])), "mean"),
    "mean of 3 channels": (
        tensor("mean", torch.zeros(3, dtype=torch.int16)),
        "mean, of shape [3], is no grey level for each of 1 channels",
    ),
    "images of another shape": (at("image_shape", value=[1, 16, 16]), "image_shape"),
    "no shape, other images": (without_fields(), "damaged", "cifar10"),
    "nine logits for ten classes": (nine_logits, "it has 9 logits, expected 10"),
    "nine classes": (tensor("4.weight", torch.ones(9, 4, 1, 1)), "shape [10], expected [9]"),
}


@pytest.mark.parametrize("case", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint_is_refused_by_one_line(content, tmp_path, case):
    damage, words, *dataset = case
    damaged, path = copy.deepcopy(content), tmp_path / "integers.pth.tar"
    damage(damaged)
    torch.save(damaged, path)
    assert words in refusals.refusal(load_classifier, path, *(dataset or ["digits"]), names=path)


@pytest.mark.parametrize(
    ("mean", "multiplier"),
    [(None, None), (-255, 2.0**-126), (255, 2.0**23)],
    ids=["usual", "least", "largest"],
)
def test_undamaged_checkpoint_is_read(content, tmp_path, mean, multiplier):
    content = copy.deepcopy(content)
    for name, value in (("mean", mean), ("4.multiplier", multiplier)) if mean else ():
        content["state_dict"][name].fill_(value)
    save_checkpoint(tmp_path / "integers.pth.tar", content)
    stored = torch.load(tmp_path / "integers.pth.tar", weights_only=True)
    assert stored["integer"] == content["integer"]
    network = load_classifier(tmp_path / "integers.pth.tar", "digits")
    assert network.stored()[0] == content["integer"]
    with pytest.raises(ValueError, match="of another integer network"):
        network.set_extra_state(network.get_extra_state() + " ")
    assert {name: tensor.dtype for name, tensor in network.stored()[1].items()} == {
        name: tensor.dtype for name, tensor in content["state_dict"].items()
    }
