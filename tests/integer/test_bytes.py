"""Blocks of bytes: convolutions that add a shortcut, in float32 and by oneDNN's operators, on
processors of several kinds.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smoothadv.integer.layers import Convolution, Step, Sum, Total
from smoothadv.integer.network import ByteConvolution, IntegerNetwork, byte_form
from support.integers import (
    convolution,
    extreme_images,
    is_reference,
    needs_bytes,
    pair,
    slow_logits,
)


@st.composite
def networks_of_bytes(draw: st.DrawFn) -> IntegerNetwork:
    """A block with a shortcut, as ``conversion`` makes it, of any geometry; the shortcut's value is
    perhaps read again.
    """
    seed, kernel = draw(st.integers(0, 999)), draw(st.sampled_from([1, 3]))
    byte = {"low": 0, "high": 255, "powers": True}
    around = {"padding": (kernel // 2, kernel // 2), "shortcut": 1}
    side, again = draw(pair(4, 9)), draw(st.booleans())
    low, high = draw(st.sampled_from([(-127, 127), (0, 99), (0, 255)]))
    middle = {"low": low, "high": high, "powers": True}
    steps = [
        Step(convolution(seed, (8, 3, 3, 3), padding=(1, 1), **byte), (0,)),
        Step(convolution(seed + 1, (8, 8, 3, 3), padding=(1, 1), **middle), (1,)),
        Step(convolution(seed + 2, (8, 8, kernel, kernel), **around, **byte), (2, 1)),
        Step(
            convolution(seed + 3, (8, 8, kernel, kernel), **around, **byte),
            (3, 3) if again else (2, 3),
        ),
        Step(Sum({"high": 510}, {}), (4, 1) if again else (4, 3)),
        Step(Total({"kernel": side}, {}), (5,)),
        Step(convolution(seed + 4, (5, 8, 1, 1)), (6,)),
    ]
    return IntegerNetwork((3, *side), 383, torch.tensor([125, 0, 255]), steps).eval()


@settings(max_examples=25)
@given(networks_of_bytes(), st.integers(0, 999))
def test_any_block_of_bytes_is_the_reference_to_the_last_bit(network, seed):
    """Also where its value is needed again, whose place oneDNN's sum would take."""
    images = extreme_images(network, 7, seed)
    assert is_reference(network, images)
    form = byte_form(network)
    if form is not None:
        with torch.inference_mode():
            assert torch.equal(form(images), network(images))
            assert form.inexact_layer(images) is None
        fused = [getattr(layer, "is_fused", False) for layer in form.layers[2:4]]
        assert fused == [min(network.ranges[n][0] for n in network.inputs[i]) >= 0 for i in (2, 3)]


@needs_bytes
@pytest.mark.parametrize(
    ("low", "high", "inputs", "is_fused"),
    [
        (0, 255, (1, 2), True),
        (-9, 9, (1, 2), False),
        (0, 999, (1, 2), False),
        (0, 255, (2, 2), True),
        (0, 255, (2, 1), True),
    ],
)
def test_fused_operators_add_shortcuts_of_bytes_alone(low, high, inputs, is_fused):
    """oneDNN's sum reads 0..255 and takes the place of it, which may be needed. An image with a NaN
    has no class, and infinite values are clamped, as the definition says.
    """
    byte, powers = {"low": 0, "high": 255, "powers": True}, {}
    if inputs[0] == 2:
        powers["powers"] = True
    steps = [
        Step(convolution(0, (8, 3, 1, 1), **byte), (0,)),
        Step(convolution(1, (8, 8, 1, 1), low=low, high=high, **powers), (1,)),
        Step(convolution(2, (8, 8, 1, 1), shortcut=1, **byte), inputs),
        Step(convolution(3, (8, 8, 1, 1), shortcut=1, **byte), (3, 3 if inputs[1] == 2 else 1)),
        Step(Total({"kernel": (5, 5)}, {}), (4,)),
        Step(convolution(4, (5, 8, 1, 1)), (5,)),
    ]
    network = IntegerNetwork((3, 5, 5), 383, torch.tensor([125, 0, 255]), steps).eval()
    form, images = byte_form(network), extreme_images(network, 9)
    images[1, 2, 4, 4], images[2, 0, 0, 0] = torch.nan, torch.inf
    with torch.inference_mode():
        found, expected = form(images), network(images)
    assert form.layers[2].is_fused == is_fused
    assert form.layers[1].is_fused == bool(powers), "others are rounded with the bias"
    assert found.isnan().any(1).nonzero().tolist() == [[1]] and found[1].isnan().all()
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    ("weight", "multiplier", "most", "words"),
    [
        (1, 0.5, 255, None),
        (1, 1, 255, None),
        (1, 2, 255, "above 1"),
        (1, 0.75, 255, "no power of 2"),
        (1, -0.5, 255, "no power of 2"),
        (1, 2.0**-16, 255, None),
        (1, 2.0**-16, 256, "may exceed 2\\^24"),
        (2**15, 2.0**-8, 2**15 + 200, "may exceed 2\\^24"),
    ],
)
def test_sum_of_a_convolution_and_a_shortcut_is_proven(weight, multiplier, most, words):
    """255 w + r / m must stay below 2^24."""
    tensors = {
        "weight": torch.full((1, 1, 1, 1), float(weight)),
        "bias": torch.zeros(1),
        "multiplier": torch.tensor([float(multiplier)]),
    }
    layer = Convolution({"high": 255, "shortcut": 1}, tensors)
    if words is None:
        assert layer.range_of((0, 255), (0, most)) == (0, 255)
    else:
        with pytest.raises(ValueError, match=words):
            layer.range_of((0, 255), (0, most))


