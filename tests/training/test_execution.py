"""However training is executed - compiled, in bfloat16, channels last - it trains the same up to
rounding. Behind a frozen denoiser it trains its composition with the classifier, of which only the
classifier changes; and what else an update does to gradients.

The folded form that is attacked is the model in eval mode, in its logits and its gradients. Making
it leaves the model unchanged; its own parameters need no gradients and are in its dtype.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck, ResNet

from smoothadv.architectures import get_architecture
from smoothadv.architectures.denoisers import Denoised
from smoothadv.architectures.input_layers import Normalize
from smoothadv.attacks import ATTACKS
from smoothadv.attacks.estimators import plug_in
from smoothadv.base.distributed import Processes
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import InMemoryImages
from smoothadv.noise import Purpose
from smoothadv.objectives.ft_cadis import FTCADIS
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.training.execution import Execution, folded_form
from smoothadv.training.update import Address, Update
from support import networks
from support.compiler import needs_compiler
from support.compiler import own_compiler_cache as own_compiler_cache
from support.models import Recorder
from support.networks import Network, network_class, settle_batch_norms

CPU, FULL, LAST = torch.device("cpu"), torch.contiguous_format, torch.channels_last
SIGMA, RATE = 0.25, 0.1
OBJECTIVES = {
    "gaussian": Gaussian(SIGMA),
    "smoothadv": SmoothAdv(ATTACKS["PGD"](0.5, 2), SIGMA, 2, warmup=0),
    "ft-cadis": FTCADIS(SIGMA, num_noise_vec=3, noise_steps=2),
}
IMAGES = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 1, 0, 3])


def small_network() -> nn.Module:
    """With softplus, whose slope does not leap where rounding decides."""
    layers = [
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Softplus(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Softplus(),
        nn.AvgPool2d(8),
        nn.Flatten(),
        nn.Linear(4, 10),
    ]
    return nn.Sequential(nn.Identity(), nn.Sequential(*layers))


def network(execution: Execution, arch: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = get_architecture(arch, "digits") if arch else small_network()
    settle_batch_norms(model, IMAGES)
    return execution.prepare(model, CPU)


def updater(execution: Execution, arch: str | None = None) -> Update:
    model = network(execution, arch)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    return Update(
        model,
        OBJECTIVES["smoothadv"],
        optimizer,
        execution,
        Processes(),
        CPU,
        IMAGES[:2],
        len(IMAGES),
    )


def train(update: Update, steps: int = 2) -> list[float]:
    """The loss of each of ``steps`` updates."""
    sums = [
        update(IMAGES.contiguous(memory_format=LAST), LABELS, torch.arange(6), Address(1, 0, step))
        for step in range(steps)
    ]
    return [float(each[0] / each[2]) for each in sums]


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of any weight or statistic."""
    pairs = zip(model.state_dict().values(), other.state_dict().values())
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@needs_compiler
@pytest.mark.slow
def test_compiled_training_is_eager_training(own_compiler_cache):
    """Half a minute, most of it to compile."""
    compiled, eager = (updater(Execution(compile=compile)) for compile in (True, False))
    start = copy.deepcopy(eager.model)
    assert train(compiled) == pytest.approx(train(eager), abs=1e-4)
    assert any(own_compiler_cache.rglob("*.so")), "something was compiled"
    assert largest_difference(compiled.model, eager.model) < 1e-4
    assert largest_difference(start, eager.model) > 1e-2, "it did train"

    noise = 0.25 * torch.randn(6, 2, 1, 8, 8)
    estimates = []
    for update in (compiled, eager):
        update.refresh_folded()
        estimates.append(plug_in(update.folded.eval(), IMAGES, LABELS, noise))
    ours, theirs = estimates
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=0, atol=1e-4)
    assert theirs.gradient.abs().max() > 1e-3

    # The smaller last batch of an epoch runs uncompiled, with the same weights.
    for update in (compiled, eager):
        update(IMAGES[:5], LABELS[:5], torch.arange(5), Address(1, 0, 9))
    assert largest_difference(compiled.model, eager.model) < 1e-4


