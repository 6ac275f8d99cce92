"""The classifier that votes is the trained one, also if it is folded, in another precision, or
compiled. An ensemble is the mean of its members, and votes as that mean does where members are left
out.
"""

import copy
import math
import sys
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smoothadv.architectures import ARCHITECTURES, INPUT_LAYERS, get_architecture
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.architectures.input_layers import Center, Normalize
from smoothadv.base.devices import batch_that_fits
from smoothadv.base.errors import UserError
from smoothadv.datasets import describe_dataset
from smoothadv.noise import GaussianNoise
from smoothadv.training.execution import CompiledForSizes
from smoothadv.voting.classifier import (
    PRECISIONS,
    CompiledClassifier,
    VotingClassifier,
    call_compiled,
    default_batch,
    end_compiling,
    optimized_for_inference,
)
from smoothadv.voting.counter import VoteCounter, check_repeatable
from smoothadv.voting.folding import fold
from support import networks
from support.compiler import needs_compiler
from support.compiler import own_compiler_cache as own_compiler_cache
from support.models import LinearClassifier, Recorder
from support.networks import KEPT, MISLED, settle_batch_norms
from support.patience import wait_for

CPU = torch.device("cpu")
STATISTICS = (0.9, 0.5, 0.2), (0.2, 0.3, 0.4)


def smallest_of_each_family() -> list[str]:
    families: dict[str, list[str]] = {}
    for name in ARCHITECTURES:
        families.setdefault(name.rstrip("0123456789_"), []).append(name)
    return [min(names, key=lambda name: (len(name), name)) for names in families.values()]


def fitting(arch: str, input_layer: str) -> tuple[nn.Module, torch.Tensor]:
    """In float64, as if trained, for the first dataset that it does not refuse; and images, some of
    them extreme.
    """
    torch.manual_seed(0)
    for dataset in ("cifar10", "mnist", "digits", "imagenet"):
        description = describe_dataset(dataset)
        try:
            model = get_architecture(arch, description, input_layer).double()
        except UserError:
            continue
        images = torch.rand(8, *description.image_shape, dtype=torch.float64)[..., :64, :64]
        settle_batch_norms(model, images)
        images[0], images[1] = 1.0, images[1] + torch.randn_like(images[1])
        return model, images[:3]
    raise AssertionError(f"{arch} fits none of the datasets")


@torch.no_grad()
def deviation(model: nn.Module, other: nn.Module, images: torch.Tensor) -> float:
    """The largest difference of any two outputs, in units of their spread."""
    expected = model(images)
    return float((other(images) - expected).abs().max() / expected.std())


def norms_in(model: nn.Module) -> int:
    return sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())


@pytest.mark.parametrize(
    ("arch", "input_layer"),
    [
        *((arch, "normalize") for arch in smallest_of_each_family()),
        *(
            ("digits_resnet8", input_layer)
            for input_layer in INPUT_LAYERS
            if input_layer != "normalize"
        ),
    ],
)
def test_folding_leaves_the_logits_of_every_architecture(arch, input_layer):
    model, images = fitting(arch, input_layer)
    folded = fold(copy.deepcopy(model))
    assert deviation(model, folded, images) < 1e-10
    # A wide network's norms come first in its blocks: those behind sums and at the end stay.
    left = {"wide_resnet16_4": 6}.get(arch, 0)
    assert norms_in(folded) == left and (norms_in(model) > left or arch == "lenet")
    # Negative control: a convolution that is off by a millionth would be noticed.
    with torch.no_grad():
        next(parameter for parameter in folded.parameters() if parameter.dim() == 4)[0] *= 1 + 1e-6
    assert deviation(model, folded, images) > 1e-9


FOLDED = [
    networks.Network,
    networks.NormAfterSum,
    networks.NormFirst,
    networks.TwoConsumers,
    networks.Grouped,
    networks.TwoReadersOfTheImage,
    networks.ReflectedBorder,
    networks.PlainNorm,
    networks.FurtherArgument,
]
ENTRANCES = [Normalize, Center, None]


def behind(
    entrance: type[nn.Module] | None, kind: type[nn.Module]
) -> tuple[nn.Module, torch.Tensor]:
    """A small network in float64 behind an input layer; and images with 0.3 of noise."""
    torch.manual_seed(1)
    network = kind().double()
    model = network if entrance is None else nn.Sequential(entrance(*STATISTICS), network)
    images = torch.rand(4, 3, 8, 8, dtype=torch.float64)
    return model.double().eval(), images + 0.3 * torch.randn_like(images)


