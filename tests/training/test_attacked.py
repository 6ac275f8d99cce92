"""The folded form that is attacked is the model in eval mode, in its logits and its gradients.

Making it leaves the model unchanged; its own parameters need no gradients and are in its dtype.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck, ResNet

from smoothadv.architectures import get_architecture
from smoothadv.architectures.input_layers import Normalize
from smoothadv.attacks import ATTACKS
from smoothadv.training.execution import folded_form
from support import networks
from support.networks import Network, network_class, settle_batch_norms

# Normalizes by the statistics of the batch, also in eval mode.
NoStatistics = network_class(
    "NoStatistics",
    Network.forward,
    lambda net: setattr(net, "norm", nn.BatchNorm2d(3, track_running_stats=False)),
)


class Geometry(nn.Module):
    """Convolutions with and without bias, of all kinds of kernel, stride, padding, dilation and
    groups.
    """

    def __init__(self) -> None:
        super().__init__()
        kinds = [
            {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
            {"kernel_size": (1, 3), "padding": (0, 2), "groups": 2},
            {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 4, "bias": False},
            {"kernel_size": 3, "padding": "same", "padding_mode": "circular"},
            {"kernel_size": 2, "stride": (1, 2), "padding": "valid"},
        ]
        self.widen = nn.Conv2d(3, 4, 1)
        self.layers = nn.Sequential()
        for kind in kinds:
            self.layers.extend([nn.Conv2d(4, 4, **kind), nn.BatchNorm2d(4, eps=0.1), nn.ReLU()])

    def forward(self, x):
        return self.layers(self.widen(x)).mean((2, 3))


class SumAfterActivation(Network):
    """A residual block whose branch ends with the activation, as in ResNet-9: what the sum reads
    must be kept.
    """

    def forward(self, x):
        maps = self.norm(self.first(x)).relu()
        return (F.relu(self.other_norm(self.second(maps))) + maps).mean((2, 3))


SumAfterActivationOfImage = network_class(
    "SumAfterActivationOfImage", lambda net, x: (F.relu(net.norm(net.first(x))) + x).mean((2, 3))
)
ActivationTwice = network_class(
    "ActivationTwice", lambda net, x: net.end(F.relu(F.relu(net.norm(net.first(x)))))
)


class SumAfterSmoothActivation(Network):
    def forward(self, x):
        maps = self.norm(self.first(x))
        return self.end(torch.tanh(maps) + self.other_norm(self.second(torch.tanh(maps))))


FunctionalDropout = network_class(
    "FunctionalDropout",
    lambda net, x: net.end(F.dropout(net.norm(net.first(x)), 0.5, training=net.training)),
)


class BranchOnTraining(Network):
    def forward(self, x):
        maps = self.norm(self.first(x))
        return self.end(maps) if self.training else self.end(2 * maps)


InsistsOnFloat32 = network_class(
    "InsistsOnFloat32",
    lambda net, x: net.end(net.norm(F.conv2d(x, net.first.weight.float(), padding=1))),
)


def bottlenecks() -> nn.Module:
    """resnet50 with one block of several groups per stage, without an input layer."""
    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=8, width_per_group=4)


LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "cifar_resnet20": (lambda: get_architecture("cifar_resnet20", "cifar10"), (3, 32, 32)),
    "digits_resnet8": (lambda: get_architecture("digits_resnet8", "digits", "center"), (1, 8, 8)),
    "bottlenecks": (bottlenecks, (3, 16, 16)),
}
# Each with the number of normalization layers that are not folded.
SMALL = [
    (networks.Network, 0),
    (networks.Grouped, 0),
    (networks.ReflectedBorder, 0),
    (networks.TwoReadersOfTheImage, 0),
    (networks.FurtherArgument, 0),
    (Geometry, 0),
    (SumAfterSmoothActivation, 0),
    (networks.TwoConsumers, 1),
    (networks.PlainNorm, 0),
    (networks.NormFirst, 1),
    (networks.NormAfterSum, 2),
    (NoStatistics, 1),
    # What the gradient needs must be kept: a model may have no form.
    (SumAfterActivation, None),
    (SumAfterActivationOfImage, None),
    (ActivationTwice, None),
]


def large(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A large network in float64 and train mode, with statistics as if trained; and images."""
    torch.manual_seed(0)
    build, shape = LARGE[name]
    model, images = build().double(), torch.rand(6, *shape, dtype=torch.float64)
    settle_batch_norms(model, images)
    return model.train(), images[:4]


