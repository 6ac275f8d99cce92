"""quantize from end to end; certificates of integers go on anywhere, and all commands take them."""

from pathlib import Path

import pytest
import torch

import smoothadv
from smoothadv.base.files import reserved
from smoothadv.datasets.images import InMemoryImages
from smoothadv.integer.layers import LayerGraph
from support.attack_runs import SMALL, archive, l2_norms
from support.commands import (
    call,
    manifest_of,
    refused,
    rows,
    succeed,
    timeless,
)
from support.integers import SHORT

SOUND = ("--sound", "--N0", 20, "--N", 200, "--device", "cpu", "--skip", 40)


def test_votes_agree_and_equal_commands_write_equal_integers(
    checkpoint, integers, workplace, capsys
):
    outcome = call(capsys, "quantize", "digits", checkpoint, 0.25, "again.pth.tar", *SHORT)
    assert (
        outcome.code == 0
        and "certified accuracy there" in outcome.out
        and outcome.out.count("float ") == 5
    )
    eight = (*SHORT, "--weight-bits", 8, "--held-out", 100)
    wide = call(capsys, "quantize", "digits", checkpoint, 0.25, "w.pth.tar", *eight)
    shares = [float(one.out.split("% of votes")[0].split()[-1]) for one in (outcome, wide)]
    assert shares[0] >= 98 and shares[1] >= 99
    assert (
        call(
            capsys, "quantize", "digits", checkpoint, 0.25, "seed.pth.tar", *SHORT, "--seed", 5
        ).code
        == 0
    )
    first, again, other = (
        torch.load(path, weights_only=True) for path in (integers, "again.pth.tar", "seed.pth.tar")
    )
    for content in (first, again, other):
        del content["integer"]["made"]
    assert (
        first["integer"] == again["integer"]
        and first["state_dict"].keys() == again["state_dict"].keys()
    )
    assert all(
        torch.equal(value, again["state_dict"][name]) for name, value in first["state_dict"].items()
    )
    assert any(
        not torch.equal(value, other["state_dict"][name])
        for name, value in first["state_dict"].items()
    )