@pytest.mark.parametrize("kind", [*FOLDED, *KEPT])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_folding_leaves_the_outputs_of_networks_of_all_kinds(kind, entrance):
    model, images = behind(entrance, kind)
    before = copy.deepcopy(model)
    folded = fold(model)
    assert deviation(before, folded, images) < 1e-10
    assert folded is model or kind in FOLDED


@pytest.mark.parametrize("kind", [*FOLDED, *MISLED])
def test_an_example_tells_where_folding_would_give_another_function(kind):
    model, images = behind(Normalize, kind)
    before = copy.deepcopy(model)
    folded = fold(model, images[:1])
    assert deviation(before, folded, images) < 1e-10
    assert (folded is model) == (kind in MISLED)
    # Negative control: without it, nobody would notice.
    assert (deviation(before, fold(copy.deepcopy(before)), images) > 0.01) == (kind in MISLED)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    "alter",
    [
        lambda model: model.register_forward_pre_hook(lambda _, given: given[0].clamp(0, 1)),
        lambda model: setattr(
            model, "forward", lambda images, forward=model.forward: forward(images.clamp(0, 1))
        ),
    ],
)
def test_an_altered_classifier_is_left_alone_though_the_example_does_not_feel_it(entrance, alter):
    model, images = behind(entrance, networks.Network)
    alter(model)
    assert fold(model, images.clamp(0, 1)) is model


def test_an_example_that_gives_logits_of_no_size_decides_nothing():
    """Folding accepts logits that are not finite: counting the votes refuses them."""
    model, images = behind(Normalize, networks.Network)
    with torch.no_grad():
        model[1].first.bias[0] = torch.nan
    assert fold(model, images)(images).isnan().any()


@pytest.mark.parametrize(
    ("kind", "left", "entrance"),
    [
        (networks.Network, 0, Center),
        (networks.PlainNorm, 0, Center),
        (networks.NormAfterSum, 2, Normalize),
        (networks.NormFirst, 1, Normalize),
        (networks.TwoConsumers, 1, Center),
        (networks.TwoReadersOfTheImage, 0, Normalize),
    ],
)
def test_what_a_convolution_alone_sees_is_folded_into_it(kind, left, entrance):
    """Normalizations right after it disappear; before it, the division does, of the input layer."""
    folded = fold(behind(Normalize, kind)[0])
    assert norms_in(folded) == left and type(folded[0]) is entrance


@pytest.mark.parametrize("padding", ["zeros", "reflect", "replicate", "circular"])
def test_division_by_the_deviation_is_exact_with_every_border(padding):
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding), nn.ReLU())
    model = nn.Sequential(Normalize(*STATISTICS), layers).double()
    images = torch.rand(2, 3, 6, 6, dtype=torch.float64)
    folded = fold(copy.deepcopy(model))
    assert type(folded[0]) is Center and deviation(model, folded, images) < 1e-12


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("training", [True, False])
def test_the_given_classifier_is_left_alone(precision, training):
    model, _ = fitting("digits_resnet8", "normalize")
    before = copy.deepcopy(model.train(training).state_dict())
    arranged = optimized_for_inference(model, CPU, precision=precision)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training == training for module in model.modules())
    assert all(
        parameter.requires_grad and parameter.dtype == torch.float64
        for parameter in model.parameters()
    )
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in arranged.parameters())
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert not any(parameter.data_ptr() in shared for parameter in arranged.parameters())


