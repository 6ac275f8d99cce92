"""Networks of integers compute their definition to the last bit, in float32 and in bytes; sums that
may be inexact are refused.
"""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from smoothadv.architectures import get_architecture
from smoothadv.architectures.integers import digest_of_logits
from smoothadv.integer import layers as integer_layers
from smoothadv.integer.arithmetic import only_adds
from smoothadv.integer.layers import Convolution, Maximum, Rescaling, Step, Sum, Total
from smoothadv.integer.network import ByteConvolution, IntegerNetwork, byte_form
from smoothadv.voting.classifier import (
    CompiledClassifier,
    VotingClassifier,
    optimized_for_inference,
)
from smoothadv.voting.counter import VoteCounter, check_integers
from support import slow_integers
from support.integers import (
    convolution,
    extreme_images,
    grey_images,
    house_network,
    is_reference,
    needs_bytes,
    pair,
    quantized,
    slow_logits,
)
from support.refusals import refusal

LIMIT, WIDE = 2**24, {"low": -(2**20), "high": 2**20}
CPU = torch.device("cpu")


def rescaling(multiplier: float, low: int = -LIMIT + 1, high: int = LIMIT - 1) -> Rescaling:
    return Rescaling({"low": low, "high": high}, {"multiplier": torch.tensor([float(multiplier)])})