def test_other_sizes_than_those_of_batches_run_uncompiled(monkeypatch):
    """With a stand-in for the compiler, which records the shapes that reach it."""
    reached = []

    def compile(module: nn.Module, dynamic: bool):
        assert not dynamic
        return lambda images: (reached.append(tuple(images.shape)), module(images))[1]

    monkeypatch.setattr(torch, "compile", compile)
    module = Recorder(nn.Linear(2, 3))
    compiled = Execution(compile=True).compiled(module, {4, 8})
    # In whatever order: a resumed run may begin with the smaller last batch of an epoch.
    shapes = [(3, 2), (4, 2), (4, 2), (3, 2), (8, 2), (5, 2), (4, 2)]
    for shape in shapes:
        assert torch.equal(compiled(torch.ones(shape)), module.model(torch.ones(shape)))
    assert reached == [(4, 2), (4, 2), (8, 2), (4, 2)]
    assert [batch.shape for batch in module.batches] == shapes
    names = ["module.model.weight", "module.model.bias"]
    assert list(compiled.state_dict()) == names, "each weight once"
    assert next(compiled.parameters()) is module.model.weight
    assert Execution(compile=False).compiled(module, {4}) is module


@pytest.mark.parametrize("arch", [None, "digits_resnet8"])
def test_bfloat16_trains_nearly_the_same_with_weights_in_float32(arch):
    coarse, fine = (updater(Execution(precision), arch) for precision in ("bf16", "fp32"))
    start = copy.deepcopy(fine.model)
    assert train(coarse) == pytest.approx(train(fine), rel=0.05)
    floats = [value for value in coarse.model.state_dict().values() if value.is_floating_point()]
    assert {value.dtype for value in floats} == {torch.float32}
    assert {each.grad.dtype for each in coarse.model.parameters()} == {torch.float32}
    momenta = [each["momentum_buffer"] for each in coarse.optimizer.state.values()]
    assert {momentum.dtype for momentum in momenta} == {torch.float32}
    # The precision makes a difference, but a small one compared to what training changed.
    moved, apart = (
        sum(
            (theirs - ours).square().sum()
            for ours, theirs in zip(other.parameters(), fine.model.parameters())
        )
        for other in (start, coarse.model)
    )
    assert 1e-4 < (apart / moved).sqrt() < 0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_convolutions_compute_in_the_precision_and_the_loss_in_float32(precision):
    update, dtypes = updater(Execution(precision)), []
    update.model[1][3].register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.dtype)
    )
    (loss,) = train(update, steps=1)
    assert dtypes == [{"fp32": torch.float32, "bf16": torch.bfloat16}[precision]], (
        "the attack's pass is not this one"
    )
    assert torch.tensor(loss, dtype=torch.bfloat16).double() != loss
    assert {each.dtype for each in update.folded.parameters() if each.dim() == 4} == set(dtypes)


@pytest.mark.parametrize(
    ("precision", "layout", "other"),
    [("fp32", LAST, FULL), ("bf16", LAST, FULL), ("fp32", FULL, LAST)],
)
def test_weights_have_the_memory_format_of_the_device_and_keep_it(
    monkeypatch, precision, layout, other
):
    """So have the images, in whichever they come."""
    for module in ("training.execution", "training.update", "voting.folding"):
        monkeypatch.setattr(f"smoothadv.{module}.layout_on", lambda *where: layout)
    update = updater(Execution(precision), "digits_resnet8")
    train(update)
    # A kernel of one pixel or one channel has both memory formats at once.
    weights = [
        each
        for each in (*update.model.parameters(), *update.folded.parameters())
        if each.dim() == 4 and each[0, 0].numel() > 1 < each.shape[1]
    ]
    assert len(weights) >= 10
    weights += [weight.grad for weight in weights if weight.grad is not None]
    assert all(weight.is_contiguous(memory_format=layout) for weight in weights)
    assert not any(weight.is_contiguous(memory_format=other) for weight in weights)
    update.compute = lambda inputs: inputs.images
    images = torch.rand(6, 3, 8, 8).to(memory_format=other)
    given = update(images, LABELS, torch.arange(6), Address(1, 0, 0))
    assert given.is_contiguous(memory_format=layout)


def test_synchronized_norm_replaces_the_layers_and_keeps_the_model():
    """In eval mode it is the same function, and the attack has a form of it."""
    plain, synchronized = (network(Execution(synchronized_norm=each)) for each in (False, True))
    kinds = [{type(layer) for layer in model.modules()} for model in (plain, synchronized)]
    assert nn.SyncBatchNorm in kinds[1] - kinds[0] and nn.BatchNorm2d in kinds[0] - kinds[1]
    assert synchronized.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(synchronized.eval()(IMAGES), plain.eval()(IMAGES))


