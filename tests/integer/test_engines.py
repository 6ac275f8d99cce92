"""One certification log of integers, which every engine repeats: float32, bytes, ONNX Runtime,
Triton's kernels, the reference in NumPy, and oneDNN with the instructions of older processors.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from smoothadv.checkpoints import save_checkpoint
from smoothadv.datasets import get_dataset
from smoothadv.integer.export import as_onnx
from smoothadv.integer.layers import Convolution, Step
from smoothadv.integer.network import IntegerNetwork, byte_form
from support.commands import call, rows, script, succeed
from support.integers import needs_bytes, slow_logits


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


def with_onnx_runtime(network: IntegerNetwork) -> Callable[[torch.Tensor], torch.Tensor]:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: there is no export")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = as_onnx(network, {}, onnx).SerializeToString()
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def with_numpy(network: IntegerNetwork) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda images: torch.from_numpy(slow_logits(network, images))


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
    pytest.param(with_onnx_runtime, id="ONNX Runtime"),
    pytest.param(with_numpy, id="NumPy"),
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


@pytest.mark.slow
def test_tritons_kernels_repeat_the_log(log):
    pytest.importorskip("triton", reason="Triton is not installed: float32 votes")
    program = (
        "import sys; from smoothadv.integer import kernels; "
        "from smoothadv.integer.network import IntegerNetwork; "
        "from smoothadv.__main__ import main; "
        "IntegerNetwork.fast_form = lambda network, device: kernels.KernelNetwork(network); "
        "sys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-c", program, "certify", "verify", log, "--rows", "2"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "2 of 6 rows" in done.stdout, done.stderr


@pytest.mark.parametrize("instructions", ["SSE41", "AVX2"])
def test_older_processors_repeat_the_log(instructions, log, warm):
    words = [sys.executable, "-m", "smoothadv", "certify", "verify", str(log), "--rows", "9"]
    process = warm.start(
        words, log.parent, ONEDNN_MAX_CPU_ISA=instructions, ATEN_CPU_CAPABILITY="default"
    )
    said = process.communicate()
    assert process.returncode == 0 and "all are equal" in said[0], said


def test_products_that_saturate_for_one_image_alone_decide_no_certificate(warm, workplace):
    """The first layer makes 255 where it sees the first digit, else 0; of these the second one
    makes 65 * 255 + 64 * 255 - 32767 = 128, and 0 where pairs of products saturate.
    """
    digit, _ = get_dataset("digits", "test")[0]
    sign, unit = torch.where(digit > 0.5, 1, -1), torch.eye(10)
    least = int(0.7 * ((digit * 255 - 128) * sign).sum())
    layers = [
        (sign.expand(2, 1, 8, 8), torch.full((2,), -least), {"high": 255}),
        (torch.tensor([65, 64]).view(1, 2, 1, 1), torch.tensor([-32767]), {"high": 255}),
        (unit[8].view(10, 1, 1, 1), 50 * unit[1], {}),
    ]
    steps = []
    for weight, bias, given in layers:
        tensors = {"weight": weight, "bias": bias, "multiplier": torch.ones(len(bias))}
        steps.append(Step(Convolution(given, tensors), (len(steps),)))
    network = IntegerNetwork((1, 8, 8), 383, torch.tensor([128]), steps).eval()
    assert slow_logits(network, digit[None]).argmax() == 8
    network.set_probe()
    facts = {"epoch": 1, "arch": "integer:none", "input_layer": "normalize"}
    content = {**facts, **dict(zip(("integer", "state_dict"), network.stored()))}
    save_checkpoint(workplace / "crafted.pth.tar", content)
    words = ["crafted.pth.tar", 0.25, "log.tsv", "--sound", "--max", 1, "--N0", 10, "--N", 100]
    command = script("certify", "digits", *words, "--device", "cpu")
    process = warm.start(command, workplace, ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2")
    assert process.communicate()[1] == ""
    (row,) = rows(workplace / "log.tsv")
    assert row["predict"] == "8" and int(row["successes"]) > 90