def test_log_goes_on_with_other_threads_and_batch(integers, workplace, capsys):
    """No machine is in the settings, so that any may go on; the rows are those of one undisturbed
    run.
    """

    def certify(log: str, *options: object, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        done = call(capsys, "certify", "digits", integers, 0.25, log, *SOUND, *options)
        assert (done.code, done.err) == (0, "")

    certify("whole.tsv", "--max", 5)
    certify("log.tsv", "--max", 2)
    certify("log.tsv", "--max", 5, threads=2)
    assert timeless(workplace / "log.tsv") == timeless(workplace / "whole.tsv")
    certify("shards.tsv", "--max", 5, "--shard", "0/2", "--batch", 7)
    certify("shards.tsv", "--max", 5, "--shard", "1/2", "--batch", 64)
    succeed("certify", "merge", "shards.tsv")
    assert timeless(workplace / "shards.tsv") == timeless(workplace / "whole.tsv")
    of_machine = {
        "batch",
        "device",
        "torch",
        "threads",
        "cpu_capability",
        "folded",
        "compiled",
        "tf32",
    }
    assert not of_machine & manifest_of(workplace / "log.tsv")["settings"].keys()


@pytest.mark.parametrize("fault", [0, 1])
def test_batch_that_memory_halves_is_checked_again(fault, integers, workplace, capsys, monkeypatch):
    """Its kernels may be others, which may be wrong."""
    command, exact = ("certify", "digits", integers, 0.25), LayerGraph.forward

    def forward(network: LayerGraph, images: torch.Tensor) -> torch.Tensor:
        if len(images) == 64 and Path("log.tsv").exists():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return exact(network, images).roll(fault * (len(images) == 32), 1)

    succeed(*command, "whole.tsv", *SOUND, "--max", 2, "--batch", 64)
    monkeypatch.setattr(LayerGraph, "forward", forward)
    outcome = call(capsys, *command, "log.tsv", *SOUND, "--max", 2, "--batch", 64)
    if fault:
        assert (
            refused(outcome, "choose another --batch than 32")
            and len(Path("log.tsv").read_text().splitlines()) == 1
        )
    else:
        assert outcome.code == 0 and timeless(Path("log.tsv")) == timeless(Path("whole.tsv"))


def test_other_commands_take_integers(checkpoint, integers, workplace, capsys):
    positional = ("digits", integers, 0.25)
    succeed("predict", *positional, "predictions.tsv", "--max", 3, "--N", 50, "--device", "cpu")
    succeed("attack", *positional, "attack", "--epsilon", 0.5, *SMALL)
    assert (l2_norms(archive(Path("attack/epsilon_0.5.tsv"))) > 0.1).any(), (
        "gradients pass through the rounding"
    )
    succeed("certify", *positional, "log.tsv", *SOUND, "--max", 4)
    succeed("certify", "digits", checkpoint, 0.25, "float.tsv", *SOUND, "--max", 4)
    of_float = call(capsys, "attack", *positional, "attack", "--against", "float.tsv", *SMALL[:2])
    assert refused(of_float, "float.tsv certifies something else")
    small = ("--device", "cpu", "--N", 50, "--num-steps", 3, "--num-noise-vec", 2)
    succeed("attack", *positional, "attack", "--against", "log.tsv", *small)
    assert rows(Path("attack/against.tsv")), (
        "some are certified, and no more flip than 0.001 of all runs would show"
    )
    assert "threads" in manifest_of(Path("attack/against.tsv"))["settings"], (
        "gradients are of this machine"
    )
    succeed("analyze", "summary", "log.tsv")
    capsys.readouterr()
    both = call(
        capsys, "certify", "digits", f"{checkpoint}+{integers}", 0.25, "two.tsv", *SOUND, "--max", 2
    )
    assert both.code == 0 and "threads" in manifest_of(Path("two.tsv"))["settings"], (
        "floats are of this machine"
    )
    quick = {
        "sigma": 0.25,
        "n0": 20,
        "n": 200,
        "sound": True,
        "device": "cpu",
        "skip": 40,
        "batch": 13,
    }
    smoothadv.certify(integers, "digits", limit=4, log="function.tsv", **quick)
    assert timeless(Path("function.tsv")) == timeless(Path("log.tsv"))


def test_refusals_are_one_line(checkpoint, integers, workplace, capsys, monkeypatch):
    def quantize(model: Path, *options: object):
        return call(capsys, "quantize", "digits", model, 0.25, "new.pth.tar", *SHORT, *options)

    assert refused(quantize(integers), integers, "of integers already")
    assert refused(quantize(f"{checkpoint}+{integers}"), "ensemble")
    folder = call(capsys, "quantize", "digits", checkpoint, 0.25, workplace)
    assert refused(folder, f"{workplace} is a folder: name the file to write")
    with monkeypatch.context() as patch:
        patch.setattr(InMemoryImages, "__getitem__", lambda *which: (torch.full((1, 8, 8), 0.5), 0))
        assert refused(quantize(checkpoint), "for 8-bit images: example 0 of digits is not of 8")
        patch.setattr(InMemoryImages, "__len__", lambda images: 1)
        assert refused(quantize(checkpoint), "one training image")
    with reserved(Path("new.pth.tar")):
        assert refused(quantize(checkpoint), "new.pth.tar is being written by another process")
    assert list(Path().iterdir()) == []
    Path("new.pth.tar").touch()
    assert refused(quantize(checkpoint), "new.pth.tar exists already: add --overwrite")
    trained = ("digits", "digits_resnet8", "run", "--epochs", 1, "--noise", 0.25, "--device", "cpu")
    assert refused(call(capsys, "train", *trained, "--pretrained-model", integers), integers)
    bf16 = call(
        capsys, "certify", "digits", integers, 0.25, "log.tsv", *SOUND, "--precision", "bf16"
    )
    assert refused(bf16, "--precision") and not Path("log.tsv").exists()
