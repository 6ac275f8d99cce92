"""Files of weights without a name of their architecture: --arch says it, and the rows are those of
the checkpoint with the same weights.
"""

import warnings
from argparse import Namespace
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.base import plugins
from smoothadv.base.errors import DoubtfulWarning, UserError
from smoothadv.checkpoints import load_classifier
from smoothadv.records.logs import recorded_settings
from support.commands import call, refused, succeed, timeless
from support.trainings import same_state

NUMBERS = ("--N", 100, "--max", 5, "--device", "cpu")
NETWORK = """
from torch import nn
from smoothadv.architectures import ARCHITECTURES

@ARCHITECTURES.register("mine")
def network(images):
    channels, height, width = images.image_shape
    size = channels * height * width
    return nn.Sequential(nn.Flatten(), nn.Linear(size, images.num_classes))
"""
FORMS = {
    "a state_dict": lambda weights: weights,
    "of a DataParallel": lambda weights: {f"module.{k}": v for k, v in weights.items()},
    "of torch.compile": lambda weights: {f"_orig_mod.{k}": v for k, v in weights.items()},
    "of Lightning": lambda weights: {
        "epoch": 3,
        "state_dict": {f"model.{k}": v for k, v in weights.items()},
        "optimizer_states": [{}],
    },
    "MACER's": lambda weights: {"net": weights, "epoch": 3, "optimizer": {"state": {}}},
    "of torch's AveragedModel": lambda weights: {
        "n_averaged": torch.tensor(3),
        **{f"module.{k}": v for k, v in weights.items()},
    },
    "counted by thop": lambda weights: {
        **weights,
        **{k: torch.zeros(1) for k in ("total_ops", "conv1.total_params")},
    },
    "with inert objects": lambda weights: {
        "state_dict": weights,
        "epoch": np.int64(3),
        "best": {"top1": np.float64(0.9), "all": np.ones(3)},
        "args": Namespace(folder=Path("x"), steps=deque([1])),
        "meters": defaultdict(list, {"loss": [np.float32(1)]}),
        "whole": torch.nn.Linear(1, 1),
    },
    "nested": lambda weights: {"model": {"state_dict": weights}, "ema": {"decay": 0.9}},
    "of PyTorch's example": lambda weights: {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": weights,
    },
    "held twice": lambda weights: {f"model.net.{k}": v for k, v in weights.items()},
    "without counts of batches": lambda weights: {
        k: v for k, v in weights.items() if not k.endswith("num_batches_tracked")
    },
    "beside another network": lambda weights: {
        "state_dict": {f"{one}.{k}": v for one in ("model", "ema") for k, v in weights.items()}
    },
    "beside a weight of the loss": lambda weights: {
        "loss.weight": torch.ones(10),
        **{f"net.{k}": v for k, v in weights.items()},
    },
    "with an input layer": lambda weights: {f"1.{k}": v for k, v in weights.items()},
}
CHOSEN = {"beside another network": "state_dict.ema", "beside a weight of the loss": "net"}


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Those of the network in the checkpoint, without its input layer."""
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    return {key.removeprefix("1."): value for key, value in state.items()}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_logits_of_the_checkpoint(checkpoint, weights, tmp_path, form):
    torch.save(FORMS[form](weights), tmp_path / "file")
    ours = load_classifier(
        tmp_path / "file", "digits", "normalize", "digits_resnet8", CHOSEN.get(form)
    )
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(ours(images), load_classifier(checkpoint, "digits")(images))
        other = load_classifier(
            tmp_path / "file", "digits", "none", "digits_resnet8", CHOSEN.get(form)
        )
        assert not torch.equal(other(images), ours(images))


def test_architecture_of_a_plugin_is_taken_where_the_plugin_is_named(workplace, capsys):
    Path("mine.py").write_text(NETWORK)
    state = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).state_dict()
    torch.save(state, "file")
    options = ("--arch", "mine", "--input-layer", "none", "--plugin", "mine.py")
    succeed("certify", "digits", "file", "0.25", "log.tsv", *NUMBERS, *options)
    settings = recorded_settings(Path("log.tsv"))
    assert (settings["arch_given"], settings["input_layer"]) == ("mine", "none")
    outcome = call(capsys, "certify", "verify", "log.tsv")
    assert refused(outcome, "made with mine.py, which is not loaded: add --plugin PATH/mine.py")
    succeed("certify", "verify", "log.tsv", "--plugin", "mine.py")


REFUSED = {
    "no architecture": ("file", (), "take it with --arch NAME"),
    "no input layer": ("file", ("--arch", "digits_resnet8"), "--input-layer. 'normalize' if"),
    "no such architecture": ("file", ("--arch", "no_such"), "unknown architecture 'no_such'"),
    "another one": (
        "file",
        ("--arch", "cifar_resnet20", "--input-layer", "none"),
        "is not a cifar_resnet20",
    ),
    "a recorded one": ("checkpoint", ("--arch", "resnet50"), "'digits_resnet8', not 'resnet50'"),
    "a network by name": ("timm:x", ("--arch", "resnet50"), "--arch is for checkpoints"),
    "a file of code": ("file", ("--arch", "x.py"), "x.py: code comes from plug-ins: register"),
    "a script": ("script.pt", (), "it is TorchScript: load it in a plug-in"),
    "a weight is missing": (
        "less",
        ("--arch", "digits_resnet8", "--input-layer", "none"),
        ": 1 weights missing (fc.bias)",
    ),
    "a pruned network": (
        "pruned",
        ("--arch", "digits_resnet8", "--input-layer", "none"),
        "missing (fc.bias), 1 unknown (fc.weight_mask); it is pruned: call",
    ),
    "a network that normalizes": (
        "normalizing",
        ("--arch", "digits_resnet8", "--input-layer", "none"),
        ": 2 unknown (mean, std); it normalizes by itself",
    ),
    "saved with a protocol": ("protocol", (), "it has a pickle_protocol of its own: save it"),
    "a module": ("module", (), "is a torch.nn.modules.linear.Linear as a whole: save its"),
    "weights of a module": (
        "checkpoint",
        ("--weights", "x"),
        "has no weights 'x'; it has state_dict.1",
    ),
    "of a network by name": ("timm:x", ("--weights", "x"), "--weights is for checkpoints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_to_name(checkpoint, weights, workplace, capsys, case):
    torch.save(weights, "file")
    less = {key: value for key, value in weights.items() if key != "fc.bias"}
    torch.save(less, "less")
    torch.save({**less, "fc.weight_mask": torch.ones(1)}, "pruned")
    torch.save({**weights, "mean": torch.ones(1), "std": torch.ones(1)}, "normalizing")
    torch.save(torch.nn.Linear(1, 1), "module")
    torch.save(weights, "protocol", pickle_protocol=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "script.pt")
    model, options, words = REFUSED[case]
    model = checkpoint if model == "checkpoint" else model
    outcome = call(capsys, "certify", "digits", model, "0.25", "log.tsv", *NUMBERS, *options)
    assert refused(outcome, words, code=outcome.code)
    assert not Path("log.tsv").exists()


NOT_GUESSED = {
    "two states": (lambda w: {"last": w, "ema": {"shadow": w}}, "chooses, of last, ema.shadow"),
    "two networks in one state": (
        lambda w: {f"{name}.{k}": v for name in ("student", "teacher") for k, v in w.items()},
        r"56 weights missing \(bn1.bias, .*student.bn1.bias, .*--weights KEY of",
    ),
    "a network in a dict": (
        lambda w: {"net": torch.nn.Linear(1, 1), "acc": 0.9},
        "lacks a dict of named tensors; .* it has net: a torch.nn.modules.linear.Linear, acc",
    ),
    "arrays of NumPy": (
        lambda w: {"fc.bias": np.ones(10)},
        "lacks a dict of named tensors; .* it has fc.bias: a numpy",
    ),
    "another number of classes": (
        lambda w: {**w, "fc.bias": torch.ones(3)},
        r"\): fc.bias has shape \[3\], expected \[10\]",
    ),
    "parametrized weights": (
        lambda w: {**w, "fc.weight_g": torch.ones(10, 1)},
        "1 unknown .*; its weights are parametrized: remove that",
    ),
    "a network and its wrapped copy": (
        lambda w: {**w, **{f"module.{k}": v for k, v in w.items()}},
        "is not a digits_resnet8",
    ),
    "keys of numbers": (lambda w: dict(enumerate(w.values())), "lacks a dict of named tensors"),
    "another recorded architecture": (
        lambda w: {"epoch": 1, "arch": "cifar_resnet20", "state_dict": w},
        "of architecture 'cifar_resnet20', not 'digits_resnet8'",
    ),
    "other recorded images": (
        lambda w: {"epoch": 1, "arch": "mine", "state_dict": w, "image_shape": [3, 8, 8]},
        "trained with image_shape",
    ),
    "another recorded input layer": (
        lambda w: {"state_dict": w, "input_layer": "center"},
        "trained with input layer 'center'",
    ),
    "a denoiser": (lambda w: {"state_dict": w, "denoiser": True}, "is a denoiser"),
}


@pytest.mark.parametrize("case", NOT_GUESSED)
def test_what_is_recorded_or_ambiguous_is_not_guessed(weights, tmp_path, case):
    content, words = NOT_GUESSED[case]
    torch.save(content(weights), tmp_path / "file")
    with pytest.raises(UserError, match=words):
        load_classifier(tmp_path / "file", "digits", "normalize", "digits_resnet8")


def test_one_of_several_sets_of_weights_has_the_rows_of_the_checkpoint(
    checkpoint, weights, workplace
):
    other = {key: value * 2 for key, value in weights.items()}
    torch.save({"state_dict": other, "ema": {"shadow": weights}}, "file")
    options = ("--arch", "digits_resnet8", "--input-layer", "normalize", "--weights", "ema.shadow")
    succeed("certify", "digits", checkpoint, "0.25", "checkpoint.tsv", *NUMBERS)
    succeed("certify", "digits", "file", "0.25", "log.tsv", *NUMBERS, *options)
    assert timeless(Path("log.tsv")) == timeless(Path("checkpoint.tsv"))
    assert recorded_settings(Path("log.tsv"))["weights_given"] == "ema.shadow"
    succeed("certify", "verify", "log.tsv")
    for folder, start in (("one", [checkpoint]), ("two", ["file", *options[-2:]])):
        succeed(
            *f"train digits digits_resnet8 {folder} --noise 0.25 --epochs 1 --device cpu".split(),
            *("--steps-per-epoch", 1, "--input-layer", "normalize", "--pretrained-model", *start),
        )
    assert same_state(Path("one"), Path("two"))
    with pytest.warns(DoubtfulWarning, match="state_dict is taken: --weights KEY .*, ema.shadow"):
        loaded = load_classifier("file", "digits", "normalize", "digits_resnet8")
    assert torch.equal(loaded.state_dict()["1.fc.bias"], other["fc.bias"])


def test_network_with_a_part_called_module_keeps_its_keys(workplace):
    parts = "__import__('collections').OrderedDict(flat=nn.Flatten(), module=nn.Linear(64, 10))"
    Path("mine.py").write_text(
        NETWORK.replace("nn.Flatten(), nn.Linear(size, images.num_classes)", parts)
    )
    plugins.load("mine.py")
    weights = {"module.weight": torch.rand(10, 64), "module.bias": torch.rand(10)}
    torch.save(weights, "file")
    loaded = load_classifier("file", "digits", "none", "mine").state_dict()
    assert torch.equal(loaded["1.module.weight"], weights["module.weight"])
