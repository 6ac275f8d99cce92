"""Base classifiers: the published sizes, keys and initialisation, and the input layer in front of
them. Denoisers: they keep the shape of images, fold, and load as they were released.
"""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import kstest
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import ARCHITECTURES, get_architecture
from smoothadv.architectures.denoisers import DENOISERS, Denoised, DnCNN, LocallySmoothed, Resized
from smoothadv.base.errors import UserError
from smoothadv.base.settings import FILTERS
from smoothadv.datasets import describe_dataset
from smoothadv.integer.network import IntegerNetwork
from smoothadv.models import load as models_load
from smoothadv.models.checkpoint import read_checkpoint
from smoothadv.models.load import BaseClassifier, load_classifier, load_denoiser
from smoothadv.models.spec import ModelSpec
from smoothadv.voting.folding import fold
from support.networks import settle_batch_norms
from support.refusals import refusal
from support.released import CIFAR_MEAN, CIFAR_STD, randomise_batch_norms


@pytest.mark.parametrize(
    "arch, dataset, parameters, entries",
    [
        ("cifar_resnet110", "cifar10", 1_730_714, 668),
        ("imagenet32_resnet110", "imagenet32", 1_795_064, 668),
        ("cifar_resnet20", "cifar10", 272_474, 128),
        ("cifar100_resnet110", "cifar100", 1_736_564, 668),
        ("resnet50", "imagenet", 25_557_032, 320),
        ("wide_resnet28_10", "cifar10", 36_479_194, 155),
        ("lenet", "mnist", 431_080, 8),
    ],
)
def test_sizes_are_the_published_ones(arch, dataset, parameters, entries):
    model = get_architecture(arch, dataset)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(model.state_dict()) == entries


@pytest.mark.parametrize(
    ("input_layer", "constants"),
    [("normalize", (CIFAR_MEAN, CIFAR_STD)), ("center", (CIFAR_MEAN, (1, 1, 1))), ("none", ())],
)
def test_input_layer_comes_first_and_its_constants_are_buffers_of_no_file(input_layer, constants):
    model = get_architecture("cifar_resnet20", "cifar10", input_layer).double()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    mean, std = torch.tensor(constants or ((0, 0, 0), (1, 1, 1)))[:, :, None, None]
    torch.testing.assert_close(model[0](images), (images - mean) / std, check_dtype=False)
    buffers = {name: value.dtype for name, value in model[0].named_buffers()}
    names = {"normalize": ["mean", "std"], "center": ["mean"], "none": []}[input_layer]
    assert buffers == dict.fromkeys(names, torch.float64), "which follow the model"
    assert not list(model[0].parameters())


def test_convolutions_start_normal_with_variance_2_over_kernel_area_times_outputs():
    """Kolmogorov-Smirnov tests of 111 layers, each with a false alarm in a million, of a fixed
    seed.
    """
    torch.manual_seed(0)
    model = get_architecture("cifar_resnet110", "cifar10")
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(layers) == 111
    for layer in layers:
        weights, area = layer.weight.detach().flatten(), layer.weight[0, 0].numel()
        assert kstest(weights * (area * layer.out_channels / 2) ** 0.5, "norm").pvalue > 1e-6
        # Negative control: the other convention, of inputs, where they differ.
        other = weights * (area * layer.in_channels / 2) ** 0.5
        is_alike = layer.in_channels == layer.out_channels or len(weights) < 1000
        assert is_alike or kstest(other, "norm").pvalue < 1e-6


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_trains_on_a_dataset_that_it_fits(arch):
    fitting = {"lenet": "mnist", "resnet50": "imagenet"}  # others are for images of any size
    description = describe_dataset(fitting.get(arch, "digits"))
    model = get_architecture(arch, description)
    images = torch.rand(2, *description.image_shape, generator=torch.Generator().manual_seed(0))
    logits = model(images)
    assert model.training
    assert logits.shape == (2, description.num_classes) and logits.isfinite().all()
    nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(
        gradient is not None and gradient.isfinite().all() for gradient in gradients.values()
    )
    assert all(
        gradient.abs().max() > 0 for name, gradient in gradients.items() if name.startswith("1.fc")
    )
    assert next(iter(gradients.values())).abs().max() > 0  # the first layer learns too


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cifar_resnet11 cifar10", "'cifar_resnet11'.*did you mean 'cifar_resnet110'.*resnet50"),
        ("cifar_resnet20 cifar10 normalise", "'normalise'.*normalize, center"),
        ("lenet digits", r"digits are \[1, 8, 8\]"),
        ("lenet cifar10", r"cifar10 are \[3, 32, 32\]"),
        ("resnet50 digits", "3 channels; digits has 1"),
    ],
)
def test_what_is_unknown_or_does_not_fit_the_images_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        get_architecture(*words.split())


