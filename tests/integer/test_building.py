"""Networks of integers are built of any network that has the layers, and come close to it; others
are refused.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.integer.conversion import largest_values, read_network
from smoothadv.integer.layers import Convolution, Sum
from smoothadv.integer.network import IntegerNetwork
from support.integers import grey_images, quantized, slow_logits, with_entrance
from support.networks import TwoReadersOfTheImage
from support.refusals import refusal

IMAGES = grey_images(48, (3, 8, 8))


class Small(nn.Module):
    """Layers that ``wire(self, maps)`` connects; what it returns, or its mean, is classified."""

    is_flat = False

    def __init__(self, wire, width: int = 8, change=lambda network: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wire, self.first = wire, nn.Conv2d(3, width, 3, padding=1)
        self.a, self.b, self.c = (nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.pool, self.drop, self.norm = nn.MaxPool2d(3, 2, 1), nn.Dropout(), nn.BatchNorm2d(width)
        self.hidden, self.fc = nn.Linear(width, width), nn.Linear(width, 5)
        with torch.no_grad():
            change(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.wire(self, self.first(images))
        return self.fc(found if self.is_flat else found.mean((2, 3)))


def change(**factors: float):
    """Multiplies weights or biases, such as a_bias, by a factor."""

    def work(network: Small) -> None:
        for name, factor in factors.items():
            layer, _, kind = name.partition("_")
            getattr(getattr(network, layer), kind).mul_(factor)

    return work


def flat(network: Small) -> None:
    network.is_flat = True


def without_variance(network: Small) -> None:
    network.norm.running_var[:4] = 0


def residual(n: Small, x: torch.Tensor) -> torch.Tensor:
    return (n.a(x.relu()) + x).relu()


def plain(n: Small, x: torch.Tensor) -> torch.Tensor:
    return n.a(x.relu()).relu()


def read_twice(n: Small, x: torch.Tensor) -> torch.Tensor:
    y = x + n.a(x.relu())
    return (y + n.b(y.relu()) + y).relu()


def around_pool(n: Small, x: torch.Tensor) -> torch.Tensor:
    y = n.pool(residual(n, x))
    return (n.b(y) + y).relu()


def cancel(network: Small) -> None:
    """Sums whose terms cancel: both bounds are more than a thousand times what occurs."""
    network.first.weight[1:], network.first.bias[1:] = (
        network.first.weight[:1].clone(),
        network.first.bias[:1].clone(),
    )
    for layer in (network.a, network.b):
        layer.weight[:, ::2] = 2000.0
        layer.weight[:, 1::2] = -2000.0
        layer.bias.copy_(torch.linspace(-500, 500, 8))


BUILT = {
    "no sum": (plain,),
    "a sum": (residual,),
    "a shortcut around a maximum": (around_pool,),
    "a convolution behind a maximum of a sum": (lambda n, x: n.b(n.pool(residual(n, x))).relu(),),
    "the same of 160 channels, whose sums are divided": (
        lambda n, x: n.b(n.pool(residual(n, x))).relu(),
        160,
    ),
    "two sums that read one value": (read_twice,),
    "three terms": (lambda n, x: (n.a(x.relu()) + x + n.b(x.relu())).relu(),),
    "twice the same term": (lambda n, x: (x + x).relu(),),
    "a ReLU behind a maximum": (lambda n, x: n.a(n.pool(x).relu()).relu(),),
    "several readers of a convolution": (lambda n, x: n.a(x) + n.b(x.relu()) + x,),
    "hidden layers, dropout": (
        lambda n, x: n.drop(n.hidden(x.relu().mean((2, 3))).relu()),
        8,
        flat,
    ),
    "a dropout that is off": (
        lambda n, x: n.a(F.dropout(F.dropout(x.relu(), 0.5, n.training), training=False)).relu(),
    ),
    "overwriting that nobody sees": (lambda n, x: n.a(F.relu(x, inplace=True)).relu_(),),
    "a ReLU whose input has a name": (lambda n, x: n.a(F.relu(input=x)).relu(),),
    "dead channels": (plain, 8, lambda n: (n.a.weight[:3].zero_(), n.a.bias[:2].zero_())),
    "dead layer": (plain, 8, change(a_weight=0.0, a_bias=0.0)),
    "huge biases": (residual, 8, change(a_bias=1e4)),
    "biases of logits far beyond their weights": (plain, 8, change(fc_weight=1e-6)),
    "no variance": (lambda n, x: n.norm(n.a(x.relu())).relu(), 8, without_variance),
    "bounds far beyond the sums that occur": (lambda n, x: (n.a(x) + n.b(x)).relu(), 8, cancel),
}


def _convolutions(network: IntegerNetwork) -> list[Convolution]:
    return [layer for layer in network.layers if isinstance(layer, Convolution)]


@pytest.mark.parametrize("made", BUILT.values(), ids=BUILT)
@pytest.mark.parametrize("bits", [7, 8])
def test_integers_come_close_to_the_float_network(made, bits):
    """Within 2 % of the largest logit with weights of 8 bits; a bit less doubles their rounding."""
    classifier = with_entrance(Small(*made), 3)
    network = quantized(classifier, IMAGES, weight_bits=bits)
    with torch.inference_mode():
        expected, found = classifier(IMAGES), network(IMAGES)
    scale = (expected * found).sum() / found.square().sum()  # logits are up to a factor
    assert (found * scale - expected).abs().max() < {7: 0.04, 8: 0.02}[bits] * expected.abs().max()
    largest = max(float(layer.weight.abs().max()) for layer in _convolutions(network)[:-1])
    assert 32 < largest <= (64 if bits == 7 else 127)
    assert all(layer.has_powers for layer in _convolutions(network))
    assert torch.equal(found[:4], torch.from_numpy(slow_logits(network, IMAGES[:4])))
    assert network.layers[-1].weight.abs().max() <= 255


REFUSED = {
    "gelu": lambda n, x: F.gelu(x),
    "LayerNorm": lambda n, x: n.normal(x),
    "sigmoid": lambda n, x: x.sigmoid(),
    "dropout": lambda n, x: F.dropout(x.relu()),
    "dropout of 0.1": lambda n, x: F.dropout(x.relu(), 0.1, True),
    "first convolution has groups": lambda n, x: x,
    "linear layer follows a map": lambda n, x: x.flatten(1),
    "'add' reads 'first', which is overwritten": lambda n, x: n.a(x.relu_()) + x,
    "reads 'first', which is overwritten before": lambda n, x: n.a(F.relu(x, True)) + x,
    "which is overwritten before": lambda n, x: n.a(n.over(x)) + x,
    "weight holds other numbers": plain,
    "padding is (300, 300)": plain,
}


def unsuitable(network: Small, words: str) -> None:
    network.normal, network.over = nn.LayerNorm(8), nn.ReLU(inplace=True)
    if "groups" in words:
        network.first = nn.Conv2d(3, 9, 3, groups=3)
        network.fc = nn.Linear(9, 5)
    if "map" in words:
        network.fc, network.is_flat = nn.Linear(8 * 64, 5), True
    if "numbers" in words:
        network.a.weight[0] = float("nan")
    if "padding" in words:
        network.a = nn.Conv2d(8, 8, 3, padding=300, dilation=300)


@pytest.mark.parametrize(("words", "wire"), REFUSED.items(), ids=REFUSED)
def test_network_without_an_integer_form_is_refused_with_the_layer(words, wire):
    classifier = with_entrance(Small(wire, 8, lambda network: unsuitable(network, words)), 3)
    assert words.split(" of 0")[0] in refusal(
        quantized, classifier, IMAGES, names="no integer form"
    )


def test_sum_with_the_image_is_refused():
    classifier = with_entrance(nn.Sequential(TwoReadersOfTheImage(), nn.Linear(3, 5)), 3)
    assert "sum reads the image" in refusal(quantized, classifier, IMAGES)


def test_ranges_are_those_of_all_columns():
    """Many maps have a power of 2 as the number of columns, as a sample taken at even distances
    may.
    """
    images = torch.zeros(64, 3, 32, 32)
    images[..., 1:] = 1.0
    network = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)
    )
    with torch.no_grad():
        network[0].weight.fill_(1.0), network[0].bias.zero_()
    read = read_network(with_entrance(network, 3), (3, 32, 32))
    (largest,) = {
        value
        for operation, value in largest_values(read, [images]).items()
        if operation.kind == "relu"
    }
    assert largest == pytest.approx(3 * (1 - 128 / 255) / 0.25)


def error_of(wire, width: int = 8, change=lambda network: None) -> tuple[float, IntegerNetwork]:
    """The largest error of the logits of integers, by their standard deviation, and these."""
    network, images = with_entrance(Small(wire, width, change), 3), grey_images(64, (3, 6, 6), 0)
    made = quantized(network, images)
    with torch.inference_mode():
        floats, found = network(images), made(images)
    return float((floats - found).abs().max() / floats.std()), made


def block(n: Small, x: torch.Tensor) -> torch.Tensor:
    made = x.relu()
    return (n.a(made) + made).relu()


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 0.0])
def test_a_convolution_of_any_size_takes_its_shortcut(size):
    """Weights that change its sum by little get fewer bits, so that the sum is exact; the logits
    are those of the float network up to the rounding of values.
    """
    error, made = error_of(block, change=lambda network: network.a.weight.uniform_(-size, size))
    (number,) = (n for n, layer, _ in made.steps() if layer.arguments == 2)
    assert number == 2 and error < 0.05


def test_a_sum_that_would_be_inexact_with_its_shortcut_is_one_of_two_values():
    """9 * 128 products of 255 and the largest weight exceed 2^24."""
    _, made = error_of(block, 128, lambda network: network.a.weight.fill_(1.0))
    kinds = [type(layer) for _, layer, _ in made.steps()]
    assert Sum in kinds and all(layer.arguments == 1 for layer in made.layers[:2])


def terms(n: Small, x: torch.Tensor) -> torch.Tensor:
    made = x.relu()
    return (n.a(made) + n.b(made)).relu()


def many_times_their_sum(size: float, tiny: float | None = None):
    """relu(k A x + (1/2 - k A) x), where A is random: the terms are many times larger than the
    sum. Those of one channel may be tiny.
    """

    def work(network: Small) -> None:
        one, other = network.a, network.b
        one.weight.mul_(size)
        other.weight.copy_(nn.init.dirac_(torch.empty_like(one.weight)) / 2 - one.weight)
        for layer in (one, other):
            layer.bias.zero_()
            if tiny is not None:
                layer.weight[0] = tiny

    return work


@pytest.mark.parametrize("size", [1, 20, 200])
def test_terms_may_be_many_times_larger_than_their_sum(size):
    """What images show sets their range."""
    error, made = error_of(terms, change=many_times_their_sum(size))
    (summand,) = (made.inputs[n - 1][1] for n, one, _ in made.steps() if one.arguments == 2)
    low, high = made.ranges[summand]
    assert error < 0.1 and low == -high and (high > 1023) == (size > 1)


def gate(n: Small, x: torch.Tensor) -> torch.Tensor:
    """A map, plus a number for each of its channels."""
    made = x.relu()
    return (n.a(made) + n.b(made.mean((2, 3), keepdim=True))).relu()


@pytest.mark.parametrize(
    "made",
    [(gate,), (terms, 32, many_times_their_sum(60, tiny=1e-7))],
    ids=["gate", "tiny channel"],
)
def test_a_term_that_is_no_shortcut_is_summed_by_a_layer_of_its_own(made):
    """Kernels would read beyond one of another shape. With a floor of multipliers that leaves room
    for the shortcut, 288 weights of a tiny channel would add an error of more than .2 levels.
    """
    error, network = error_of(*made)
    assert error < 0.1 and any(isinstance(layer, Sum) for layer in network.layers)
