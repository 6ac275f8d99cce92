"""Networks that folding must leave right: what torch.fx can follow, what it cannot, and what it
follows wrongly.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from support.released import randomise_batch_norms


class Network(nn.Module):
    """Two convolutions of 3 channels, a ReLU and a mean per channel; subclasses run them another
    way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.other_norm = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        randomise_batch_norms(self)

    def end(self, maps: torch.Tensor) -> torch.Tensor:
        return maps.relu().mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.norm(self.first(x)))


def network_class(
    name: str, forward: Callable, change: Callable[[Network], object] = lambda net: None
) -> type[Network]:
    """A class of networks that ``change`` their layers and then run them by ``forward``."""

    def make(self) -> None:
        Network.__init__(self)
        change(self)

    return type(name, (Network,), {"__init__": make, "forward": forward})


def _autocast(net, x):
    with torch.autocast(x.device.type, enabled=False):
        return net.end(net.norm(net.first(x)))


def _two_consumers(net, x):
    maps = net.first(x)
    return net.end(net.norm(maps) + maps)


def _branch_on_type(net, x):
    maps = net.norm(net.first(x))
    return net.end(maps) if isinstance(x, torch.Tensor) else net.end(-maps)


def _weight_read_twice(net, x):
    return net.end(nn.functional.conv2d(net.norm(net.first(x)).relu(), net.first.weight, padding=1))


BranchOnData = network_class(
    "BranchOnData", lambda net, x: net.end(net.first(x) if x.mean() > 0.5 else net.second(x))
)
BranchOnShape = network_class(
    "BranchOnShape", lambda net, x: net.end(net.first(x) if x.shape[2] == 8 else net.second(x))
)
RangeOverShape = network_class(
    "RangeOverShape",
    lambda net, x: net.end(sum(net.first(x).roll(shift, 2) * shift for shift in range(x.shape[2]))),
)
LengthOfBatch = network_class(
    "LengthOfBatch", lambda net, x: net.norm(net.first(x)).reshape(len(x), -1)
)
Autocast = network_class("Autocast", _autocast)
FurtherArgument = network_class(
    "FurtherArgument", lambda net, x, scale=None: net.end(net.norm(net.first(x)))
)
BranchOnType = network_class("BranchOnType", _branch_on_type)
# A batch normalization that follows no convolution, and one that follows an activation.
NormAfterSum = network_class(
    "NormAfterSum", lambda net, x: net.end(net.other_norm(net.norm(net.first(x) + x).relu()))
)
NormFirst = network_class("NormFirst", lambda net, x: net.end(net.first(net.norm(x))))
# The convolution's output is read before its normalization, too.
TwoConsumers = network_class("TwoConsumers", _two_consumers)
TwoReadersOfTheImage = network_class(
    "TwoReadersOfTheImage", lambda net, x: net.end(net.norm(net.first(x)) + x)
)
# One batch normalization after two convolutions.
NormOfTwo = network_class(
    "NormOfTwo", lambda net, x: net.end(net.norm(net.second(net.norm(net.first(x)).relu())))
)
# One convolution, on the image and on its own output, without normalizations and each time with one
# of its own.
FirstUsedTwice = network_class(
    "FirstUsedTwice", lambda net, x: net.end(net.first(net.first(x).relu()))
)
NormsOfOne = network_class(
    "NormsOfOne", lambda net, x: net.end(net.other_norm(net.first(net.norm(net.first(x)).relu())))
)
# The first layer's weights are used a second time without the layer.
WeightReadTwice = network_class("WeightReadTwice", _weight_read_twice)
ReflectedBorder = network_class(
    "ReflectedBorder",
    Network.forward,
    lambda net: setattr(net, "first", nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")),
)
Grouped = network_class(
    "Grouped",
    Network.forward,
    lambda net: setattr(net, "first", nn.Conv2d(3, 3, 3, padding=1, groups=3)),
)
# Two convolutions with the same weights.
TiedWeights = network_class(
    "TiedWeights",
    lambda net, x: net.end(net.second(net.first(x).relu())),
    lambda net: setattr(net.second, "weight", net.first.weight),
)
# The first layer's weights are computed from others, at every pass.
SpectralNorm = network_class("SpectralNorm", Network.forward, lambda net: spectral_norm(net.first))
# A hook changes what the first layer returns.
HookedLayer = network_class(
    "HookedLayer",
    Network.forward,
    lambda net: net.first.register_forward_hook(lambda module, inputs, output: output.square()),
)


class PlainNorm(Network):
    """Without weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)


# torch.fx cannot follow them, or their layers share weights or compute them.
KEPT = [
    BranchOnData,
    BranchOnShape,
    RangeOverShape,
    LengthOfBatch,
    Autocast,
    FirstUsedTwice,
    NormsOfOne,
    NormOfTwo,
    TiedWeights,
    SpectralNorm,
]
# torch.fx follows them, but not to where they go.
MISLED = [BranchOnType, WeightReadTwice]


def settle_batch_norms(model: nn.Module, images: torch.Tensor) -> None:
    """Random weights for every batch normalization, and the statistics that these images have
    there.
    """
    randomise_batch_norms(model)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model.train()(images)
    model.eval()
