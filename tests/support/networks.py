"""Networks that folding must leave right: what torch.fx can follow, what it cannot, and what it follows wrongly."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from support.released import randomise_batch_norms


class Network(nn.Module):
    """Two convolutions of 3 channels, a ReLU and a mean per channel; subclasses run them another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.other_norm = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        randomise_batch_norms(self)

    def end(self, maps: torch.Tensor) -> torch.Tensor:
        return maps.relu().mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.norm(self.first(x)))


class BranchOnData(Network):
    def forward(self, x):
        return self.end(self.first(x)) if x.mean() > 0.5 else self.end(self.second(x))


class BranchOnShape(Network):
    def forward(self, x):
        return self.end(self.first(x)) if x.shape[2] == 8 else self.end(self.second(x))


class RangeOverShape(Network):
    def forward(self, x):
        return self.end(sum(self.first(x).roll(shift, 2) * shift for shift in range(x.shape[2])))


class LengthOfBatch(Network):
    def forward(self, x):
        return self.norm(self.first(x)).reshape(len(x), -1)


class Autocast(Network):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.end(self.norm(self.first(x)))


class FurtherArgument(Network):
    def forward(self, x, scale=None):
        return self.end(self.norm(self.first(x)))


class BranchOnType(Network):
    def forward(self, x):
        maps = self.norm(self.first(x))
        return self.end(maps) if isinstance(x, torch.Tensor) else self.end(-maps)


class NormAfterSum(Network):
    """A batch normalization that follows no convolution, and one that follows an activation."""

    def forward(self, x):
        return self.end(self.other_norm(self.norm(self.first(x) + x).relu()))


class NormFirst(Network):
    def forward(self, x):
        return self.end(self.first(self.norm(x)))


class TwoConsumers(Network):
    """The convolution's output is read before its normalization, too."""

    def forward(self, x):
        maps = self.first(x)
        return self.end(self.norm(maps) + maps)


class TwoReadersOfTheImage(Network):
    def forward(self, x):
        return self.end(self.norm(self.first(x)) + x)


class NormOfTwo(Network):
    """One batch normalization after two convolutions."""

    def forward(self, x):
        return self.end(self.norm(self.second(self.norm(self.first(x)).relu())))


class ReflectedBorder(Network):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")


class Grouped(Network):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1, groups=3)


class PlainNorm(Network):
    """Without weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False)
        randomise_mean(self.norm)


class FirstUsedTwice(Network):
    """One convolution, on the image and on its own output."""

    def forward(self, x):
        return self.end(self.first(self.first(x).relu()))


class NormsOfOne(Network):
    """One convolution, each time with a normalization of its own."""

    def forward(self, x):
        return self.end(self.other_norm(self.first(self.norm(self.first(x)).relu())))


class TiedWeights(Network):
    """Two convolutions with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.end(self.second(self.first(x).relu()))


class SpectralNorm(Network):
    """The first layer's weights are computed from others, at every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(self.first)


class HookedLayer(Network):
    """A hook changes what the first layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, inputs, output: output.square())


class WeightReadTwice(Network):
    """The first layer's weights are used a second time without the layer."""

    def forward(self, x):
        maps = self.norm(self.first(x)).relu()
        return self.end(nn.functional.conv2d(maps, self.first.weight, padding=1))


def randomise_mean(norm: nn.BatchNorm2d) -> None:
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)


def settle_batch_norms(model: nn.Module, images: torch.Tensor) -> None:
    """Random weights for every batch normalization, and the statistics that these images have there."""
    randomise_batch_norms(model)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model.train()(images)
    model.eval()