@st.composite
def networks(draw: st.DrawFn) -> IntegerNetwork:
    """Convolutions of any geometry, a sum of two values with one source, a maximum, a total and
    logits.
    """
    seed, low, groups = (
        draw(st.integers(0, 999)),
        draw(st.sampled_from([0, -127])),
        draw(st.sampled_from([1, 2, 4])),
    )
    kernel, window, side = draw(pair(1, 3)), draw(pair(1, 3)), draw(pair(5, 9))
    geometry = {
        "stride": draw(pair(1, 3)),
        "dilation": draw(pair(1, 3)),
        "padding": draw(pair(0, 3)),
        **WIDE,
    }
    pool = {"kernel": window, "padding": tuple(draw(st.integers(0, size // 2)) for size in window)}
    steps = [
        Step(
            convolution(seed, (8, 3, 3, 3), low=low, high=127 if low else 255, padding=(1, 1)), (0,)
        ),
        Step(convolution(seed + 1, (8, 8 // groups, *kernel), groups=groups, **geometry), (1,)),
        Step(convolution(seed + 2, (8, 8, *kernel), **geometry), (1,)),
        Step(rescaling(draw(st.sampled_from([0.5, 1.5, 1 / 3, -0.5]))), (2,)),
        Step(Sum({"low": low, "high": 2**15 - 1}, {}), (3, 4)),
        Step(
            Maximum({**pool, "stride": draw(pair(1, 3)), "ceil_mode": draw(st.integers(0, 1))}, {}),
            (5,),
        ),
    ]
    values = [torch.zeros(1, 3, *side)]
    try:
        for step in steps:
            step.layer.parts = 1
            values.append(step.layer(*(values[used] for used in step.inputs)))
    except RuntimeError:  # no window fits into the map
        assume(False)
    steps.append(Step(Total({"kernel": tuple(values[-1].shape[2:])}, {}), (6,)))
    steps.append(Step(rescaling(1 / 9, low, 2047), (7,)))
    steps.append(Step(convolution(seed + 3, (5, 8, 1, 1)), (8,)))
    return IntegerNetwork(
        (3, *side), draw(st.sampled_from([0, 1530])), torch.tensor([125, 0, 255]), steps
    ).eval()


@settings(max_examples=25)
@given(networks(), st.integers(0, 999))
def test_any_small_network_is_the_reference_to_the_last_bit(network, seed):
    images = extreme_images(network, 7, seed)
    assert is_reference(network, images) and is_reference(
        network, images.to(memory_format=torch.channels_last)
    )
    assert is_reference(network, 3 * images - 1), "pixels beyond the range are clamped"
    assert torch.equal(network.entrance(images), (images * 255).round() - network.mean)
    record, tensors = network.stored()
    again = IntegerNetwork.read(record, tensors, network.image_shape, 5)
    form = byte_form(network)
    with torch.inference_mode():
        assert torch.equal(torch.cat([again(image[None]) for image in images]), network(images))
        assert form is None or torch.equal(form(images), network(images))


# Architecture, side of the images, their number, and whether statistics are those of images.
HOUSE = [
    ("digits_resnet8", 8, 12, False),
    ("digits_resnet8", 8, 12, True),
    ("cifar_resnet20", 32, 2, False),
    ("cifar_resnet20", 32, 2, True),
    pytest.param("digits_resnet8", 8, 64, False, marks=pytest.mark.slow),
    pytest.param("digits_resnet8", 8, 64, True, marks=pytest.mark.slow),
    # With random statistics its values grow from block to block: the first are 0 beside the last.
    pytest.param("cifar_resnet110", 32, 64, True, marks=pytest.mark.slow),
    pytest.param("resnet50", 64, 64, False, marks=pytest.mark.slow),
    pytest.param("resnet50", 64, 64, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("arch", "side", "count", "is_settled"), HOUSE)
def test_networks_of_the_house_are_the_reference_to_the_last_bit(arch, side, count, is_settled):
    network = house_network(arch, side, 16, is_settled)
    images = extreme_images(network, count)
    expected, threads = slow_logits(network, images), torch.get_num_threads()
    assert len(np.unique(expected, axis=0)) == count
    try:
        channels_last = images.to(memory_format=torch.channels_last)
        for number, batch, some in ((1, 64, channels_last), (2, 7, images), (1, 1, images[:7])):
            torch.set_num_threads(number)
            with torch.inference_mode():
                found = torch.cat([network(part) for part in some.split(batch)]).numpy()
            assert np.array_equal(found, expected[: len(found)])
    finally:
        torch.set_num_threads(threads)


# --------------------------------------------------------------------------------------------------
# proofs


def wide_sum(weights: list[int], bias: int = 0, multiplier: float = 2.0**-10) -> Convolution:
    """One output, each of its weights times an input of its own; a result is that sum times the
    multiplier.
    """
    tensors = {"weight": torch.tensor(weights).view(1, -1, 1, 1), "bias": torch.tensor([bias])}
    return Convolution(WIDE, {**tensors, "multiplier": torch.tensor([multiplier])})


def logits(inputs: int = 1) -> Convolution:
    tensors = {
        "weight": torch.ones(2, inputs, 1, 1),
        "bias": torch.zeros(2),
        "multiplier": torch.ones(2),
    }
    return Convolution({}, tensors)


def proven(*layers: tuple[torch.nn.Module, tuple[int, ...]], mean: int = 0) -> IntegerNetwork:
    """The network of these layers, and logits behind them, for black and white images [C, 1, 3]."""
    first = layers[0][0]
    inputs, outputs = (
        (first.weight.shape[1] * first.groups, len(first.weight))
        if hasattr(first, "weight")
        else (1, 1)
    )
    steps = [Step(layer, of) for layer, of in (*layers, (logits(outputs), (len(layers),)))]
    return IntegerNetwork((inputs, 1, 3), 0, torch.full((inputs,), mean), steps).eval()


@settings(max_examples=25)
@given(
    st.lists(st.integers(-(2**15), 2**15), min_size=1, max_size=12),
    st.integers(0, 2**23),
    st.sampled_from([0, 255]),
)
@example([LIMIT // 255], 0, 0)
@example([LIMIT // 255], 1, 255)
@example([LIMIT // 255] * 128, 127, 0)
def test_worst_image_attains_the_bound_and_a_sum_that_may_reach_the_limit_is_divided(
    weights, bias, mean
):
    """LIMIT // 255 times white is LIMIT - 1; 128 times that and 127 are 2^31 - 1."""
    layer = wide_sum(weights, bias)
    network = proven((layer, (0,)), mean=mean)
    worst = np.where(np.array(weights) > 0, 255, -255).reshape(
        1, -1, 1, 1
    )  # of inputs up to 255 in size
    attained = slow_integers.totals({}, layer.weight.numpy(), layer.bias.numpy(), worst).item()
    assert layer.largest_sum == attained and (layer.parts > 1) == (attained >= LIMIT)
    assert is_reference(network, torch.from_numpy(worst > 0).float().expand(-1, -1, 1, 3))


def test_undivided_sum_beyond_the_limit_is_wrong():
    """The negative control of all these: without the proof, sums do go wrong in some order of their
    terms.
    """
    random, most = np.random.default_rng(0), LIMIT // 255
    found: dict[int, list[float]] = {1: [], 0: []}
    for _ in range(20):
        layer = wide_sum(random.permutation([most, most, most, 1, -most, -most, -most]).tolist())
        proven((layer, (0,)))
        layer.multiplier.fill_(1.0)
        for parts in (layer.parts, 1):
            layer.parts = parts
            found[int(parts > 1)].append(layer(torch.full((1, 7, 1, 1), 255.0)).item())
    assert set(found[1]) == {255.0} and set(found[0]) != {255.0}


@pytest.mark.parametrize(
    ("has_onednn", "library", "mode", "kind"),
    [
        (True, "ONEDNN", "STRICT", torch.float32),
        (True, "ONEDNN", "BF16", torch.float64),
        (True, "DNNL", "any", torch.float64),
        (False, "ONEDNN", "STRICT", torch.float64),
    ],
)
def test_sums_are_in_float64_where_those_of_float32_may_be_rounded(
    has_onednn, library, mode, kind, monkeypatch
):
    """Without oneDNN, PyTorch may take Winograd's convolutions of NNPACK for batches from 16 on."""
    network, exact, kinds = (
        proven((convolution(0, (8, 8, 3, 3), padding=(1, 1), **WIDE), (0,))),
        F.conv2d,
        set(),
    )
    monkeypatch.setenv(f"{library}_DEFAULT_FPMATH_MODE", mode)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", has_onednn)
    monkeypatch.setattr(F, "conv2d", lambda x, *given: (kinds.add(x.dtype), exact(x, *given))[1])
    assert is_reference(network, extreme_images(network, 17)) and kinds == {kind}
    assert not only_adds("cuda") and network(torch.zeros(1, 8, 1, 3)).isfinite().all()
    assert kinds == {kind, torch.float32}, "gradients are asked for"


@pytest.mark.parametrize("bias", [0, LIMIT - 1])
def test_sums_of_groups_are_not_divided_but_may_have_any_bias(bias):
    layer = convolution(0, (4, 3, 1, 1), groups=2, **WIDE)
    layer.bias.fill_(bias)
    network = proven((layer, (0,)))
    assert is_reference(network, extreme_images(network, 5))


def in_groups(inputs: int, size: int) -> Convolution:
    weight = torch.full((2, inputs, 1, 1), size)
    return Convolution(
        {**WIDE, "groups": 2},
        {"weight": weight, "bias": torch.zeros(2), "multiplier": torch.ones(2)},
    )


UNPROVEN = {
    "groups": lambda: [(in_groups(1, LIMIT // 254), (0,))],
    "groups of two inputs": lambda: [(in_groups(2, LIMIT // 255), (0,))],
    "32 bits": lambda: [(wide_sum([LIMIT // 255] * 128, 128), (0,))],
    "511.6, which is 512": lambda: [(rescaling(511.6 / 255), (0,)), (wide_sum([2**15 + 1]), (1,))],
    "511.6 of a convolution": lambda: [
        (wide_sum([1], 0, 511.6 / 255), (0,)),
        (wide_sum([2**15 + 1]), (1,)),
    ],
    "one input": lambda: [(wide_sum([LIMIT // 254]), (0,))],
    "sum": lambda: [
        (rescaling(33e3), (0,)),
        (rescaling(-33e3), (0,)),
        (Sum({"low": -9, "high": 9}, {}), (1, 2)),
    ],
    "total": lambda: [(rescaling(-33e3), (0,)), (Total({"kernel": (1, 3)}, {}), (1,))],
    "low above 0": lambda: [(rescaling(1.0, 5, 9), (0,))],
    "high below 0": lambda: [(rescaling(1.0, -9, -5), (0,))],
    "high below low": lambda: [(Sum({}, {}), (0, 0))],
    "window in the padding": lambda: [
        (Maximum({"kernel": (2, 2), "padding": (1, 1), "dilation": (3, 3)}, {}), (0,))
    ],
    "value that comes later": lambda: [(Sum({"high": 9}, {}), (0, 2))],
    "value of its own": lambda: [(Sum({"high": 9}, {}), (0, 1))],
    "one input for a sum of two": lambda: [(Sum({"high": 9}, {}), (0,))],
    "logits before the end": lambda: [(logits(), (0,))],
}


@pytest.mark.parametrize("layers", UNPROVEN.values(), ids=UNPROVEN)
def test_network_whose_sums_are_not_proven_is_refused(layers):
    with pytest.raises(
        ValueError, match=r"2\^24|2\^31|clamps to|in the padding|reads the values|logits must come"
    ):
        proven(*layers())


# --------------------------------------------------------------------------------------------------
# probe


def with_halves_upwards(
    network: IntegerNetwork, images: torch.Tensor, patch: pytest.MonkeyPatch
) -> torch.Tensor:
    patch.setattr(integer_layers, "rounded", lambda x: (x + 0.5).floor())
    return network(images)


def with_wrong_other_sums(
    network: IntegerNetwork, images: torch.Tensor, patch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Of all that the layers do not read of these images, whose logits stay as they are: only the
    sums show it.
    """
    known, exact = [], F.conv2d
    patch.setattr(F, "conv2d", lambda x, *given: (known.append(x), exact(x, *given))[1])
    logits = network(images)

    def other(x: torch.Tensor, *given: object) -> torch.Tensor:
        return exact(x, *given) + (
            x.dtype == torch.float32 and not any(torch.equal(x, one) for one in known)
        )

    patch.setattr(F, "conv2d", other)
    return logits


def with_other_rows(
    network: IntegerNetwork, images: torch.Tensor, patch: pytest.MonkeyPatch
) -> torch.Tensor:
    found = network(images)
    found[8:] += 1  # beyond the images of the probe
    return found


def with_levels_cut(
    network: IntegerNetwork, images: torch.Tensor, patch: pytest.MonkeyPatch
) -> torch.Tensor:
    """The images of the probe have whole grey levels, which are as they were."""
    return network((images * 255 + 0.01).floor() / 255)


@pytest.fixture(scope="module")
def digits() -> IntegerNetwork:
    return house_network("digits_resnet8", 8, 16, is_settled=True)


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_probe_accepts_exact_kernels_at_any_batch(digits, batch):
    check_integers(VoteCounter([digits], [10], batch, CPU), digits)
    assert digits.probe == digest_of_logits(
        torch.from_numpy(slow_logits(digits, digits.probe_images()))
    )


@pytest.mark.parametrize(
    "fault",
    [
        with_halves_upwards,
        with_wrong_other_sums,
        with_other_rows,
        with_levels_cut,
    ],
)
def test_probe_refuses_another_function(digits, fault, monkeypatch):
    counter = VoteCounter([lambda images: fault(digits, images, monkeypatch)], [10], 20, CPU)
    assert "--batch than 20" in refusal(check_integers, counter, digits)


SHAPE = (1, 8, 8)
IMAGES = grey_images(20, SHAPE)


def digits_voter(weight_bits: int = 7) -> VotingClassifier:
    torch.manual_seed(0)
    classifier = get_architecture("digits_resnet8", "digits", "normalize")
    return optimized_for_inference(quantized(classifier, IMAGES, weight_bits=weight_bits), CPU)


def choose_form(voter: VotingClassifier) -> None:
    voter.use_fast_form(partial(check_integers, VoteCounter([voter], [10], len(IMAGES), CPU)))


def with_rounded_large_sums(
    layer: ByteConvolution, x: torch.Tensor, *shortcut: torch.Tensor
) -> torch.Tensor:
    """Random integers show it, and images do not."""
    exact = Convolution.forward(layer, x.float(), *shortcut)
    return exact + (not layer.in_float64 and x.float().mean() > 100)


def without_operator(layer: ByteConvolution, *given: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("could not create a primitive")


@needs_bytes
@pytest.mark.parametrize("fault", [None, with_rounded_large_sums, without_operator])
def test_bytes_vote_where_they_are_exact_and_floats_elsewhere(fault, monkeypatch, recwarn):
    voter = digits_voter()
    if fault is not None:
        monkeypatch.setattr(ByteConvolution, "forward", fault)
    choose_form(voter)
    assert (voter.fast is None) == (fault is not None)
    is_said = any("slower ones vote" in str(each.message) for each in recwarn)
    assert is_said == (fault is with_rounded_large_sums)
    if fault is None:
        kinds = [
            type(layer) is ByteConvolution
            for layer in voter.fast.layers
            if hasattr(layer, "weight")
        ]
        assert kinds == [False, *[True] * (len(kinds) - 2), False], (
            "the first and the last one read more"
        )


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
    voter.use(byte_form(eager.integers))
    with torch.inference_mode():
        assert torch.equal(voter(IMAGES), expected)


@needs_bytes
@pytest.mark.parametrize(
    ("channels", "weight", "parts", "high"),
    [(114, 64, 1, 2**15), (115, 64, 2, 2**15), (115, 64, 2, 255), (4, 65, 0, 2**15)],
)
def test_sums_in_parts_are_bytes_and_wide_weights_are_not(channels, weight, parts, high):
    """The sums of flat images reach 114 or 115 * 9 * 64 * 255, beside 2^24."""

    def step(number: int, weight: torch.Tensor, scale: float, high: int) -> Step:
        tensors = {
            "multiplier": torch.full((len(weight),), float(scale)),
            "bias": torch.arange(len(weight)) % 4 * 2**13,
        }
        return Step(Convolution({"high": high}, {"weight": weight, **tensors}), (number,))

    spread = torch.arange(weight - 3, weight + 1).view(4, 1, 1, 1).expand(4, channels, 3, 3)
    steps = [
        step(0, torch.full((channels, 1, 1, 1), 256), 2**-8, 255),
        step(1, spread, 2**-10, high),
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