def small(kind: type[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(Normalize((0.9, 0.5, 0.2), (0.2, 0.3, 0.4)), kind()).double()
    change(model)
    return model.train(), torch.rand(4, 3, 8, 8, dtype=torch.float64)


@torch.no_grad()
def change(model: nn.Module) -> None:
    """Change weights and statistics, as some updates would."""
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.running_var is not None:
            layer.running_mean += 0.3 * torch.randn_like(layer.running_mean)
            layer.running_var *= torch.rand_like(layer.running_var) + 0.5


def logits_and_gradient(
    model: nn.Module, images: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In eval mode: logits, and the gradient of the loss with respect to the images."""
    points = images.clone().requires_grad_()
    logits = model.eval()(points)
    (gradient,) = torch.autograd.grad(
        F.cross_entropy(logits, torch.arange(len(images)) % 3, reduction="sum"), points
    )
    return logits.detach(), gradient


def deviation(model: nn.Module, other: nn.Module, images: torch.Tensor) -> float:
    """The largest difference of their logits or gradients, in units of the largest one."""
    pairs = zip(logits_and_gradient(model, images), logits_and_gradient(other, images))
    return max(float((ours - theirs).abs().max() / ours.abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("build", "which", "left"),
    [
        *((large, name, 0) for name in LARGE),
        *((small, *case) for case in SMALL),
    ],
)
def test_logits_and_gradients_of_the_form_are_those_of_the_model(build, which, left):
    """At first, and after ``refresh`` when the model has changed."""
    model, images = build(which)
    form = folded_form(model, images[:2], torch.float64)
    if form is None:
        assert left is None
        return
    norms = sum(isinstance(layer, nn.BatchNorm2d) for layer in form.modules())
    assert norms == (left or 0) and deviation(model, form, images) < 1e-10
    for _ in range(2):
        change(model)
        # Negative control: what is folded is a copy, and an old one is noticed.
        assert (deviation(model, form, images) > 1e-4) == (not left)
        form.refresh()
        assert deviation(model, form, images) < 1e-10


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [FunctionalDropout, BranchOnTraining])
def test_networks_that_look_at_their_mode_are_attacked_in_eval_mode_or_have_no_form(kind, training):
    model, images = small(kind)
    with torch.no_grad():
        in_train_mode, in_eval_mode = (
            copy.deepcopy(model).train(mode)(images) for mode in (True, False)
        )
    assert (in_train_mode - in_eval_mode).abs().max() > 0.01, "the mode does matter"
    form = folded_form(model.train(training), images[:2], torch.float64)
    assert form is None or deviation(model, form, images) < 1e-10


@pytest.mark.parametrize(
    "kind",
    [
        networks.BranchOnData,
        networks.BranchOnShape,
        networks.RangeOverShape,
        networks.LengthOfBatch,
        networks.Autocast,
        # Their layers share weights, or compute them.
        networks.FirstUsedTwice,
        networks.NormsOfOne,
        networks.NormOfTwo,
        networks.TiedWeights,
        networks.SpectralNorm,
        networks.HookedLayer,
        # torch.fx follows them, but not to where they go.
        networks.BranchOnType,
        networks.WeightReadTwice,
        InsistsOnFloat32,
    ],
)
@pytest.mark.parametrize("has_entrance", [True, False])
def test_networks_that_cannot_be_rewritten_have_no_form(kind, has_entrance):
    model, images = small(kind)
    assert folded_form(model if has_entrance else model[1], images[:2], torch.float64) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_without_finite_logits_has_no_form(value):
    model, images = small(networks.Network)
    with torch.no_grad():
        model[1].first.bias[0] = value
    assert folded_form(model, images[:2], torch.float64) is None


def flags(model: nn.Module) -> dict[str, object]:
    """Everything about a model that is not in its state dict."""
    hooks = [
        len(entries)
        for module in model.modules()
        for name, entries in vars(module).items()
        if name.endswith("_hooks") and isinstance(entries, dict)
    ]
    return {
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "types": [type(module) for module in model.modules()],
        "parameters": [
            (name, id(value), value.requires_grad, value.grad)
            for name, value in model.named_parameters()
        ],
        "buffers": [(name, id(value)) for name, value in model.named_buffers()],
        "hooks": hooks,
        "forwards": ["forward" in vars(module) for module in model.modules()],
        "layout": [value.stride() for value in model.parameters()],
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "kind", [networks.Network, networks.TwoConsumers, networks.BranchOnShape, networks.BranchOnType]
)
def test_the_live_model_is_left_alone(kind, training):
    model, images = (each.float() for each in small(kind))
    model.train(training)
    model[1].norm.training = not training
    model[1].second.weight.requires_grad_(False)
    state, before = copy.deepcopy(model.state_dict()), flags(model)
    form = folded_form(model, images[:2])
    assert flags(model) == before
    if form is not None:
        form.refresh()
        ATTACKS["PGD"](0.5, 2)(form, images, torch.zeros(4, dtype=torch.int64))
        assert flags(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_form_has_of_its_own_needs_no_gradients_and_shares_no_memory(dtype):
    model, images = (each.float() for each in large("digits_resnet8"))
    form = folded_form(model, images[:2], dtype)
    live = {id(parameter) for parameter in model.parameters()}
    memory = {parameter.data_ptr() for parameter in model.parameters()}
    own = [parameter for parameter in form.parameters() if id(parameter) not in live]
    assert len(own) == 2 * sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()), (
        "a weight and a bias for each"
    )
    assert not any(parameter.requires_grad or parameter.data_ptr() in memory for parameter in own)
    assert {parameter.dtype for parameter in own} == {dtype}
    # The others are the model's: they need no refreshing.
    assert len(list(form.parameters())) > len(own)
