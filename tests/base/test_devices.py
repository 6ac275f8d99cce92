"""Which device is taken, how it rounds, and which memory format suits it: with GPUs that are not
there. Choosing a batch by memory, with a stand-in for a GPU: torch.cuda's accounting, with tensors
on the host.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import smoothadv
from smoothadv.api import torch_settings_kept
from smoothadv.architectures import get_architecture
from smoothadv.architectures.logits import probe
from smoothadv.base.devices import (
    LargestTensor,
    allows_tf32,
    batch_that_suits,
    device_of,
    device_of_run,
    layout_on,
    uses_tf32,
    within_memory,
)
from smoothadv.cli.runner import FAILURE, Parser, run
from smoothadv.core import Smooth
from smoothadv.evaluation import setup
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.voting.classifier import default_attack_batch, default_batch
from smoothadv.voting.folding import are_offered_on
from support.commands import succeed

GPUS = ["NVIDIA A100", "NVIDIA H200", "NVIDIA H200"]
CPU, META = torch.device("cpu"), torch.device("meta")
AS_BEFORE = ", as before (--device takes another)\n"
CERTIFY = "certify digits MODEL 0.25 out --N 200 --max 3"
FEW = "--num-steps 1 --num-noise-vec 1 --N 200"
TRAIN = "train digits digits_resnet8 out --noise 0.25 --steps-per-epoch 1 --epochs 1"
CUDNN, CONV = torch.backends.cudnn, getattr(torch.backends.cudnn, "conv", None)
newer = pytest.mark.skipif(CONV is None, reason="PyTorch before 2.9")


@pytest.fixture(autouse=True)
def gpus(monkeypatch) -> None:
    """PyTorch says that there are some; its settings are as before afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPUS[device.index or 0])
    monkeypatch.setattr(CUDNN, "allow_tf32", True)