def denoiser_and_classifier() -> tuple[nn.Module, nn.Module]:
    """A denoiser, which would be another one in train mode, and a classifier."""
    torch.manual_seed(2)
    denoiser = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1), nn.Tanh())
    denoiser[1].running_var.fill_(0.5)
    classifier = nn.Sequential(nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    return denoiser.double().eval().requires_grad_(False), classifier.double()


def update_of(objective, denoiser, classifier, **more) -> Update:
    optimizer = torch.optim.SGD(classifier.parameters(), RATE)
    example = IMAGES[:2].to(next(classifier.parameters()).dtype)
    given = classifier, objective, optimizer, Execution(), Processes(), CPU, example
    return Update(*given, images_at_a_time=4, denoiser=denoiser, **more)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_is_the_training_of_the_composition(name):
    """By hand, one micro-batch after the other; ft-cadis moves what the denoiser leaves."""
    denoiser, classifier = denoiser_and_classifier()
    before, objective = copy.deepcopy(denoiser.state_dict()), OBJECTIVES[name]
    other, address = copy.deepcopy(classifier), Address(3, 20, 5)
    update = update_of(objective, denoiser, classifier)
    sums = update(IMAGES.double(), LABELS, torch.arange(6), address)
    generator = address.generator(CPU, Purpose.OBJECTIVE)
    batch = objective.batch(IMAGES.double(), LABELS, 20, generator, 6)
    composed, choices = Denoised(denoiser, other), address.generator(CPU, Purpose.ATTACK_CHOICES, 0)
    total = 0.0
    for part in (slice(0, 4), slice(4, 6)):
        one, seen = batch.part(part), composed
        if name == "ft-cadis":
            noisy = (one.images[:, None] + one.noise).flatten(0, 1)
            left = denoiser(noisy).unflatten(0, one.noise.shape[:2]) - one.images[:, None]
            one, seen = replace(one, noise=left), other
        loss = objective.loss(seen, one, objective.attacked(seen, one, choices)).loss
        (loss * len(one.images) / 6).backward()
        total += loss.item() * len(one.images) * objective.copies
    torch.optim.SGD(other.parameters(), RATE).step()
    for ours, theirs in zip(classifier.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert sums[0].item() == pytest.approx(total)
    alone = update_of(objective, None, denoiser_and_classifier()[1])
    assert alone(IMAGES.double(), LABELS, torch.arange(6), address)[0].item() != pytest.approx(
        total
    )
    assert not denoiser.training and all(
        torch.equal(value, before[key]) for key, value in denoiser.state_dict().items()
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_evaluation_is_behind_the_denoiser(name):
    """Also that of an objective that is trained on what the denoiser leaves."""
    denoiser, classifier = (network.float() for network in denoiser_and_classifier())
    grey = (255 * IMAGES).to(torch.uint8)
    with torch.no_grad():
        answers = Denoised(denoiser, classifier)(grey / 255).argmax(1)
        assert (classifier(grey / 255).argmax(1) != answers).any(), "a control"
    images = InMemoryImages(grey, answers, describe_dataset("digits"))
    update = update_of(OBJECTIVES[name], denoiser, classifier)
    found = update.evaluate(images, torch.arange(6), 6, Address(3, 20, 5))
    assert found["test_clean_accuracy"] == 1


@pytest.mark.parametrize("most", [1e-3, 1e9])
def test_gradient_of_each_tensor_is_clipped_to_the_norm(most):
    """The weights change by that; a large norm changes nothing."""
    denoiser, classifier = denoiser_and_classifier()
    start = copy.deepcopy(classifier)
    plain = copy.deepcopy(classifier)
    update_of(OBJECTIVES["gaussian"], denoiser, plain)(
        IMAGES.double(), LABELS, torch.arange(6), Address(3, 20, 5)
    )
    update = update_of(OBJECTIVES["gaussian"], denoiser, classifier, clip_gradients=most)
    update(IMAGES.double(), LABELS, torch.arange(6), Address(3, 20, 5))
    for first, free, clipped in zip(
        start.parameters(), plain.parameters(), classifier.parameters(), strict=True
    ):
        step, wanted = (clipped - first) / RATE, (free - first) / RATE
        assert wanted.norm() > 1e-3, "a control"
        expected = wanted * min(1.0, most / (wanted.norm().item() + 1e-6))
        torch.testing.assert_close(step, expected, rtol=1e-6, atol=1e-12)


# The form that is attacked


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
    "kind", [*networks.KEPT, networks.HookedLayer, *networks.MISLED, InsistsOnFloat32]
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
