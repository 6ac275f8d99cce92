"""Networks of integers vote in bytes where that gives the same integers; else the form in float32 votes."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from smoothadv.architectures import get_architecture
from smoothadv.architectures.integer_layers import Convolution
from smoothadv.architectures.integer_network import IntegerNetwork, Step
from smoothadv.smoothing.classifier import CompiledClassifier, VotingClassifier, arrange
from smoothadv.smoothing.integer_engine import ByteConvolution, fast_form
from smoothadv.smoothing.voting import VoteCounter, check_exact
from support.integers import grey_images, quantized

CPU, SHAPE = torch.device("cpu"), (1, 8, 8)
IMAGES = grey_images(20, SHAPE)
HAS_VNNI = getattr(torch.cpu, "_is_vnni_supported", bool)()
needs_vnni = pytest.mark.skipif(not HAS_VNNI, reason="the engine is for CPUs with AVX-512 VNNI, which this one lacks")


def digits_voter() -> VotingClassifier:
    torch.manual_seed(0)
    return arrange(quantized(get_architecture("digits_resnet8", "digits", "normalize"), IMAGES), CPU)


def choose_form(voter: VotingClassifier) -> None:
    voter.use_fast_form(partial(check_exact, VoteCounter(voter, 10, len(IMAGES), CPU), voter.integers))


class Nothing(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.new_zeros(len(images), 10)


def with_saturation(layer: ByteConvolution, x: torch.Tensor, in_float64: bool = False) -> torch.Tensor:
    exact = Convolution.total(layer, x, in_float64)
    return exact if in_float64 else exact.clamp(max=2**15 - 1)


def with_rounded_large_sums(layer: ByteConvolution, x: torch.Tensor, in_float64: bool = False) -> torch.Tensor:
    """Random integers show it, and images do not."""
    exact = Convolution.total(layer, x, in_float64)
    return exact + (not in_float64 and x.mean() > 100)


def without_operator(layer: ByteConvolution, x: torch.Tensor, in_float64: bool = False) -> torch.Tensor:
    raise RuntimeError("could not create a primitive")


@needs_vnni
def test_voter_chooses_bytes_where_they_are_exact():
    voter = digits_voter()
    choose_form(voter)
    kinds = [type(layer) for layer in voter.fast.layers if hasattr(layer, "weight")]
    assert kinds == [Convolution, *[ByteConvolution] * (len(kinds) - 2), Convolution], (
        "the first and the last read more"
    )


@needs_vnni
@pytest.mark.parametrize("fault", [with_saturation, with_rounded_large_sums, without_operator])
def test_floats_vote_where_bytes_are_not_exact_or_not_there(fault, monkeypatch):
    voter = digits_voter()
    monkeypatch.setattr(ByteConvolution, "total", fault)
    choose_form(voter)
    assert voter.fast is None


@needs_vnni
@pytest.mark.parametrize(("instructions", "is_exact"), [("AVX512_CORE_VNNI", "True"), ("AVX512_CORE", "False")])
def test_kernels_of_an_older_cpu_which_saturate_in_16_bits_are_not_chosen(instructions, is_exact):
    program = (
        "from test_integer_engine import *; voter = digits_voter(); choose_form(voter); print(voter.fast is not None)"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [is_exact]


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fast_form_votes_and_gradients_are_those_of_the_classifier(is_compiled):
    eager = digits_voter()
    voter = CompiledClassifier(eager) if is_compiled else eager
    with torch.inference_mode():
        expected = voter(IMAGES)
        voter.use(Nothing())
        assert not voter(IMAGES).any()
    images = IMAGES.clone().requires_grad_()
    logits = eager(images)
    assert torch.equal(logits, expected) and torch.autograd.grad(logits.square().sum(), images)[0].any()
    voter.use(fast_form(eager.integers, CPU))
    with torch.inference_mode():
        assert torch.equal(voter(IMAGES), expected)


@needs_vnni
@pytest.mark.parametrize(("channels", "weight", "parts"), [(57, 127, 1), (58, 127, 2), (4, 128, 0)])
def test_sums_in_parts_are_bytes_and_wide_weights_are_not(channels, weight, parts):
    """The sums of flat images reach 57 or 58 * 9 * 127 * 255, beside 2^24."""
    tensors = {"weight": torch.full((channels, 1, 1, 1), 256), "multiplier": torch.full((channels,), 2.0**-8)}
    spread = torch.arange(4.0).view(4, 1, 1, 1) + weight - 3
    reading = {"weight": spread.expand(4, channels, 3, 3), "multiplier": torch.full((4,), 2.0**-10)}
    layers = [
        Convolution({"high": 255}, {**tensors, "bias": torch.zeros(channels)}),
        Convolution({"high": 2**15}, {**reading, "bias": torch.tensor([1, -1, 0, 3])}),
        Convolution({}, {"weight": torch.eye(4).view(4, 4, 1, 1), "multiplier": torch.ones(4), "bias": torch.zeros(4)}),
    ]
    network = IntegerNetwork(SHAPE, 0, torch.zeros(1), [Step(*each) for each in zip(layers, [(0,), (1,), (2,)])]).eval()
    form = fast_form(network, CPU)
    if not parts:
        assert form is None
        return
    images = torch.cat([torch.ones(4, *SHAPE), torch.rand(4, *SHAPE)])
    with torch.inference_mode():
        assert torch.equal(form(images), network(images)) and form.layers[1].parts == parts