@pytest.mark.parametrize(
    ("asked", "recorded", "rank", "device", "line"),
    [
        (None, None, None, "cuda", "on the NVIDIA A100\n"),
        (None, "NVIDIA A100", None, "cuda", "on the NVIDIA A100\n"),
        (None, "NVIDIA H200", None, "cuda:1", f"on the NVIDIA H200{AS_BEFORE}"),
        (None, "cpu", None, "cpu", f"on the CPU{AS_BEFORE}"),
        (None, "NVIDIA V100", None, "cuda", "on the NVIDIA A100\n"),
        ("cuda:2", "cpu", None, "cuda:2", ""),
        ("cuda", None, 1, "cuda:1", ""),
        (None, "NVIDIA H200", 0, "cuda:1", f"on the NVIDIA H200{AS_BEFORE}"),
        (None, "NVIDIA H200", 1, "cuda:2", "on the NVIDIA H200\n"),
        (None, "NVIDIA A100", 0, "cuda:0", "on the NVIDIA A100\n"),
        (None, "NVIDIA A100", 1, "cuda:1", "on the NVIDIA H200\n"),
        (None, "cpu", 1, "cpu", f"on the CPU{AS_BEFORE}"),
    ],
)
@pytest.mark.parametrize(
    ("tf32", "was", "is_used"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, False)],
)
def test_what_is_continued_keeps_its_device_and_its_arithmetic(
    capsys, monkeypatch, asked, recorded, rank, device, line, tf32, was, is_used
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1" if rank is None else "2")
    run = SimpleNamespace(device=asked and torch.device(asked), tf32=tf32)
    processes = SimpleNamespace(local_rank=rank, is_first=True)
    found = device_of_run(run, {"device": recorded, "tf32": was}, processes, says=True)
    assert (str(found), capsys.readouterr().err, allows_tf32()) == (device, line, is_used)


def test_gpus_that_pytorch_cannot_use_are_none(capsys, monkeypatch):
    """As where the driver is too old, and yet counts GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: 1 / 0)
    run, alone = SimpleNamespace(device=None, tf32=None), SimpleNamespace(local_rank=None)
    alone.is_first = True
    assert device_of_run(run, {"device": GPUS[0], "tf32": "yes"}, alone, says=True) == CPU
    assert "finds no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (CERTIFY, CERTIFY),
        (f"{CERTIFY} --shard 0/2", f"{CERTIFY} --shard 0/2"),
        (CERTIFY.replace("certify", "predict"), CERTIFY.replace("certify", "predict")),
        (f"{CERTIFY} --sound", "certify verify out"),
        (f"{CERTIFY} --sound", f"attack digits MODEL 0.25 more --against out {FEW}"),
        (TRAIN, f"{TRAIN} --resume"),
    ],
)
def test_commands_go_on_and_repeat_on_the_cpu_where_that_began(
    begin, again, checkpoint, workplace, capsys
):
    words, more = (line.replace("MODEL", str(checkpoint)).split() for line in (begin, again))
    succeed(*words, "--device", "cpu")
    succeed(*more)
    assert capsys.readouterr().err.count(f"on the CPU{AS_BEFORE}") == 1


@pytest.mark.parametrize(
    ("setting", "override", "capability", "expected"),
    [
        ((CUDNN, "allow_tf32", True), "1", (8, 0), True),
        ((CUDNN, "allow_tf32", False), "1", (9, 0), False),
        ((CUDNN, "allow_tf32", True), "0", (9, 0), False),
        ((CUDNN, "allow_tf32", True), "1", (7, 5), False),
        pytest.param((CONV, "fp32_precision", "ieee"), "1", (9, 0), False, marks=newer),
    ],
)
def test_full_float32_is_contiguous_and_not_fused(
    monkeypatch, setting, override, capability, expected
):
    setattr(*setting)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    gpu, last = torch.device("cuda:1"), torch.channels_last
    assert uses_tf32(gpu) == are_offered_on(gpu) == expected
    assert layout_on(gpu) is layout_on(gpu, torch.float32)
    assert layout_on(gpu) is (last if expected else torch.contiguous_format)
    assert layout_on(gpu, torch.bfloat16) is layout_on(CPU) is last


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_logs_of_gpus_record_whether_float32_was_rounded(monkeypatch, checkpoint, precision):
    """In fp16 it is float32 that is attacked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(setup, "kernels_on", lambda device: None)
    asked = {"sigma": 0.25, "device": "cpu", "tf32": False, "precision": precision}
    made = setup.prepare(CertifySpec(dataset="digits", model=checkpoint, **asked), None)
    gpu = torch.device("cuda:1")
    settings = setup._settings(made.spec, "", made.voters, made.dataset, made.indices, gpu)
    recorded = (settings["device"], settings.get("tf32"))
    assert recorded == ("NVIDIA H200", None if precision == "bf16" else False)


@pytest.mark.parametrize("before", [False, True])
def test_functions_leave_the_compiler_as_it_was(before, monkeypatch):
    inductor = pytest.importorskip("torch._inductor.config", reason="PyTorch has no compiler")
    monkeypatch.setattr(inductor, "deterministic", before, raising=False)
    with torch_settings_kept():
        inductor.deterministic = not before
    assert inductor.deterministic is before


@pytest.mark.parametrize("sound", [False, True])
def test_functions_leave_pytorch_as_it_was(sound):
    def settings() -> tuple[bool, ...]:
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        return allows_tf32(), is_deterministic, CUDNN.benchmark, CUDNN.deterministic

    module, seen, before = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), [], settings()
    module.register_forward_hook(lambda *given: seen.append(allows_tf32()))
    given = {"sigma": 0.25, "n": 99, "device": "cpu", "tf32": False, "sound": sound}
    smoothadv.certify(module, torch.ones(2, 1, 2, 2), **given)
    assert not seen[-1] and settings() == before and before[0]


def test_modules_get_images_where_their_weights_or_buffers_are():
    network = nn.Sequential(nn.BatchNorm2d(1, affine=False, device=META), nn.Flatten())
    divided = nn.Sequential(nn.Linear(1, 1, device=META), nn.Linear(1, 1))
    assert device_of(network, CPU) == device_of(divided, CPU) == device_of(len, META) == META
    image = torch.rand(1, 4, 4)
    assert probe(network, image)[1] == 16
    network.register_forward_hook(lambda module, given, logits: torch.ones(len(logits), 16))
    assert Smooth(network, 16, 0.25).predict(image, 100, 0.001, 50) == 0


# Memory


SHAPE = (3, 4, 4)
BYTES_PER_IMAGE = 3 * 4 * 4 * 4
FREE, TOTAL = 2**20, 2**21