def test_released_lenet_is_loaded_without_an_input_layer(tmp_path):
    random = torch.Generator().manual_seed(0)
    state = {}
    shapes = {"conv1": (20, 1, 5, 5), "conv2": (50, 20, 5, 5), "fc1": (500, 800), "fc2": (10, 500)}
    for name, shape in shapes.items():
        state[f"1.{name}.weight"] = 0.1 * torch.randn(shape, generator=random)
        state[f"1.{name}.bias"] = torch.randn(shape[0], generator=random)
    path = tmp_path / "checkpoint.pth.tar"
    torch.save({"epoch": 90, "arch": "lenet", "state_dict": state, "optimizer": {}}, path)
    images = torch.rand(2, 1, 28, 28, generator=random)
    x = images
    for name in ("1.conv1", "1.conv2"):
        x = F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"]).relu()
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    x = F.linear(x.reshape(2, 800), state["1.fc1.weight"], state["1.fc1.bias"]).relu()
    expected = F.linear(x, state["1.fc2.weight"], state["1.fc2.bias"])
    torch.testing.assert_close(load_classifier(path, "mnist", "none")(images), expected)


def plain_wide_resnet(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """WRN-16-k in eval mode, with weights by their usual names."""

    def activated(x: torch.Tensor, name: str) -> torch.Tensor:
        of = [weights[f"{name}.{part}"] for part in ("running_mean", "running_var")]
        return F.batch_norm(x, *of, weights[f"{name}.weight"], weights[f"{name}.bias"]).relu()

    x = F.conv2d(x, weights["conv1.weight"], padding=1)
    for stage, block in itertools.product((1, 2, 3), (0, 1)):
        name, stride = f"block{stage}.layer.{block}", 2 if (stage > 1 and block == 0) else 1
        first = activated(x, f"{name}.bn1")
        out = F.conv2d(first, weights[f"{name}.conv1.weight"], None, stride, 1)
        out = F.conv2d(activated(out, f"{name}.bn2"), weights[f"{name}.conv2.weight"], padding=1)
        if block == 0:
            x = F.conv2d(first, weights[f"{name}.convShortcut.weight"], None, stride)
        x = x + out
    x = activated(x, "bn1").mean((2, 3))
    return F.linear(x, weights["fc.weight"], weights["fc.bias"])


def test_wide_resnet_is_the_published_function_of_its_weights():
    torch.manual_seed(0)
    model = get_architecture("wide_resnet16_4", "cifar10", "none").double()
    images = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    settle_batch_norms(model, images)
    expected = plain_wide_resnet(model[1].state_dict(), images)
    torch.testing.assert_close(model.eval()(images), expected)


def trained_looking(name: str) -> nn.Module:
    """A denoiser with random weights and statistics throughout, in eval mode."""
    torch.manual_seed(0)
    network = DENOISERS[name](describe_dataset("digits"))
    randomise_batch_norms(network)
    for weight in network.parameters():
        if not weight.any():
            nn.init.normal_(weight, 0, 0.05)
    return network.eval()


@pytest.mark.parametrize("name", DENOISERS)
def test_denoiser_keeps_the_shape_treats_images_alone_and_begins_as_the_identity(name):
    new, trained = DENOISERS[name](describe_dataset("digits")).eval(), trained_looking(name)
    for height, width in ((8, 8), (9, 13), (17, 8)):
        images = torch.randn(3, 1, height, width)
        assert torch.equal(new(images), images)
        denoised = trained(images)
        assert denoised.shape == images.shape and not torch.allclose(denoised, images)
        assert torch.allclose(trained(images[1:2]), denoised[1:2], atol=1e-5)


def test_dncnn_is_the_image_minus_a_chain_of_convolutions():
    network, images = trained_looking("digits_dncnn").double(), torch.randn(2, 1, 8, 8).double()
    layers = network.state_dict()
    hidden = F.relu(F.conv2d(images, layers["dncnn.0.weight"], layers["dncnn.0.bias"], padding=1))
    for number in range(2, 20, 3):
        hidden = F.conv2d(hidden, layers[f"dncnn.{number}.weight"], padding=1)
        names = "running_mean", "running_var", "weight", "bias"
        mean, variance, weight, bias = (
            layers[f"dncnn.{number + 1}.{name}"][:, None, None] for name in names
        )
        hidden = F.relu((hidden - mean) / (variance + 1e-4).sqrt() * weight + bias)
    hidden = F.conv2d(hidden, layers["dncnn.20.weight"], padding=1)
    assert torch.allclose(network(images), images - hidden, atol=1e-12)


def test_denoiser_and_classifier_are_folded_without_changing_the_function():
    classifier = get_architecture("digits_resnet8", "digits")
    randomise_batch_norms(classifier)
    whole = Denoised(trained_looking("digits_dncnn"), classifier).eval().double()
    images = torch.rand(4, 1, 8, 8).double()
    folded = fold(whole, images[:1])
    kinds = {type(module) for module in folded.modules()}
    assert folded is not whole and nn.BatchNorm2d not in kinds
    assert torch.allclose(folded(images), whole(images), atol=1e-9)
    assert torch.equal(whole(images), whole.classifier(whole.denoiser(images)))


@pytest.mark.parametrize(("arch", "prefix"), [("cifar_dncnn", ""), ("imagenet_dncnn", "module.")])
def test_released_checkpoint_is_read(arch, prefix, tmp_path):
    """By the names of the code of Salman et al. (2020)."""
    network, path = DnCNN(3, 17, 64), tmp_path / "checkpoint.pth.tar"
    randomise_batch_norms(network)
    weights = {prefix + name: value for name, value in network.state_dict().items()}
    torch.save({"epoch": 90, "arch": arch, "state_dict": weights, "optimizer": {}}, path)
    loaded, content = load_denoiser(path, describe_dataset("cifar10"))
    images = torch.rand(1, 3, 32, 32)
    assert content["arch"] == arch and torch.equal(loaded(images), network.eval()(images))
    refusal(load_classifier, path, "cifar10", names="is a denoiser: name it with --denoiser")
    refusal(load_denoiser, path, describe_dataset("digits"), names="_dncnn for dataset 'digits'")


@pytest.mark.parametrize(
    "given", [{"denoiser": "any.pth.tar"}, {"resize": "16"}, {"local_noise": "0.25"}], ids=str
)
def test_network_of_integers_takes_nothing_before_it(given, monkeypatch):
    integers = IntegerNetwork((1, 8, 8), 0, torch.zeros(1), ())
    base = BaseClassifier(nn.Sequential(integers), {}, [])
    monkeypatch.setattr(models_load, "_from_checkpoints", lambda spec, dataset: base)
    flag = "--" + next(iter(given)).replace("_", "-")
    spec = ModelSpec(model="any", dataset="digits", sigma=0.25, **given)
    refusal(models_load.load, spec, names=f"whole grey levels: leave {flag} out")


def test_classifier_is_no_denoiser_and_the_field_decides(tmp_path):
    path, content = tmp_path / "c.pth.tar", {"epoch": 1, "arch": "digits_resnet8", "state_dict": {}}
    torch.save(content, path)
    refusal(read_checkpoint, path, True, names="is no denoiser: train_denoiser makes one")
    torch.save({**content, "arch": "gone", "denoiser": True}, path)
    refusal(read_checkpoint, path, True, names="unknown denoiser 'gone'")


@pytest.mark.parametrize("name", FILTERS)
def test_images_are_resized_before_the_model_and_not_clipped(name):
    """As Pillow resizes floats, channel by channel: with antialiasing, where images shrink, too."""
    images = torch.rand(2, 3, 12, 9, generator=torch.Generator().manual_seed(0))
    for side in (24, 5):
        found = Resized(nn.Identity(), side, name)(images)
        for image, small in zip(images.flatten(0, 1), found.flatten(0, 1)):
            picture = Image.fromarray(image.numpy(), mode="F")
            expected = picture.resize((side, side), Image.Resampling[name.upper()])
            assert torch.allclose(small, torch.tensor(np.array(expected)), atol=1e-5)
    edge = torch.zeros(1, 1, 4, 4)
    edge[..., :2] = 1
    larger = Resized(nn.Identity(), 16, "bicubic")(edge)
    assert larger.min() < -0.01 and larger.max() > 1.01


def test_local_noise_is_the_mean_of_the_probabilities_of_fixed_copies():
    torch.manual_seed(0)
    network, noise = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), torch.randn(5, 1, 4, 4)
    images = torch.rand(7, 1, 4, 4)
    smoothed = LocallySmoothed(network, noise)
    for image, found in zip(images, smoothed(images)):
        copies = torch.stack([network((image + one)[None])[0].softmax(0) for one in noise])
        assert torch.allclose(found.exp(), copies.mean(0), atol=1e-6)
    assert torch.equal(smoothed(images)[2:3], smoothed(images)[2:3])
    assert not torch.allclose(found.exp(), network(images)[-1].softmax(0), atol=1e-3)