def test_a_shortcut_has_the_shape_of_the_result():
    """PyTorch would broadcast it; kernels would read what lies beside it."""
    layer = convolution(0, (8, 3, 1, 1), low=0, high=255, shortcut=1)
    layer.range_of((0, 255), (0, 255))
    with pytest.raises(ValueError, match=r"a shortcut of \(8, 1, 1\)"):
        layer(torch.ones(2, 3, 4, 4), torch.ones(2, 8, 1, 1))


def identity(channels: int, **given: int) -> Convolution:
    tensors = {"weight": torch.ones(channels, 1, 1, 1), "bias": torch.zeros(channels)}
    return Convolution(
        {"groups": channels, **given}, {**tensors, "multiplier": torch.ones(channels)}
    )


PAIRS = [(64, 64), (65, 64), (127, 2), (127, 127), (-65, -65), (-64, -64), (63, -128)]


@st.composite
def layers_at_limits(draw: st.DrawFn) -> tuple[IntegerNetwork, torch.Tensor]:
    """A convolution that reads bytes, with weights that make its largest sums, and images, the last
    of them white; the logits are all of its results.
    """
    channels, kernel, side = draw(st.integers(1, 5)), draw(pair(1, 3)), draw(pair(1, 4))
    groups, outputs = draw(st.sampled_from([1, channels])), channels * draw(st.integers(1, 4))
    geometry = {"stride": draw(pair(1, 2)), "padding": draw(pair(0, 2)), "dilation": (1, 1)}
    if draw(st.booleans()):
        outputs, kernel = channels, (1, 3)
        geometry = {"padding": (0, 1), "shortcut": 1}
    places = zip(side, geometry["padding"], kernel)
    assume(all(size + 2 * more >= reach for size, more, reach in places))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    values = draw(st.sampled_from(PAIRS))
    weight = torch.from_numpy(random.choice(values, (outputs, channels // groups, *kernel)))
    # White then makes results of 100 or so, which show each product.
    bias = 100 - draw(st.sampled_from([0, 255])) * weight.sum((1, 2, 3))
    multiplier = torch.full((outputs,), 2.0 ** -draw(st.sampled_from([0, 6])))
    low, high = draw(st.sampled_from([(0, 255), (-99, 255), (-(2**20), 2**20)]))
    layer = Convolution(
        {**geometry, "groups": groups, "low": low, "high": high},
        {"weight": weight, "bias": bias, "multiplier": multiplier},
    )
    steps = [
        Step(identity(channels, high=255), (0,)),
        Step(layer, (1,) * layer.arguments),
        Step(identity(outputs), (2,)),
    ]
    network = IntegerNetwork((channels, *side), 0, torch.zeros(channels), steps).eval()
    levels = random.integers(0, 256, (draw(st.sampled_from([1, 2, 17])), channels, *side))
    return network, torch.from_numpy(levels).index_fill(0, torch.tensor(len(levels) - 1), 255) / 255


@given(layers_at_limits())
@torch.no_grad()
def test_no_form_differs_from_the_reference(made):
    """Saturation in 16 bits shows where pairs of products are largest, in few images."""
    network, images = made
    expected = slow_logits(network, images)
    for form in (network, byte_form(network)):
        for batch in (len(images), 1) if form is not None else ():
            found = torch.cat([form(some) for some in images.split(batch)]).numpy()
            assert np.array_equal(found, expected)


@needs_bytes
@pytest.mark.parametrize(
    "instructions",
    [
        "AVX2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("AVX512_CORE", "AVX512_CORE_VNNI")
        ),
    ],
)
def test_so_it_is_with_the_kernels_of_older_processors(instructions, warm, tmp_path):
    """Which saturate: of two products of 255 and 127, two of 255 and 64 are below 2^15."""
    program = (
        "import sys; sys.path.append(sys.argv[1]); import conftest; "
        "from hypothesis import settings; "
        "settings.register_profile('few', settings.default, max_examples=25); "
        "settings.load_profile('few'); from test_bytes import *; "
        "test_no_form_differs_from_the_reference(); "
        "test_any_block_of_bytes_is_the_reference_to_the_last_bit()"
    )
    limits = {"ONEDNN_MAX_CPU_ISA": instructions, "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    process = warm.start(command, tmp_path, **limits)
    assert process.communicate()[1] == "" and process.returncode == 0


@needs_bytes
@pytest.mark.parametrize(
    ("weight", "given", "is_proven"),
    [
        (64, {}, True),
        (-64, {"stride": (1, 2)}, True),
        (65, {}, False),
        (-65, {}, False),
        (64, {"dilation": (1, 2)}, False),
        (64, {"stride": (1, 4)}, False),
        (64, {"stride": (4, 1)}, True),
    ],
)
def test_a_bound_decides_what_is_computed_in_bytes(weight, given, is_proven):
    """No trial: images of zeros show nothing. With a stride of 4 there is one column of results."""
    tensors = {"weight": torch.zeros(2, 2, 1, 1), "bias": torch.zeros(2)}
    tensors["weight"][1, 1] = weight
    layer = Convolution({**given, "high": 255}, {**tensors, "multiplier": torch.ones(2)})
    steps = [Step(identity(2, high=255), (0,)), Step(layer, (1,)), Step(identity(2), (2,))]
    form = byte_form(IntegerNetwork((2, 4, 4), 0, torch.zeros(2), steps))
    # The first layer reads -255..255, the last one bytes.
    assert [type(one) is ByteConvolution for one in form.layers] == [False, is_proven, True]
