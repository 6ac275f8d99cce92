"""Choosing a batch by memory, with a stand-in for a GPU: torch.cuda's accounting, with tensors on
the host.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from smoothadv.architectures import get_architecture
from smoothadv.base.devices import LargestTensor, batch_that_suits, within_memory
from smoothadv.cli.runner import FAILURE, Parser, run
from smoothadv.voting.classifier import default_attack_batch, default_batch

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


LACKS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.OutOfMemoryError("Allocation on device "),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    MemoryError(),
]
OTHERS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    ValueError("shapes do not match"),
]


def command_that_raises(error: Exception) -> int:
    return run("certify", lambda: Parser(prog="certify"), mock.Mock(side_effect=error), [])


@pytest.mark.parametrize("error", LACKS, ids=str)
def test_command_without_memory_ends_with_one_line_that_says_what_helps(capsys, error):
    assert command_that_raises(error) == FAILURE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: use a smaller --batch")
    assert str(error).partition(". ")[0].partition("\n")[0] in line


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_taken_for_a_lack_of_memory(error, gpu):
    for fails in (
        lambda: command_that_raises(error),
        lambda: batch_that_suits(mock.Mock(side_effect=error), SHAPE, gpu),
        lambda: within_memory(mock.Mock(side_effect=error), halve=pytest.fail),
    ):
        with pytest.raises(type(error), match=str(error)):
            fails()
