"""Convolution, shortcut and ReLU in one call: the same function and gradients, by a stand-in for
cuDNN's calls.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import get_architecture
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.datasets import describe_dataset
from smoothadv.training import execution as attacked
from smoothadv.training.execution import FoldedModel, folded_form
from smoothadv.voting import classifier, folding
from smoothadv.voting.classifier import PRECISIONS, optimized_for_inference
from smoothadv.voting.folding import ConvolutionReLU, fold
from support import networks
from support.released import randomise_batch_norms


class Calls(list):
    """Computes cuDNN's calls, and lists the arguments of each."""

    def convolution_relu(self, x, weight, bias, stride, padding, dilation, groups):
        self.append((x, weight, None, bias))
        return F.relu(F.conv2d(x, weight, bias, stride, padding, dilation, groups))

    def convolution_add_relu(
        self, x, weight, shortcut, alpha, bias, stride, padding, dilation, groups
    ):
        self.append((x, weight, shortcut, bias))
        out = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        assert shortcut.shape == out.shape
        return F.relu(out + alpha * shortcut)


@pytest.fixture
def cudnn(monkeypatch) -> Calls:
    """A CPU takes the way of a GPU."""
    calls = Calls()
    monkeypatch.setattr(folding, "_suits_plain_functions", lambda x: False)
    monkeypatch.setattr(torch, "cudnn_convolution_relu", calls.convolution_relu)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", calls.convolution_add_relu)
    return calls


class Shortcuts(networks.Network):
    """A grouped, dilated and strided convolution, whose sum with another is computed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Conv2d(3, 3, 3, stride=2, padding=2, dilation=2, groups=3)
        self.third, self.relu = nn.Conv2d(3, 3, 1, stride=2), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        out = self.other_norm(self.second(x))
        out += self.third(x)
        return self.end(self.relu(out))


class Expanded(networks.Network):
    """A shortcut that is expanded, as cuDNN would not do."""

    def forward(self, x):
        return self.end(F.relu(self.norm(self.first(x)) + x.mean((2, 3), keepdim=True)))


def small(kind: type[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return kind().double().eval().requires_grad_(False), torch.rand(4, 3, 8, 8, dtype=torch.float64)


def of_arch(arch: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(2)
    description = describe_dataset("imagenet" if arch == "resnet50" else "cifar10")
    network = get_architecture(arch, description, "normalize").double().eval().requires_grad_(False)
    randomise_batch_norms(network)
    return network, torch.rand(2, *description.image_shape[:1], 32, 32, dtype=torch.float64)


def gradient_at(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    points = images.clone().requires_grad_()
    return torch.autograd.grad(network(points).square().sum(), points)[0]


# How many calls there are: of each block all convolutions but that of the shortcut.
@pytest.mark.parametrize(
    ("arch", "count"),
    [("digits_resnet8", 7), ("cifar_resnet20", 19), ("cifar_resnet110", 109), ("resnet50", 49)],
)
def test_fused_calls_give_the_logits_and_gradients_of_every_architecture(cudnn, arch, count):
    model, images = of_arch(arch)
    fused = fold(copy.deepcopy(model), None, epilogues=True)
    assert torch.allclose(fused(images), model(images), rtol=1e-9, atol=1e-11)
    assert (
        len(cudnn) == count == sum(isinstance(layer, ConvolutionReLU) for layer in fused.modules())
    )
    of_sums = [shortcut for _, _, shortcut, _ in cudnn if shortcut is not None]
    assert len(of_sums) == {"resnet50": 16}.get(arch, (count - 1) // 2), "one sum in each block"
    expected = gradient_at(model, images)
    assert torch.allclose(
        gradient_at(fused, images), expected, rtol=1e-7, atol=1e-9 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (Shortcuts, 2),
        (networks.Grouped, 1),
        (networks.ReflectedBorder, 0),
        (networks.NormAfterSum, 0),
    ],
)
def test_fused_calls_give_the_function_of_networks_of_all_kinds(cudnn, kind, count):
    model, images = small(kind)
    fused = fold(copy.deepcopy(model), None, epilogues=True)
    assert torch.allclose(fused(images), model(images), rtol=1e-10) and len(cudnn) == count
    assert torch.allclose(
        gradient_at(fused, images), gradient_at(model, images), rtol=1e-9, atol=1e-12
    )


class Overwriting(networks.Network):
    """The second convolution reads what a ReLU overwrote since the first one read it."""

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.end(
            F.relu(self.second(x) + self.other_norm(self.second_reader(F.relu(x, inplace=True))))
        )

    def __init__(self) -> None:
        super().__init__()
        self.second_reader = nn.Conv2d(3, 3, 1)


class Weighted(networks.Network):
    def forward(self, x):
        return self.end(torch.relu(input=F.relu(torch.add(self.norm(self.first(x)), x, alpha=0.5))))


@pytest.mark.parametrize("kind", [Overwriting, Weighted])
def test_what_a_fused_call_cannot_express_stays(cudnn, kind):
    model, images = small(kind)
    assert torch.allclose(fold(copy.deepcopy(model), None, True)(images), model(images), rtol=1e-10)


def as_on_a_gpu(monkeypatch) -> None:
    """Networks in float64 are tried on the CPU, those in float32 are on the GPU."""
    monkeypatch.setattr(folding, "_suits_plain_functions", lambda x: x.dtype == torch.float64)
    for module in (classifier, attacked):
        monkeypatch.setattr(module, "are_offered_on", lambda *where: True)


def test_where_fusing_would_change_the_function_folding_stays(cudnn, monkeypatch):
    as_on_a_gpu(monkeypatch)
    model, images = small(Expanded)
    arranged = optimized_for_inference(model, torch.device("cpu"), images[0])
    assert arranged.is_folded and not arranged.is_fused


@pytest.mark.parametrize("faulty", [lambda out: out * 0 + 7, lambda out: out.nan_to_num(), None])
def test_what_cudnn_computes_is_compared(cudnn, monkeypatch, faulty):
    """With what PyTorch's functions compute; and a NaN must not become a number."""
    as_on_a_gpu(monkeypatch)
    if faulty is not None:
        right = cudnn.convolution_add_relu
        monkeypatch.setattr(
            torch, "cudnn_convolution_add_relu", lambda *given: faulty(right(*given))
        )
    model, images = of_arch("digits_resnet8")
    model.train().requires_grad_()
    warned = (
        contextlib.nullcontext()
        if faulty is None
        else pytest.warns(DoubtfulWarning, match="something else")
    )
    with warned:
        assert optimized_for_inference(
            model.float(), torch.device("cpu"), images[0].float()
        ).is_fused == (faulty is None)
    before = copy.deepcopy(model.state_dict())
    with warned if faulty is None else pytest.warns(DoubtfulWarning, match="something else"):
        form = folded_form(model, images.float())
    assert any(isinstance(layer, ConvolutionReLU) for layer in form.modules()) == (faulty is None)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sound_certification_uses_no_call_that_may_be_random():
    assert folding.are_offered_on(torch.device("meta"))
    torch.set_deterministic_debug_mode("error")
    assert not folding.are_offered_on(torch.device("meta"))