@pytest.mark.parametrize("kind", [nn.Dropout(0.5), nn.BatchNorm2d(3)])
def test_layers_that_are_random_or_learn_are_in_eval_mode(kind):
    noisy = torch.randn(4, 3, 8, 8)
    layers = nn.Sequential(nn.ReLU(), kind).train()
    assert torch.equal(
        optimized_for_inference(layers, CPU)(noisy), copy.deepcopy(layers).eval()(noisy)
    )


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.1), ("fp16", 0.02)]
)
def test_logits_in_every_precision_are_close_and_float32(precision, tolerance):
    model, images = fitting("digits_resnet8", "normalize")
    noisy = images.float().contiguous(memory_format=torch.channels_last)
    arranged = optimized_for_inference(model, CPU, precision=precision)
    assert arranged(noisy).dtype == torch.float32
    assert {parameter.dtype for parameter in arranged.parameters()} == {PRECISIONS[precision]}
    assert 0 < deviation(model, lambda each: arranged(each.float()), images) < tolerance


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_sum_of_image_and_noise_is_rounded_not_the_noise(precision):
    dtype = PRECISIONS[precision]
    image, noise = torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.75 * torch.finfo(dtype).eps)
    noise[..., 0] /= 2
    arranged = optimized_for_inference(nn.Flatten(), CPU, precision=precision)
    sum_rounded = (image + noise).to(dtype).float().flatten(1)
    assert torch.equal(arranged(image + noise), sum_rounded)
    # 1 + 0.75 eps is rounded up and 1 + 0.375 eps down; the noise alone would be represented
    # exactly.
    assert sum_rounded.unique().tolist() == [1.0, 1 + torch.finfo(dtype).eps]
    assert not torch.equal(image + noise.to(dtype).float(), sum_rounded.view_as(image))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 8, 8), (3, 32, 32), (3, 64, 64), (3, 224, 224), (3, 2000, 2000)]
)
def test_batch_on_a_cpu_lies_between_50_and_200(shape):
    batch = default_batch(nn.Identity(), shape, CPU)
    assert 16 <= batch <= 200
    assert batch == {(1, 8, 8): 200, (3, 32, 32): 100, (3, 224, 224): 16}.get(shape, batch)


sizes = st.floats(0, 1e15) | st.integers(0, 10**15)


@given(sizes, sizes, sizes)
def test_batch_that_fits_is_a_power_of_two_that_grows_with_the_memory(free, more, per_image):
    batch = batch_that_fits(free, per_image)
    assert batch in {2**exponent for exponent in range(13)}
    # A power of two is exact, the quotient that it is compared with is not.
    assert batch == 1 or 2 * batch * max(per_image, 1) <= free * (1 + 1e-12)
    assert batch == 4096 or 4 * batch * max(per_image, 1) > free * (1 - 1e-12)
    assert batch <= batch_that_fits(max(free, more), per_image)
    assert batch >= batch_that_fits(free, max(per_image, more))


@pytest.mark.slow  # nearly a minute, all of it in the compiler; .ci/run runs it
@needs_compiler
@torch.inference_mode()
def test_compiled_logits_are_close_and_by_no_more_than_rounding_those_of_another_row(
    own_compiler_cache,
):
    model, images = behind(Normalize, networks.Network)
    noisy = images.float().repeat(8, 1, 1, 1).contiguous(memory_format=torch.channels_last)
    noisy += 0.1 * torch.randn_like(noisy)
    eager = optimized_for_inference(model, CPU)
    compiled = CompiledClassifier(optimized_for_inference(model, CPU))
    logits, order = compiled(noisy), torch.randperm(32)
    assert any(own_compiler_cache.rglob("*.so")), "something was compiled"
    torch.testing.assert_close(logits, eager(noisy), rtol=0, atol=1e-4)
    permuted = noisy[order].contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(permuted), logits[order], rtol=0, atol=1e-5)
    assert torch.equal(compiled(noisy), logits), "the same in the same row"


def test_kernels_of_a_gpu_are_not_chosen_by_a_race(own_compiler_cache, monkeypatch):
    """Processes would round differently."""
    import torch._inductor.config as inductor

    voter = optimized_for_inference(nn.Linear(2, 2), CPU)
    name, chosen = (
        ("deterministic", True)
        if hasattr(inductor, "deterministic")
        else ("dynamic_scale_rblock", False)
    )
    monkeypatch.setattr(inductor, name, not chosen)  # other tests of this process may have chosen
    CompiledClassifier(voter)
    assert getattr(inductor, name) is chosen


def test_interruption_gives_up_kernels_that_wait_to_be_compiled():
    """Those at work are waited for, so that they end before the process. Later ones can be
    compiled.
    """
    import torch._inductor.config as inductor
    from torch._inductor.async_compile import AsyncCompile

    kernels: list[Future] = []

    def compiled(images: torch.Tensor) -> torch.Tensor:
        until_given_up = partial(wait_for, lambda: kernels[3:] and kernels[-1].cancelled())
        kernels.extend(AsyncCompile.pool().submit(until_given_up) for _ in range(4))
        raise KeyboardInterrupt

    with inductor.patch(compile_threads=2):
        AsyncCompile.pool.cache_clear()
        with pytest.raises(KeyboardInterrupt):
            call_compiled(compiled, torch.zeros(1))
        assert [kernel.cancelled() for kernel in kernels] == [False, False, True, True]
        assert all(kernel.done() for kernel in kernels)
        assert AsyncCompile.pool().submit(int).result() == 0
        end_compiling()