class Gpu(torch.nn.Module):
    """A stand-in: an image takes BYTES_PER_IMAGE, twice that with gradients; more than ``capacity``
    images fail.
    """

    type = "cuda"

    def __init__(self, capacity: int = 10**9) -> None:
        super().__init__()
        self.capacity, self.peak, self.batches = capacity, 0, []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(images))
        if len(images) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.peak = len(images) * BYTES_PER_IMAGE * (2 if images.requires_grad else 1)
        return images.flatten(1)


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()
    zeros = torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda *shape, device=None, **options: zeros(*shape, **options)
    )
    accounting = {
        "empty_cache": lambda: None,
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: gpu.peak,
        "mem_get_info": lambda device: (FREE, TOTAL),
        "get_device_capability": lambda device: (9, 0),
    }
    for name, function in accounting.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return gpu


def test_half_of_the_free_memory_is_filled_or_of_all_where_processes_must_agree(gpu):
    batch = default_batch(gpu, SHAPE, gpu)
    assert batch * BYTES_PER_IMAGE <= FREE / 2 < 2 * batch * BYTES_PER_IMAGE
    assert batch & (batch - 1) == 0
    assert default_batch(gpu, SHAPE, gpu, with_gradient=True) == batch // 2
    assert default_batch(gpu, SHAPE, gpu, of_total=True) == 2 * batch
    assert default_attack_batch(gpu, SHAPE, gpu, 1_000_000) == batch // 2
    assert default_attack_batch(gpu, SHAPE, gpu, 3) == 192, "64 images"


@pytest.mark.parametrize(("copies", "batch"), [(1, 16), (8, 16), (16, 16), (64, 64), (1_000, None)])
def test_attacks_on_a_cpu_take_one_image_at_a_time_where_that_is_enough(copies, batch):
    network, cpu = torch.nn.Flatten(), torch.device("cpu")
    expected = batch or default_batch(network, SHAPE, cpu, with_gradient=True)
    assert default_attack_batch(network, SHAPE, cpu, copies) == expected


def test_memory_of_drawing_noise_is_counted(gpu, monkeypatch):
    """Here four times that of the network."""
    drawn, noise, without = [0], SimpleNamespace(), default_batch(gpu, SHAPE, gpu)
    stream = SimpleNamespace(
        fill=lambda out, image, first: drawn.append(4 * len(out) * BYTES_PER_IMAGE)
    )
    noise.stream = lambda example, device, purpose: stream
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(gpu.peak, *drawn))
    assert default_batch(gpu, SHAPE, gpu, noise=noise) == without // 4


@pytest.mark.parametrize(
    ("elements", "batch"), [(2**19 - 1, 4096), (2**19, 2048), (64 * 112 * 112, 2048), (2**32, 1)]
)
def test_no_tensor_of_a_default_batch_has_2_to_the_31_elements(gpu, elements, batch, monkeypatch):
    """The first activations of ResNet-50 have 64 * 112 * 112 for each image."""

    class Large(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1)[:, :1].expand(-1, elements)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**60, 2**60))
    assert default_batch(Large(), SHAPE, gpu) == batch


def test_largest_tensor_of_a_network_is_found():
    """The first stage of ResNet-20 has 16 channels of 32x32."""
    with LargestTensor() as largest, torch.inference_mode():
        get_architecture("cifar_resnet20", "cifar10")(torch.zeros(4, 3, 32, 32))
    assert largest.elements == 4 * 16 * 32 * 32


@pytest.mark.parametrize(
    ("capacity", "tried"), [(64, [64]), (20, [64, 32, 16]), (0, [64, 32, 16, 8, 4, 2, 1])]
)
def test_the_trial_itself_may_run_out_of_memory(gpu, capacity, tried):
    gpu.capacity = capacity
    assert (batch_that_suits(gpu, SHAPE, gpu) > 1) == (capacity > 0)
    assert gpu.batches == tried


def command_that_raises(error: Exception) -> int:
    return run("certify", lambda: Parser(prog="certify"), mock.Mock(side_effect=error), [])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.OutOfMemoryError("Allocation on device "),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        MemoryError(),
    ],
    ids=str,
)
def test_command_without_memory_ends_with_one_line_that_says_what_helps(capsys, error):
    assert command_that_raises(error) == FAILURE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: use a smaller --batch")
    assert str(error).partition(". ")[0].partition("\n")[0] in line


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("shapes do not match"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_a_lack_of_memory(error, gpu):
    for fails in (
        lambda: command_that_raises(error),
        lambda: batch_that_suits(mock.Mock(side_effect=error), SHAPE, gpu),
        lambda: within_memory(mock.Mock(side_effect=error), halve=pytest.fail),
    ):
        with pytest.raises(type(error), match=str(error)):
            fails()
