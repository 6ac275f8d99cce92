"""One certification log of integers, which each engine repeats: float32, bytes, and oneDNN
with the instructions of older processors.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from smoothadv.integer.layers import Convolution
from smoothadv.integer.network import IntegerNetwork, byte_form
from support.commands import call, succeed
from support.integers import needs_bytes


@pytest.fixture(scope="module")
def log(integers, tmp_path_factory) -> Path:
    """Of six digits, by what votes here."""
    path = tmp_path_factory.mktemp("engines") / "log.tsv"
    few = ["--N0", 10, "--N", 50, "--skip", 70, "--device", "cpu"]
    succeed("certify", "digits", integers, 0.25, path, "--sound", *few)
    return path


class Engine(nn.Module):
    """A network of integers whose logits another engine computes; counts the images."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.logits, self.images = logits, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images += len(images)
        return self.logits(images)

    def inexact_layer(self, images: torch.Tensor) -> None:
        return None


def in_bytes(network: IntegerNetwork) -> Callable[[torch.Tensor], torch.Tensor]:
    form = byte_form(network)
    assert form is not None
    return form


def half_a_level_upwards(network: IntegerNetwork) -> IntegerNetwork:
    """In one layer: the only one of these that does not compute the network."""
    wrong = copy.deepcopy(network)
    layer = next(one for one in wrong.layers if isinstance(one, Convolution))
    layer.bias += 0.5 / layer.multiplier
    return wrong


ENGINES = [
    pytest.param(lambda network: network, id="float32"),
    pytest.param(half_a_level_upwards, id="wrong"),
    pytest.param(in_bytes, id="bytes", marks=needs_bytes),
]


@pytest.mark.parametrize("logits_of", ENGINES)
def test_each_engine_repeats_the_log_and_one_that_rounds_otherwise_does_not_vote(
    logits_of, log, capsys, monkeypatch
):
    """Where it does not, float32 votes, and repeats the log."""
    engines, is_wrong = [], logits_of is half_a_level_upwards

    def fast_form(network: IntegerNetwork, device: torch.device) -> Engine:
        engines.append(Engine(logits_of(network)))
        return engines[-1]

    monkeypatch.setattr(IntegerNetwork, "fast_form", fast_form)
    done = call(capsys, "certify", "verify", log, "--rows", 9, "--device", "cpu")
    assert done.code == 0 and "6 of 6 rows" in done.out and "all are equal" in done.out
    assert ("slower ones vote" in done.err) == is_wrong
    assert (engines[0].images < 6 * 60) == is_wrong, "then it was only checked"


@pytest.mark.parametrize("instructions", ["SSE41", "AVX2"])
def test_older_processors_repeat_the_log(instructions, log, warm):
    words = [sys.executable, "-m", "smoothadv", "certify", "verify", str(log), "--rows", "9"]
    process = warm.start(
        words, log.parent, ONEDNN_MAX_CPU_ISA=instructions, ATEN_CPU_CAPABILITY="default"
    )
    said = process.communicate()
    assert process.returncode == 0 and "all are equal" in said[0], said