@pytest.mark.parametrize(
    "compiled", [CompiledClassifier, lambda voter: CompiledForSizes(voter, {5})]
)
def test_compiling_without_a_compiler_is_a_clear_error(compiled, own_compiler_cache):
    import torch._inductor.config as inductor

    model = nn.Sequential(nn.Softplus(), nn.Flatten())
    with torch.inference_mode(), inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(UserError, match="--compile failed.*C\\+\\+ compiler"):
            compiled(optimized_for_inference(model, CPU))(torch.rand(5, 1, 8, 8))


DETERMINISTIC = """
import os
import torch
from smoothadv.voting.classifier import make_deterministic
for given, kept in [(None, ":4096:8"), (":16:8", ":16:8")]:
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if given:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = given
    make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == kept
assert torch.are_deterministic_algorithms_enabled()
assert not torch.is_deterministic_algorithms_warn_only_enabled()
assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
"""


def test_deterministic_kernels_are_asked_for_everywhere(warm, tmp_path):
    """In a separate process, since the setting holds for a whole process."""
    done = warm.run([sys.executable, "-c", DETERMINISTIC], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_all_that_votes_has_one_memory_format(monkeypatch, layout):
    for module in ("classifier", "counter", "folding"):
        monkeypatch.setattr(f"smoothadv.voting.{module}.layout_on", lambda *where: layout)
    network, seen = optimized_for_inference(get_architecture("cifar_resnet20", "cifar10"), CPU), []
    for layer in (each for each in network.modules() if isinstance(each, nn.Conv2d)):
        layer.register_forward_pre_hook(lambda layer, given: seen.extend((*given, layer.weight)))
    counter = VoteCounter([network], [10], 16, CPU)
    counter.logits_digest((3, 32, 32))
    check_repeatable(counter, torch.rand(3, 32, 32), GaussianNoise(0.25, 0).stream(0, CPU))
    assert seen and all(each.is_contiguous(memory_format=layout) for each in seen)


# Ensembles


@pytest.mark.parametrize("mean", ["logits", "probabilities"])
def test_gradients_go_through_the_mean(mean):
    torch.manual_seed(0)
    members = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double() for _ in range(3)]
    images = torch.rand(5, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    logits = Ensemble(members, mean)(images)
    outputs = [member(images) for member in members]
    if mean == "probabilities":
        expected = (sum(output.softmax(1) for output in outputs) / 3).log()
        torch.testing.assert_close(logits.exp().sum(1), torch.ones(5, dtype=torch.float64))
    else:
        expected = sum(outputs) / 3
    torch.testing.assert_close(logits, expected)
    each = [
        torch.autograd.grad(value[:, 1].sum(), images, retain_graph=True)[0]
        for value in (logits, expected)
    ]
    torch.testing.assert_close(*each)


def test_gradients_survive_where_probabilities_are_zero_in_float32():
    members = [LinearClassifier([300.0, 300.0], bias, torch.float32) for bias in (0.0, 10.0)]
    images = torch.ones(1, 1, 1, 2, requires_grad=True)
    logits = Ensemble(members, "probabilities")(images)
    (gradient,) = torch.autograd.grad(logits[0, 0], images)
    assert logits.isfinite().all() and (gradient < -200).all()


class Table(nn.Module):
    """Logits [N, K] by number: an image holds the number of its row."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


def numbered(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).reshape(count, 1, 1, 1)


@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.integers(1, 50))
def test_consensus_votes_like_all_members_also_at_ties(data, count, classes, rows):
    """Members answer certainly or nearly alike, so that sums tie, nearly tie, or are decided with
    members left.
    """
    logits = st.lists(
        st.sampled_from([0.0, 1e-7, -1e-7, 2**-23, 1e-3, 5.0, 40.0, 200.0, -40.0]),
        min_size=classes,
        max_size=classes,
    )
    table = torch.tensor(data.draw(st.lists(logits, min_size=count * 4, max_size=count * 4)))
    chosen = table.reshape(count, 4, classes)[:, torch.arange(rows) % 4]
    voter = VotingClassifier(
        Ensemble([Table(one) for one in chosen], "probabilities"), torch.float32, False
    )
    full, few = (voter.scores(numbered(rows), consensus) for consensus in (False, True))
    assert torch.equal(full.argmax(1), few.argmax(1))
    expected = chosen[0].softmax(1)
    for one in chosen[1:]:
        expected = expected + one.softmax(1)
    torch.testing.assert_close(full, expected)


def test_a_lead_of_exactly_the_members_left_decides_nothing():
    """After three of four members that are certain of a class, image 0 leads by 3, image 1 by 1,
    and 1 is left.
    """
    certain = torch.tensor([[200.0, 0.0], [0.0, 200.0]])
    answers = ((0, 0), (0, 0), (0, 1), (1, 1))  # by member, of the images 0 and 1
    asked = [Recorder(Table(certain[list(answer)])) for answer in answers]
    total = Ensemble(asked, "probabilities").summed_probabilities(numbered(2), consensus=True)
    assert total.tolist() == [[3.0, 0.0], [2.0, 2.0]]
    assert [len(member.batches) for member in asked] == [1, 1, 1, 1]
    assert asked[3].batches[0].flatten().tolist() == [1.0, 1.0], (
        "image 0 is decided, and its place is padding"
    )


def test_rounding_cannot_decide_a_vote_that_the_whole_sum_does_not():
    """Class 1 leads by about 2 after three members, and two are certain of class 0: all sums nearly
    tie.
    """
    torch.manual_seed(0)
    rivals = 0.1 + 0.02 * torch.rand(3, 100_000)
    first = 0.78 + 0.02 * torch.rand(2, 100_000)
    leaders = torch.cat([first, 2 + rivals.sum(0, keepdim=True) - first.sum(0, keepdim=True)])
    unsure = torch.stack([rivals, leaders, 1 - rivals - leaders], dim=2).log()
    members = [
        Table(one) for one in (*unsure, *torch.tensor([200.0, 0.0, 0.0]).expand(2, 100_000, 3))
    ]
    ensemble, images = Ensemble(members, "probabilities"), numbered(100_000)
    full, few = (
        ensemble.summed_probabilities(images, consensus).argmax(1) for consensus in (False, True)
    )
    assert torch.equal(full, few)
    begun = unsure[0].softmax(1) + unsure[1].softmax(1) + unsure[2].softmax(1)
    assert ((begun[:, 1] - begun[:, 0] > 2) & (full == 0)).any(), (
        "without a margin some votes would be others"
    )


@pytest.fixture(scope="module")
def voter() -> VotingClassifier:
    """Three networks with random weights, sharpened so that many votes are clear."""
    torch.manual_seed(0)
    members = [get_architecture("digits_resnet8", "digits").eval() for _ in range(3)]
    for member in members:
        settle_batch_norms(member, torch.rand(64, 1, 8, 8))
        member[1].fc.weight.data *= 20
    return optimized_for_inference(Ensemble(members, "probabilities"), CPU, torch.rand(1, 8, 8))


def test_members_are_folded_and_fewer_are_asked_in_passes_of_one_shape(voter):
    assert voter.is_folded and not any(isinstance(part, nn.BatchNorm2d) for part in voter.modules())
    images = torch.rand(200, 1, 8, 8).to(memory_format=torch.channels_last)
    shapes: list[tuple[int, ...]] = []
    hooks = [
        member.register_forward_hook(
            lambda module, inputs, logits: shapes.append(tuple(inputs[0].shape))
        )
        for member in voter.classifier.members
    ]
    few = voter.scores(images)
    passes = len(shapes)
    assert torch.equal(few.argmax(1), voter.scores(images, consensus=False).argmax(1))
    assert shapes[:2] == [(200, 1, 8, 8)] * 2 and set(shapes[2:passes]) == {(32, 1, 8, 8)}
    assert 2 < passes < 9 == len(shapes) - passes
    for hook in hooks:
        hook.remove()


def test_votes_are_those_of_the_whole_sum_however_draws_are_packed(voter):
    """The spot check of --sound passes, and the digest of the logits needs all members."""
    noise, image = GaussianNoise(0.25, 0), torch.rand(1, 8, 8)
    counter = VoteCounter([voter.scores], [10], 64, CPU)
    check_repeatable(counter, image, noise.stream(0, CPU))
    full = VoteCounter([lambda images: voter.scores(images, consensus=False)], [10], 64, CPU)
    assert full.logits_digest((1, 8, 8)) != counter.logits_digest((1, 8, 8))


def test_a_logit_that_is_not_finite_makes_no_vote():
    infinite = Table(torch.tensor([[0.0, -math.inf], [0.0, 1.0]]))
    ensemble = Ensemble([Table(torch.eye(2)), infinite], "probabilities")
    total = ensemble.summed_probabilities(numbered(2), consensus=True)
    assert total.isfinite().all(1).tolist() == [False, True]