def test_convolutions_that_learn_are_left_alone():
    fused = folding.fuse_epilogues(torch.fx.symbolic_trace(Shortcuts().requires_grad_()))
    assert not any(isinstance(layer, ConvolutionReLU) for layer in fused.modules())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_attacked_form_of_a_model_in_training_follows_its_weights(cudnn, dtype):
    model, images = of_arch("digits_resnet8")
    model, images = model.float().requires_grad_(), images.float()
    form = FoldedModel(model, dtype, epilogues=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1.25
    form.refresh()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = form(images)
    rtol, atol = (1e-4, 1e-4) if dtype is None else (0.1, 0.3)
    assert torch.allclose(logits.float(), model(images), rtol=rtol, atol=atol)
    assert {weight.dtype for _, weight, _, _ in cudnn} == {dtype or torch.float32}
    assert {x.dtype for x, _, _, _ in cudnn} == {dtype or torch.float32}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_device_without_these_kernels_computes_one_by_one(precision):
    """The device "meta" has none."""
    model, images = of_arch("digits_resnet8")
    with pytest.warns(
        DoubtfulWarning,
        match="are computed one by one: aten::cudnn_convolution_relu: attempted to run",
    ):
        assert not optimized_for_inference(
            model.float(), torch.device("meta"), images[0].float(), precision
        ).is_fused
    assert optimized_for_inference(model.float(), torch.device("meta"), None, precision).is_fused, (
        "without an example nothing is tried"
    )
    form = folded_form(copy.deepcopy(model).float().requires_grad_(), images.float())
    assert form is not None and not any(
        isinstance(layer, ConvolutionReLU) for layer in form.modules()
    ), "on a CPU"
