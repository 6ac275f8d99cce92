"""Networks of integers vote in bytes where that gives the same integers; else the form in float32
votes.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from smoothadv.architectures import get_architecture
from smoothadv.exact.layers import Convolution, Step
from smoothadv.exact.network import ByteConvolution, IntegerNetwork, byte_form
from smoothadv.voting.classifier import (
    CompiledClassifier,
    VotingClassifier,
    optimized_for_inference,
)
from smoothadv.voting.counter import VoteCounter, check_exact
from support.integers import BYTES_ARE_EXACT, grey_images, needs_bytes, quantized

CPU, SHAPE = torch.device("cpu"), (1, 8, 8)
IMAGES = grey_images(20, SHAPE)
HAS_VNNI = getattr(torch.cpu, "_is_vnni_supported", bool)()
needs_vnni = pytest.mark.skipif(
    not HAS_VNNI, reason="limits the instructions of CPUs with AVX-512 VNNI; this has none"
)


def digits_voter() -> VotingClassifier:
    torch.manual_seed(0)
    return optimized_for_inference(
        quantized(get_architecture("digits_resnet8", "digits", "normalize"), IMAGES), CPU
    )


def choose_form(voter: VotingClassifier) -> None:
    voter.use_fast_form(
        partial(check_exact, VoteCounter(voter, 10, len(IMAGES), CPU), voter.integers)
    )


def with_rounded_large_sums(
    layer: ByteConvolution, x: torch.Tensor, in_float64: bool = False
) -> torch.Tensor:
    """Random integers show it, and images do not."""
    exact = Convolution.total(layer, x, in_float64)
    return exact + (not in_float64 and x.mean() > 100)


def without_operator(
    layer: ByteConvolution, x: torch.Tensor, in_float64: bool = False
) -> torch.Tensor:
    raise RuntimeError("could not create a primitive")


@needs_bytes
@pytest.mark.filterwarnings("ignore:the fast kernels")
@pytest.mark.parametrize("fault", [None, with_rounded_large_sums, without_operator])
def test_bytes_vote_where_they_are_exact_and_floats_elsewhere(fault, monkeypatch):
    voter = digits_voter()
    if fault is not None:
        monkeypatch.setattr(ByteConvolution, "total", fault)
    choose_form(voter)
    assert (voter.fast is None) == (fault is not None)
    if fault is None:
        kinds = [
            type(layer) is ByteConvolution
            for layer in voter.fast.layers
            if hasattr(layer, "weight")
        ]
        assert kinds == [False, *[True] * (len(kinds) - 2), False], (
            "the first and the last one read more"
        )


@needs_vnni
@pytest.mark.parametrize(
    ("instructions", "is_exact"), [("AVX512_CORE_VNNI", "True"), ("AVX512_CORE", "False")]
)
def test_kernels_of_an_older_cpu_which_saturate_in_16_bits_are_not_chosen(instructions, is_exact):
    program = (
        "from test_engine import *; voter = digits_voter(); choose_form(voter); "
        "print(bool(voter.fast))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [is_exact]


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fast_form_votes_and_gradients_are_those_of_the_classifier(is_compiled):
    eager = digits_voter()
    voter = CompiledClassifier(eager) if is_compiled else eager
    with torch.inference_mode():
        expected = voter(IMAGES)
        voter.use(lambda images: images.new_zeros(len(images), 10))
        assert not voter(IMAGES).any()
    images = IMAGES.clone().requires_grad_()
    logits = eager(images)
    assert (
        torch.equal(logits, expected)
        and torch.autograd.grad(logits.square().sum(), images)[0].any()
    )
    voter.use(byte_form(eager.integers) if BYTES_ARE_EXACT else None)
    with torch.inference_mode():
        assert torch.equal(voter(IMAGES), expected)


@needs_bytes
@pytest.mark.parametrize(("channels", "weight", "parts"), [(57, 127, 1), (58, 127, 2), (4, 128, 0)])
def test_sums_in_parts_are_bytes_and_wide_weights_are_not(channels, weight, parts):
    """The sums of flat images reach 57 or 58 * 9 * 127 * 255, beside 2^24."""

    def step(number: int, weight: torch.Tensor, scale: float, high: int) -> Step:
        tensors = {
            "multiplier": torch.full((len(weight),), float(scale)),
            "bias": torch.arange(len(weight)) % 4,
        }
        return Step(Convolution({"high": high}, {"weight": weight, **tensors}), (number,))

    spread = torch.arange(weight - 3, weight + 1).view(4, 1, 1, 1).expand(4, channels, 3, 3)
    steps = [
        step(0, torch.full((channels, 1, 1, 1), 256), 2**-8, 255),
        step(1, spread, 2**-10, 2**15),
    ]
    steps.append(step(2, torch.eye(4).view(4, 4, 1, 1), 1, -1))
    network = IntegerNetwork(SHAPE, 0, torch.zeros(1), steps).eval()
    form, images = (
        byte_form(network),
        torch.cat([torch.ones(4, *SHAPE), torch.rand(4, *SHAPE)]),
    )
    assert (form is not None) == (parts > 0)
    with torch.inference_mode():
        assert not parts or (
            torch.equal(form(images), network(images)) and form.layers[1].parts == parts
        )
