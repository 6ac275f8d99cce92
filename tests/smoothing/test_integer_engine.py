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
@pytest.mark.parametrize("fault", [with_saturation, without_operator])
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
@pytest.mark.parametrize(("channels", "weight", "is_byte"), [(57, 127, True), (58, 127, False), (4, 128, False)])
def test_divided_sums_and_wide_weights_stay_in_float32(channels, weight, is_byte):
    def layer(outputs: int, inputs: int, size: int, value: float, **settings: object) -> Step:
        tensors = {"weight": torch.full((outputs, inputs, size, size), value), "bias": torch.zeros(outputs)}
        return Step(Convolution(settings, {**tensors, "multiplier": torch.full((outputs,), 2.0**-8)}), (len(steps),))

    steps: list[Step] = []
    steps.append(layer(channels, 1, 1, 2.0**8, high=255))
    steps.append(layer(4, channels, 3, weight, high=2**15))
    steps.append(layer(10, 4, 6, 1))
    network = IntegerNetwork(SHAPE, 0, torch.zeros(1), steps).eval()
    form = fast_form(network, CPU)
    assert (form is not None) == is_byte and fast_form(network, torch.device("meta")) is None
